// Disentangled attention over packed sequences, forward and backward. The kernels stand in
// disentangled_attention_fwd.cuh, _bwd.cuh and _positions.cuh, and are compiled type by type in
// disentangled_attention_fwd_<type>.cu and so on. Here sums by distance become gradients of a
// table's rows.
#include "cuda/disentangled_attention.cuh"

namespace fastbert {
namespace {

constexpr int kColumns = 32, kSlices = 8;

// Places of the bucket table before the first that is not below `bucket`.
__device__ __forceinline__ int places_below(const DisentangledAttention& p, int bucket) {
  int low = 0, high = 2 * p.reach + 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (p.buckets[middle] < bucket) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Distances {
  int first, last;
};

// Of a query to a key. The buckets at the ends have all distances beyond them too.
__device__ __forceinline__ Distances distances_of(const DisentangledAttention& p, int bucket,
                                                  int furthest) {
  const int begin = places_below(p, bucket), end = places_below(p, bucket + 1);
  if (begin == end) return {0, -1};
  const int first = begin - p.reach, last = end - 1 - p.reach;
  return {begin == 0 ? -furthest : max(first, -furthest),
          end == 2 * p.reach + 1 ? furthest : min(last, furthest)};
}

// A distance in one part of the sums: it stands on two diagonals.
__device__ __forceinline__ float sum_of(const float* part, const PositionSums& sums, int distance,
                                        int64_t row_step) {
  const int run = distance >> 4, rest = distance & 15;  // rounded down, also below 0
  const int above = run + static_cast<int>(sums.diagonals) / 2, below = above + 1;
  float sum = 0.0f;
  if (above >= 0) sum += part[(above * 32 + 16 + rest) * row_step];
  if (below < sums.diagonals) sum += part[(below * 32 + rest) * row_step];
  return sum;
}

// A block has a bucket and a head; every eighth distance is one slice's.
template <typename T>
__global__ void __launch_bounds__(kColumns* kSlices)
    disentangled_attention_sum_positions_kernel(const DisentangledAttention p,
                                                const PositionSums sums) {
  FASTBERT_SHARED(float, of_slices, kSlices* kColumns);
  const Attention& a = p.content;
  const int lane = static_cast<int>(threadIdx.x), slice = static_cast<int>(threadIdx.y);
  const int64_t row_step = static_cast<int64_t>(a.heads) * a.head_dim;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * a.head_dim;
  const int furthest = (static_cast<int>(sums.diagonals) / 2 + 1) * 16 - 1;
  const Distances distances = distances_of(p, static_cast<int>(blockIdx.x), furthest);
  T* out = static_cast<T*>(sums.gradient) + blockIdx.x * row_step + head;
  for (int first = 0; first < a.head_dim; first += kColumns) {
    const int column = first + lane;
    float sum = 0.0f;
    if (column < a.head_dim) {
      for (int64_t part = 0; part < sums.parts; ++part) {
        const float* at = sums.sums + part * sums.diagonals * 32 * row_step + head + column;
        for (int d = distances.first + slice; d <= distances.last; d += kSlices) {
          sum += sum_of(at, sums, sums.of_position_key ? -d : d, row_step);
        }
      }
    }
    __syncthreads();  // the columns before these have been read
    of_slices[slice * kColumns + lane] = sum;
    __syncthreads();
    if (slice == 0 && column < a.head_dim) {
#pragma unroll
      for (int other = 1; other < kSlices; ++other) sum += of_slices[other * kColumns + lane];
      out[column] = from_float<T>(sum);
    }
  }
}

template <typename T>
void launch_position_gradient_of(const DisentangledAttention& p, const PositionSums& sums,
                                 Stream stream) {
  launch_position_sums_of<T>(p, sums, stream);
  const dim3 grid(static_cast<unsigned>(sums.table_rows), p.content.heads);
  launch(disentangled_attention_sum_positions_kernel<T>, grid, dim3(kColumns, kSlices), 0, stream,
         p, sums);
}

template <typename F>
void with_type(Dtype dtype, F f) {
  if (dtype == Dtype::kFloat) return f(float());
  if (dtype == Dtype::kBFloat16) return f(bf16());
  f(fp16());
}

}  // namespace

void launch_disentangled_attention_fwd(const DisentangledAttention& p, Stream stream) {
  with_type(p.content.dtype, [&](auto element) {
    launch_disentangled_attention_fwd_of<decltype(element)>(p, stream);
  });
}

void launch_disentangled_attention_bwd(const DisentangledAttention& p, Stream stream) {
  with_type(p.content.dtype, [&](auto element) {
    launch_disentangled_attention_bwd_of<decltype(element)>(p, stream);
  });
}

void launch_position_gradient(const DisentangledAttention& p, const PositionSums& sums,
                              Stream stream) {
  with_type(p.content.dtype,
            [&](auto element) { launch_position_gradient_of<decltype(element)>(p, sums, stream); });
}

}  // namespace fastbert
