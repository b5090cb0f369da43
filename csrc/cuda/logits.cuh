// What the losses over a vocabulary share. Letters: P rows, V vocabulary.
//
// Rows of logits lie on 16-byte boundaries whatever V is; what is behind V belongs to nobody and is
// read with the last chunk, and masked. In forward a block has a row; in backward a thread has
// eight columns of some rows, and each slice of threads is a part of its own.
#pragma once

#include "cuda/common.cuh"

namespace fastbert {

constexpr int kRowWarps = 8;
constexpr int kRowThreads = 32 * kRowWarps;
constexpr int kLanes = 32, kSlices = 8;
constexpr int kBlockColumns = kLanes * kChunk;

__device__ __forceinline__ float minus_infinity() { return -INFINITY; }

// A chunk of logits, minus infinity behind the vocabulary.
template <typename T>
__device__ __forceinline__ void load_logits(const T* row, int64_t column, int64_t vocabulary,
                                            float (&z)[kChunk]) {
  load_chunk<true>(row, column, vocabulary, z);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (column + i >= vocabulary) z[i] = minus_infinity();
  }
}

// Exponentials of minus infinity beside a peak that is minus infinity too are 0, not NaN.
__device__ __forceinline__ float base_of(float peak) {
  return peak == minus_infinity() ? 0.0f : peak;
}

// A label as an index. One outside the vocabulary is clamped, and remembered: an error nobody waits
// for.
__device__ __forceinline__ int64_t index_of_label(int64_t label, int64_t vocabulary,
                                                  int64_t* flag) {
  const int64_t within = label < 0 ? 0 : label < vocabulary ? label : vocabulary - 1;
  if (within != label && flag != nullptr) *flag = 1;
  return within;
}

inline dim3 gradient_grid(const Parts& parts, int64_t vocabulary) {
  return dim3(static_cast<unsigned>(ceil_div(vocabulary, kBlockColumns)),
              static_cast<unsigned>(ceil_div(parts.count, kSlices)));
}

// f of a number of the dtype.
template <typename F>
void with_type(Dtype dtype, F f) {
  if (dtype == Dtype::kFloat) return f(float());
  if (dtype == Dtype::kBFloat16) return f(bf16());
  f(fp16());
}

}  // namespace fastbert
