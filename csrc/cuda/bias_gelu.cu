// GELU(x + bias) and its gradients. Letters: R rows, F columns.
//
// A thread keeps to eight columns.
#include "cuda/gelu.cuh"

namespace fastbert {
namespace {

constexpr int kRowsOfSlice = 4;  // in forward

template <bool kWide>
__device__ __forceinline__ void load_bias(const BiasGelu& a, int64_t column,
                                          float (&bias)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) bias[i] = 0.0f;
  if (a.bias.data != nullptr) load_vector<kWide>(a.bias, column, a.columns, bias);
}

template <typename T, bool kErf, bool kWide>
__global__ void __launch_bounds__(kLanes* kSlices) bias_gelu_fwd_kernel(const BiasGelu a) {
  const int64_t column = thread_column();
  const int64_t slice = static_cast<int64_t>(blockIdx.y) * kSlices + threadIdx.y;
  float bias[kChunk];
  load_bias<kWide>(a, column, bias);
  for (int64_t first = slice * kRowsOfSlice; first < a.rows;
       first += static_cast<int64_t>(gridDim.y) * kSlices * kRowsOfSlice) {
#pragma unroll
    for (int r = 0; r < kRowsOfSlice; ++r) {
      const int64_t row = first + r;
      if (row >= a.rows) return;
      float v[kChunk];
      load_chunk<kWide>(static_cast<const T*>(a.x) + row * a.columns, column, a.columns, v);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[i] = gelu<kErf>(v[i] + bias[i]);
      store_chunk<kWide>(static_cast<T*>(a.out) + row * a.columns, column, a.columns, v);
    }
  }
}

// Each slice of threads is a part of its own.
template <typename T, bool kErf, bool kWide>
__global__ void __launch_bounds__(kLanes* kSlices) bias_gelu_bwd_kernel(const BiasGelu a) {
  const int64_t column = thread_column();
  const int64_t part = static_cast<int64_t>(blockIdx.y) * kSlices + threadIdx.y;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  float bias[kChunk];
  load_bias<kWide>(a, column, bias);
  float sums[kChunk] = {};
#pragma unroll 2
  for (int64_t row = part * a.parts.rows; row < end; ++row) {
    float v[kChunk], dy[kChunk];
    load_chunk<kWide>(static_cast<const T*>(a.x) + row * a.columns, column, a.columns, v);
    load_chunk<kWide>(static_cast<const T*>(a.dy) + row * a.columns, column, a.columns, dy);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) v[i] = dy[i] * gelu_gradient<kErf>(v[i] + bias[i]);
    store_chunk<kWide>(static_cast<T*>(a.out) + row * a.columns, column, a.columns, v);
    add_to(sums, v);
  }
  if (a.partial != nullptr && part < a.parts.count) {
    store_chunk<kWide>(a.partial + part * a.columns, column, a.columns, sums);
  }
}

}  // namespace

void launch_bias_gelu_fwd(const BiasGelu& a, Stream stream) {
  const dim3 grid = grid_of(a, ceil_div(a.rows, kSlices * kRowsOfSlice));
  with_variant(a, [&](auto number, auto erf, auto wide) {
    launch(bias_gelu_fwd_kernel<decltype(number), decltype(erf)::value, decltype(wide)::value>,
           grid, dim3(kLanes, kSlices), 0, stream, a);
  });
}

void launch_bias_gelu_bwd(const BiasGelu& a, Stream stream) {
  const dim3 grid = grid_of(a, ceil_div(a.parts.count, kSlices));
  with_variant(a, [&](auto number, auto erf, auto wide) {
    launch(bias_gelu_bwd_kernel<decltype(number), decltype(erf)::value, decltype(wide)::value>,
           grid, dim3(kLanes, kSlices), 0, stream, a);
  });
}

}  // namespace fastbert
