// GELU(u) v of the halves (u, v) of x + bias, and its gradients. Letters: T rows, F columns of y.
//
// A thread keeps to eight columns of each half.
#include "cuda/gelu.cuh"

namespace fastbert {
namespace {

constexpr int kRowsOfSlice = 2;  // in forward

// Eight columns of both halves.
struct Halves {
  float u[kChunk], v[kChunk];
};

template <bool kWide>
__device__ __forceinline__ Halves bias_of(const Geglu& a, int64_t column) {
  Halves bias{};
  if (a.bias.data != nullptr) {
    load_any<kWide>(a.bias.data, a.bias.dtype, 0, column, a.columns, bias.u);
    load_any<kWide>(a.bias.data, a.bias.dtype, a.columns, column, a.columns, bias.v);
  }
  return bias;
}

template <typename T, bool kWide>
__device__ __forceinline__ Halves halves_of(const Geglu& a, int64_t row, int64_t column,
                                            const Halves& bias) {
  const T* x = static_cast<const T*>(a.x) + row * 2 * a.columns;
  Halves h;
  load_chunk<kWide>(x, column, a.columns, h.u);
  load_chunk<kWide>(x + a.columns, column, a.columns, h.v);
  add_to(h.u, bias.u);
  add_to(h.v, bias.v);
  return h;
}

template <typename T, bool kErf, bool kWide>
__global__ void __launch_bounds__(kLanes* kSlices) geglu_fwd_kernel(const Geglu a) {
  const int64_t column = thread_column();
  const int64_t slice = static_cast<int64_t>(blockIdx.y) * kSlices + threadIdx.y;
  const Halves bias = bias_of<kWide>(a, column);
  for (int64_t first = slice * kRowsOfSlice; first < a.rows;
       first += static_cast<int64_t>(gridDim.y) * kSlices * kRowsOfSlice) {
#pragma unroll
    for (int r = 0; r < kRowsOfSlice; ++r) {
      const int64_t row = first + r;
      if (row >= a.rows) return;
      Halves h = halves_of<T, kWide>(a, row, column, bias);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) h.u[i] = gelu<kErf>(h.u[i]) * h.v[i];
      store_chunk<kWide>(static_cast<T*>(a.out) + row * a.columns, column, a.columns, h.u);
    }
  }
}

// Each slice of threads is a part of its own.
template <typename T, bool kErf, bool kWide>
__global__ void __launch_bounds__(kLanes* kSlices) geglu_bwd_kernel(const Geglu a) {
  const int64_t column = thread_column();
  const int64_t part = static_cast<int64_t>(blockIdx.y) * kSlices + threadIdx.y;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  const Halves bias = bias_of<kWide>(a, column);
  Halves sums{};
  for (int64_t row = part * a.parts.rows; row < end; ++row) {
    Halves h = halves_of<T, kWide>(a, row, column, bias);
    float dy[kChunk];
    load_chunk<kWide>(static_cast<const T*>(a.dy) + row * a.columns, column, a.columns, dy);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float du = dy[i] * h.v[i] * gelu_gradient<kErf>(h.u[i]);
      h.v[i] = dy[i] * gelu<kErf>(h.u[i]);
      h.u[i] = du;
    }
    T* dx = static_cast<T*>(a.out) + row * 2 * a.columns;
    store_chunk<kWide>(dx, column, a.columns, h.u);
    store_chunk<kWide>(dx + a.columns, column, a.columns, h.v);
    add_to(sums.u, h.u);
    add_to(sums.v, h.v);
  }
  if (a.partial != nullptr && part < a.parts.count) {
    store_chunk<kWide>(a.partial + part * a.columns, column, a.columns, sums.u);
    store_chunk<kWide>(a.partial + (a.parts.count + part) * a.columns, column, a.columns, sums.v);
  }
}

}  // namespace

void launch_geglu_fwd(const Geglu& a, Stream stream) {
  const dim3 grid = grid_of(a, ceil_div(a.rows, kSlices * kRowsOfSlice));
  with_variant(a, [&](auto number, auto erf, auto wide) {
    launch(geglu_fwd_kernel<decltype(number), decltype(erf)::value, decltype(wide)::value>, grid,
           dim3(kLanes, kSlices), 0, stream, a);
  });
}

void launch_geglu_bwd(const Geglu& a, Stream stream) {
  const dim3 grid = grid_of(a, ceil_div(a.parts.count, kSlices));
  with_variant(a, [&](auto number, auto erf, auto wide) {
    launch(geglu_bwd_kernel<decltype(number), decltype(erf)::value, decltype(wide)::value>, grid,
           dim3(kLanes, kSlices), 0, stream, a);
  });
}

}  // namespace fastbert
