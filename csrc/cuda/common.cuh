// What all kernels share: eight columns at a time, sums over warps and rows, dropout.
//
// A chunk is eight columns of a row: what one call of Philox serves, and one 16-byte access in half
// precision, two in fp32. A thread always holds whole chunks.
#pragma once

#include "common/philox.h"
#include "cuda/kernels.h"

#if defined(__CUDACC__)
#include "cuda/device.cuh"
#else
#include "cuda_on_cpu/cuda_on_cpu.h"
#endif

namespace fastbert {

constexpr int kChunk = 8;
constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- memory
// ---------------------------------------------------------------------------------------

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T element[kSize];
};

template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* at) {
  check_aligned(at, sizeof(Pack<T>));
  return *reinterpret_cast<const Pack<T>*>(at);
}

template <typename T>
__device__ __forceinline__ void store_pack(T* at, const Pack<T>& pack) {
  check_aligned(at, sizeof(Pack<T>));
  store_16(at, &pack);
}

// Of a chunk whose first column is `column`, those of `columns` that exist; the others are 0. With
// kWide rows are whole chunks on 16-byte boundaries.
template <bool kWide, typename T>
__device__ __forceinline__ void load_chunk(const T* row, int64_t column, int64_t columns,
                                           float (&v)[kChunk]) {
  if constexpr (kWide) {
    if (column < columns) {
#pragma unroll
      for (int i = 0; i < kChunk; i += Pack<T>::kSize) {
        const Pack<T> pack = load_pack(row + column + i);
#pragma unroll
        for (int j = 0; j < Pack<T>::kSize; ++j) v[i + j] = to_float(pack.element[j]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) v[i] = 0.0f;
  } else {
    // In 32 bits: kernels that hold four chunks have no registers for a bound of 64.
    const int left = static_cast<int>(columns) - static_cast<int>(column);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) v[i] = i < left ? to_float(row[column + i]) : 0.0f;
  }
}

template <bool kWide, typename T>
__device__ __forceinline__ void store_chunk(T* row, int64_t column, int64_t columns,
                                            const float (&v)[kChunk]) {
  if constexpr (kWide) {
    if (column >= columns) return;
#pragma unroll
    for (int i = 0; i < kChunk; i += Pack<T>::kSize) {
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) pack.element[j] = from_float<T>(v[i + j]);
      store_pack(row + column + i, pack);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (column + i < columns) row[column + i] = from_float<T>(v[i]);
    }
  }
}

// The same of memory whose dtype is known at run time: vectors of parameters lie in cache, and the
// branch is one for the whole grid. `offset` is that of the row.
template <bool kWide>
__device__ __forceinline__ void load_any(const void* data, Dtype dtype, int64_t offset,
                                         int64_t column, int64_t columns, float (&v)[kChunk]) {
  switch (dtype) {
    case Dtype::kFloat:
      return load_chunk<kWide>(static_cast<const float*>(data) + offset, column, columns, v);
    case Dtype::kBFloat16:
      return load_chunk<kWide>(static_cast<const bf16*>(data) + offset, column, columns, v);
    case Dtype::kHalf:
      return load_chunk<kWide>(static_cast<const fp16*>(data) + offset, column, columns, v);
  }
}

template <bool kWide>
__device__ __forceinline__ void store_any(void* data, Dtype dtype, int64_t offset, int64_t column,
                                          int64_t columns, const float (&v)[kChunk]) {
  switch (dtype) {
    case Dtype::kFloat:
      return store_chunk<kWide>(static_cast<float*>(data) + offset, column, columns, v);
    case Dtype::kBFloat16:
      return store_chunk<kWide>(static_cast<bf16*>(data) + offset, column, columns, v);
    case Dtype::kHalf:
      return store_chunk<kWide>(static_cast<fp16*>(data) + offset, column, columns, v);
  }
}

template <bool kWide>
__device__ __forceinline__ void load_vector(const ConstVector& vector, int64_t column,
                                            int64_t columns, float (&v)[kChunk]) {
  load_any<kWide>(vector.data, vector.dtype, 0, column, columns, v);
}

__device__ __forceinline__ void add_to(float (&sums)[kChunk], const float (&v)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) sums[i] += v[i];
}

// --- sums
// -----------------------------------------------------------------------------------------

struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

struct Max {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

template <typename Combine>
__device__ __forceinline__ float reduce_warp(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    x = Combine::of(x, __shfl_xor_sync(kWholeWarp, x, lanes));
  }
  return x;
}

// Over the threads that hold a row: any one warp, or all kWarps of the block. Each of them gets the
// result, combined in the same order in every run.
template <int kWarps, typename Combine, int kValues>
__device__ __forceinline__ void reduce_row(float (&x)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) x[i] = reduce_warp<Combine>(x[i]);
  if constexpr (kWarps > 1) {
    FASTBERT_SHARED(float, of_warps, kWarps* kValues);
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();  // what a call before this one left has been read
    if (thread % 32 == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) of_warps[thread / 32 * kValues + i] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = of_warps[i];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) {
        x[i] = Combine::of(x[i], of_warps[warp * kValues + i]);
      }
    }
  }
}

// --- dropout
// --------------------------------------------------------------------------------------

__device__ __forceinline__ DropoutStream stream_of(const Dropout& dropout) {
  if (dropout.threshold == 0) return DropoutStream{};
  return dropout_stream(dropout.rng_state[0], dropout.rng_state[1], dropout.site,
                        dropout.threshold);
}

// A chunk of a row, which is one call of Philox: `call` is row * ceil(columns / 8) + column / 8. A
// dropped element is selected away, whatever it was.
__device__ __forceinline__ void drop_chunk(const DropoutStream& stream, float scale, uint64_t call,
                                           float (&v)[kChunk]) {
  const PhiloxWords words = row_call(stream, call);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    v[i] = keeps(stream, words.word[i / 2], i % 2) ? v[i] * scale : 0.0f;
  }
}

}  // namespace fastbert
