// The second stage of every gradient of a vector: parts summed in their order.
#include "cuda/common.cuh"

namespace fastbert {
namespace {

constexpr int kColumns = 32, kSlices = 8;

__device__ __forceinline__ void store_element(const Vector& out, int64_t column, float value) {
  switch (out.dtype) {
    case Dtype::kFloat:
      static_cast<float*>(out.data)[column] = value;
      return;
    case Dtype::kBFloat16:
      static_cast<bf16*>(out.data)[column] = from_float<bf16>(value);
      return;
    case Dtype::kHalf:
      static_cast<fp16*>(out.data)[column] = from_float<fp16>(value);
      return;
  }
}

// A thread sums every eighth part of a column, the first slice then adds the slices.
__global__ void __launch_bounds__(kColumns* kSlices) sum_parts_kernel(const SumParts a) {
  FASTBERT_SHARED(float, of_slices, kSlices* kColumns);
  const int lane = static_cast<int>(threadIdx.x), slice = static_cast<int>(threadIdx.y);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  const int vector = static_cast<int>(blockIdx.y);
  const float* partial = a.partial + vector * a.parts * a.columns;
  float sum = 0.0f;
  if (column < a.columns) {
    for (int64_t part = slice; part < a.parts; part += kSlices) {
      sum += partial[part * a.columns + column];
    }
  }
  of_slices[slice * kColumns + lane] = sum;
  __syncthreads();
  if (slice > 0 || column >= a.columns) return;
#pragma unroll
  for (int other = 1; other < kSlices; ++other) sum += of_slices[other * kColumns + lane];
  store_element(a.out[vector], column, sum);
}

}  // namespace

void launch_sum_parts(const SumParts& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.columns, kColumns)),
                  static_cast<unsigned>(a.vectors));
  launch(sum_parts_kernel, grid, dim3(kColumns, kSlices), 0, stream, a);
}

}  // namespace fastbert
