// Rotary position embedding. Letters: T rows, N heads, D head dim, P rows of the tables.
//
// A warp has a row; a thread takes eight pairs of one head after the other's, whose angles lie in
// the first-level cache.
#include "cuda/common.cuh"

namespace fastbert {
namespace {

constexpr int kLanes = 32, kWarps = 8;

template <bool kWide>
__device__ __forceinline__ void load_angles(const Rotary& a, const float* table, int64_t position,
                                            int column, float (&v)[kChunk]) {
  if (0 <= position && position < a.positions) {
    return load_chunk<kWide>(table + position * a.half_dim, column, a.half_dim, v);
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) v[i] = nanf("");
}

template <typename T, bool kWide>
__global__ void __launch_bounds__(kLanes* kWarps) rotary_kernel(const Rotary a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= a.rows) return;
  const int64_t position = a.index[row];
  const int chunks = (a.half_dim + kChunk - 1) / kChunk, head_dim = 2 * a.half_dim;
  const int64_t start = row * 3 * a.num_heads * head_dim;
  for (int at = static_cast<int>(threadIdx.x); at < 3 * a.num_heads * chunks; at += kLanes) {
    const int head = at / chunks, column = at % chunks * kChunk;
    const T* x = static_cast<const T*>(a.qkv) + start + head * head_dim;
    T* y = static_cast<T*>(a.out) + start + head * head_dim;
    float u[kChunk], v[kChunk];
    load_chunk<kWide>(x, column, a.half_dim, u);
    load_chunk<kWide>(x + a.half_dim, column, a.half_dim, v);
    if (head < 2 * a.num_heads) {
      float cos[kChunk], sin[kChunk];
      load_angles<kWide>(a, a.cos, position, column, cos);
      load_angles<kWide>(a, a.sin, position, column, sin);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float s = a.inverse ? -sin[i] : sin[i], first = u[i];
        u[i] = first * cos[i] - v[i] * s;
        v[i] = v[i] * cos[i] + first * s;
      }
    }
    store_chunk<kWide>(y, column, a.half_dim, u);
    store_chunk<kWide>(y + a.half_dim, column, a.half_dim, v);
  }
}

template <typename T>
void launch_of(const Rotary& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.rows, kWarps))), block(kLanes, kWarps);
  launch(a.wide ? rotary_kernel<T, true> : rotary_kernel<T, false>, grid, block, 0, stream, a);
}

}  // namespace

void launch_rotary(const Rotary& a, Stream stream) {
  if (a.dtype == Dtype::kFloat) return launch_of<float>(a, stream);
  if (a.dtype == Dtype::kBFloat16) return launch_of<bf16>(a, stream);
  launch_of<fp16>(a, stream);
}

}  // namespace fastbert
