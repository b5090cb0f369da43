// The masked-LM loss: what follows the decoder's product, forward and backward. Letters: P rows,
// V vocabulary.
//
// Forward reads a row of logits once, with a running maximum and sum in each thread (Milakov and
// Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3). Backward puts the
// gradient in the logits' place.
#include "cuda/logits.cuh"

namespace fastbert {
namespace {

struct RowSums {
  float peak;          // the largest logit
  float exponentials;  // sum of exp(z - peak)
  float all;           // sum of the logits, for label smoothing
};

template <typename T>
__device__ __forceinline__ RowSums sums_of_row(const T* row, const CrossEntropy& a) {
  RowSums s{minus_infinity(), 0.0f, 0.0f};
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kChunk;
  for (int64_t column = first; column < a.vocabulary; column += kRowThreads * kChunk) {
    float z[kChunk];
    load_logits(row, column, a.vocabulary, z);
    float peak = s.peak;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) peak = fmaxf(peak, z[i]);
    const float base = base_of(peak);
    s.exponentials *= expf(s.peak - base);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      s.exponentials += expf(z[i] - base);
      s.all += column + i < a.vocabulary ? z[i] : 0.0f;
    }
    s.peak = peak;
  }
  float peak[1] = {s.peak};
  reduce_row<kRowWarps, Max>(peak);
  float sums[2] = {s.exponentials * expf(s.peak - base_of(peak[0])), s.all};
  reduce_row<kRowWarps, Sum>(sums);
  return {peak[0], sums[0], sums[1]};
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads) cross_entropy_fwd_kernel(const CrossEntropy a) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  const RowSums s = sums_of_row(logits, a);
  if (threadIdx.x > 0) return;
  const float lse = s.peak + logf(s.exponentials);
  a.lse[row] = lse;
  const int64_t label = a.labels[row];
  if (label == a.ignore_index) {
    a.loss[row] = 0.0f;
    return;
  }
  const int64_t within = index_of_label(label, a.vocabulary, a.flag);
  float loss = lse - to_float(logits[within]);
  if (a.label_smoothing > 0.0f) {
    const float mean = s.all / static_cast<float>(a.vocabulary);
    loss = (1.0f - a.label_smoothing) * loss + a.label_smoothing * (lse - mean);
  }
  a.loss[row] = loss + a.z_loss * lse * lse;
}

// Each slice of threads is a part of its own.
template <typename T>
__global__ void __launch_bounds__(kLanes* kSlices, 2)
    cross_entropy_bwd_kernel(const CrossEntropy a) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * kChunk;
  const int64_t part = static_cast<int64_t>(blockIdx.y) * kSlices + threadIdx.y;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  float sums[kChunk] = {};
#pragma unroll 2
  for (int64_t row = part * a.parts.rows; row < end; ++row) {
    const int64_t label = a.labels[row];
    const float lse = a.forward_lse[row];
    const float dloss = label == a.ignore_index ? 0.0f : a.dloss[row];
    const float of_softmax = dloss * (1.0f + 2.0f * a.z_loss * lse);
    const float of_every = dloss * a.label_smoothing / static_cast<float>(a.vocabulary);
    const float of_label = dloss * (1.0f - a.label_smoothing);
    T* logits = static_cast<T*>(a.logits) + row * a.stride;
    float z[kChunk];
    load_logits(logits, column, a.vocabulary, z);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      z[i] = of_softmax * expf(z[i] - lse) - of_every - (column + i == label ? of_label : 0.0f);
    }
    store_chunk<true>(logits, column, a.vocabulary, z);
    add_to(sums, z);
  }
  if (a.partial != nullptr && part < a.parts.count) {
    store_chunk<false>(a.partial + part * a.vocabulary, column, a.vocabulary, sums);
  }
}

}  // namespace

void launch_cross_entropy_fwd(const CrossEntropy& a, Stream stream) {
  with_type(a.dtype, [&](auto number) {
    launch(cross_entropy_fwd_kernel<decltype(number)>, static_cast<unsigned>(a.rows), kRowThreads,
           0, stream, a);
  });
}

void launch_cross_entropy_bwd(const CrossEntropy& a, Stream stream) {
  with_type(a.dtype, [&](auto number) {
    launch(cross_entropy_bwd_kernel<decltype(number)>, gradient_grid(a.parts, a.vocabulary),
           dim3(kLanes, kSlices), 0, stream, a);
  });
}

}  // namespace fastbert
