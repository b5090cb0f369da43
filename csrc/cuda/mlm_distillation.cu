// The losses of a masked-LM student: what follows both decoders' products, forward and backward.
// Letters: P rows, V vocabulary.
//
// Forward reads a row of the student's and of the teacher's logits once, with running maxima and
// sums in each thread, as the masked-LM loss does; backward puts the gradient in the student's
// logits' place.
#include "cuda/logits.cuh"

namespace fastbert {
namespace {

struct RowSums {
  float peak, teacher_peak;  // the largest logits: of z, the student's, and of t, the teacher's
  float exponentials;        // sum of exp(z - peak)
  float soft, teacher_soft;  // sums of exp((z - peak) / T) and of p = exp((t - teacher_peak) / T)
  float apart;               // sum of p (t - z)
};

// The sums beside peaks that are no smaller.
__device__ __forceinline__ void move_peaks(RowSums& s, float peak, float teacher_peak, float cold) {
  const float down = s.peak - base_of(peak);
  const float teacher_scale = expf((s.teacher_peak - base_of(teacher_peak)) * cold);
  s.exponentials *= expf(down);
  s.soft *= expf(down * cold);
  s.teacher_soft *= teacher_scale;
  s.apart *= teacher_scale;
  s.peak = peak;
  s.teacher_peak = teacher_peak;
}

template <typename T>
__device__ __forceinline__ RowSums sums_of_rows(const T* row, const T* teacher_row,
                                                const Distillation& a, float cold) {
  RowSums s{minus_infinity(), minus_infinity(), 0.0f, 0.0f, 0.0f, 0.0f};
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kChunk;
  for (int64_t column = first; column < a.vocabulary; column += kRowThreads * kChunk) {
    float z[kChunk], t[kChunk];
    load_logits(row, column, a.vocabulary, z);
    load_logits(teacher_row, column, a.vocabulary, t);
    float peak = s.peak, teacher_peak = s.teacher_peak;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      peak = fmaxf(peak, z[i]);
      teacher_peak = fmaxf(teacher_peak, t[i]);
    }
    move_peaks(s, peak, teacher_peak, cold);
    const float base = base_of(peak), teacher_base = base_of(teacher_peak);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float p = expf((t[i] - teacher_base) * cold);
      s.exponentials += expf(z[i] - base);
      s.soft += expf((z[i] - base) * cold);
      s.teacher_soft += p;
      // A word that the teacher rules out has no part, whatever the student says of it.
      s.apart += p > 0.0f ? p * (t[i] - z[i]) : 0.0f;
    }
  }
  float peaks[2] = {s.peak, s.teacher_peak};
  reduce_row<kRowWarps, Max>(peaks);
  move_peaks(s, peaks[0], peaks[1], cold);
  float sums[4] = {s.exponentials, s.soft, s.teacher_soft, s.apart};
  reduce_row<kRowWarps, Sum>(sums);
  return {peaks[0], peaks[1], sums[0], sums[1], sums[2], sums[3]};
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads) distillation_fwd_kernel(const Distillation a) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  const T* teacher_logits = static_cast<const T*>(a.teacher_logits) + row * a.stride;
  const float cold = 1.0f / a.temperature;
  const RowSums s = sums_of_rows(logits, teacher_logits, a, cold);
  if (threadIdx.x > 0) return;
  const float lse = s.peak + logf(s.exponentials);
  a.lse[row] = lse;
  a.soft_lse[row] = s.peak * cold + logf(s.soft);
  a.teacher_lse[row] = s.teacher_peak * cold + logf(s.teacher_soft);
  const int64_t label = a.labels[row];
  if (label == a.ignore_index) {
    a.loss[row] = a.soft_loss[row] = 0.0f;
    return;
  }
  a.loss[row] = lse - to_float(logits[index_of_label(label, a.vocabulary, a.flag)]);
  // One logarithm in place of the two lse: where these are alike their rounding would be left.
  const float apart = s.apart / s.teacher_soft - (s.teacher_peak - s.peak);
  a.soft_loss[row] = a.temperature * (apart + a.temperature * logf(s.soft / s.teacher_soft));
}

template <typename T>
__global__ void __launch_bounds__(kLanes* kSlices) distillation_bwd_kernel(const Distillation a) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * kChunk;
  const int64_t part = static_cast<int64_t>(blockIdx.y) * kSlices + threadIdx.y;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  const float cold = 1.0f / a.temperature;
  float sums[kChunk] = {};
  for (int64_t row = part * a.parts.rows; row < end; ++row) {
    const int64_t label = a.labels[row];
    const bool counted = label != a.ignore_index;
    const float dloss = counted ? a.dloss[row] : 0.0f;
    const float factor = counted ? a.dsoft_loss[row] * a.temperature : 0.0f;
    const float lse = a.lse[row], soft_lse = a.soft_lse[row], teacher_lse = a.teacher_lse[row];
    T* logits = static_cast<T*>(a.logits) + row * a.stride;
    float z[kChunk], t[kChunk];
    load_logits(logits, column, a.vocabulary, z);
    load_logits(static_cast<const T*>(a.teacher_logits) + row * a.stride, column, a.vocabulary, t);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float apart = expf(z[i] * cold - soft_lse) - expf(t[i] * cold - teacher_lse);
      z[i] = dloss * expf(z[i] - lse) + factor * apart - (column + i == label ? dloss : 0.0f);
    }
    store_chunk<true>(logits, column, a.vocabulary, z);
    add_to(sums, z);
  }
  if (a.partial != nullptr && part < a.parts.count) {
    store_chunk<false>(a.partial + part * a.vocabulary, column, a.vocabulary, sums);
  }
}

}  // namespace

void launch_distillation_fwd(const Distillation& a, Stream stream) {
  with_type(a.dtype, [&](auto number) {
    launch(distillation_fwd_kernel<decltype(number)>, static_cast<unsigned>(a.rows), kRowThreads, 0,
           stream, a);
  });
}

void launch_distillation_bwd(const Distillation& a, Stream stream) {
  with_type(a.dtype, [&](auto number) {
    launch(distillation_bwd_kernel<decltype(number)>, gradient_grid(a.parts, a.vocabulary),
           dim3(kLanes, kSlices), 0, stream, a);
  });
}

}  // namespace fastbert
