// The losses of a masked-LM student, from its own and its teacher's logits, none of which reaches
// memory (cpu/decoder.h).
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/decoder.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "mlm_distillation";

// What exponentials beside `peak` are multiplied by beside a larger one; both may be -inf.
float beside(float peak, float larger, float cold) {
  return peak == larger ? 1.0f : std::exp((peak - larger) * cold);
}

// One row's sums over the whole vocabulary, strip after strip.
DistillationSums joined(const DistillationSums* strips, int64_t count, int64_t step, float cold) {
  DistillationSums all = strips[0];
  for (int64_t i = 1; i < count; ++i) {
    const DistillationSums& next = strips[i * step];
    const float peak = std::max(all.peak, next.peak);
    const float teacher_peak = std::max(all.teacher_peak, next.teacher_peak);
    const auto add = [](float& sum, float scale, float more, float scale_of_more) {
      sum = sum * scale + more * scale_of_more;
    };
    add(all.exponentials, beside(all.peak, peak, 1.0f), next.exponentials,
        beside(next.peak, peak, 1.0f));
    add(all.soft, beside(all.peak, peak, cold), next.soft, beside(next.peak, peak, cold));
    const float before = beside(all.teacher_peak, teacher_peak, cold);
    const float after = beside(next.teacher_peak, teacher_peak, cold);
    add(all.teacher_soft, before, next.teacher_soft, after);
    add(all.apart, before, next.apart, after);
    all.peak = peak;
    all.teacher_peak = teacher_peak;
    all.label += next.label;
  }
  return all;
}

// Strips of both decoders, and room for the teacher's logits of 32 rows.
struct BothStrips {
  DecoderStrip student, teacher;
  Workspace teacher_logits;

  BothStrips(const Decoder& s, const Decoder& t)
      : student(s), teacher(t), teacher_logits(kBlock * kStrip * sizeof(float)) {}

  void take(int64_t strip) {
    student.take(strip);
    teacher.take(strip);
  }

  void logits(int64_t row_block, float* out) const {
    student.logits(row_block, out);
    teacher.logits(row_block, teacher_logits.as<float>());
  }
};

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_distillation_fwd_cpu(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& labels, const at::Tensor& teacher_hidden, const at::Tensor& teacher_weight,
    const std::optional<at::Tensor>& teacher_bias, int64_t ignore_index, double temperature) {
  const at::Tensor h = with_contiguous_rows(hidden), w = with_contiguous_rows(weight);
  const at::Tensor teacher_h = with_contiguous_rows(teacher_hidden);
  const at::Tensor teacher_w = with_contiguous_rows(teacher_weight);
  const Decoder p(h, w, kOp), teacher(teacher_h, teacher_w, kOp);
  const at::Tensor biases = float_vector(bias, p.vocabulary, kOp, "bias");
  const at::Tensor teacher_biases = float_vector(teacher_bias, p.vocabulary, kOp, "teacher_bias");
  const std::vector<int64_t> label = counted_labels(labels, ignore_index, p.vocabulary, kOp);
  at::Tensor loss = at::zeros({p.rows}, h.options().dtype(at::kFloat));
  at::Tensor soft_loss = at::zeros_like(loss), lse = at::zeros({3, p.rows}, loss.options());
  if (p.rows == 0) return {loss, soft_loss, lse};
  const auto heat = static_cast<float>(temperature), cold = static_cast<float>(1.0 / temperature);
  const Distillation a{{dtype_of(h, kOp), data_or_null(biases), label.data()},
                       {dtype_of(teacher_h, kOp), data_or_null(teacher_biases), nullptr},
                       cold};
  const Workspace all(p.strips() * p.rows * sizeof(DistillationSums));
  DistillationSums* sums = all.as<DistillationSums>();
  struct Kept {
    BothStrips weights;
    Workspace logits;
  };
  in_turn(
      at::get_num_threads(), p.strips(),
      [&] { return Kept{BothStrips(p, teacher), Workspace(kBlock * kStrip * sizeof(float))}; },
      [&](Kept& kept, int64_t strip) {
        float* logits = kept.logits.as<float>();
        kept.weights.take(strip);
        for (int64_t block = 0; block < p.row_blocks; ++block) {
          const int64_t row = block * kBlock;
          kept.weights.logits(block, logits);
          kernels().sum_distillation(a, row, p.rows_of(block), strip * kStrip, p.columns_of(strip),
                                     logits, kept.weights.teacher_logits.as<float>(), kStrip,
                                     sums + strip * p.rows + row);
        }
      });
  float *losses = loss.mutable_data_ptr<float>(),
        *soft_losses = soft_loss.mutable_data_ptr<float>();
  float* lses = lse.mutable_data_ptr<float>();
  for (int64_t row = 0; row < p.rows; ++row) {
    const DistillationSums s = joined(sums + row, p.strips(), p.rows, cold);
    lses[row] = s.peak + std::log(s.exponentials);
    lses[p.rows + row] = s.peak * cold + std::log(s.soft);
    lses[2 * p.rows + row] = s.teacher_peak * cold + std::log(s.teacher_soft);
    if (label[row] < 0) continue;
    losses[row] = lses[row] - s.label;
    // One logarithm in place of the two lse: where these are alike their rounding would be left.
    const float apart = s.apart / s.teacher_soft - (s.teacher_peak - s.peak);
    soft_losses[row] = heat * (apart + heat * std::log(s.soft / s.teacher_soft));
  }
  return {loss, soft_loss, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_distillation_bwd_cpu(
    const at::Tensor& dloss, const at::Tensor& dsoft_loss, const at::Tensor& hidden,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& labels,
    const at::Tensor& teacher_hidden, const at::Tensor& teacher_weight,
    const std::optional<at::Tensor>& teacher_bias, const at::Tensor& softmax_lse,
    int64_t ignore_index, double temperature, bool need_dhidden, bool need_dweight) {
  const at::Tensor h = with_contiguous_rows(hidden), w = with_contiguous_rows(weight);
  const at::Tensor teacher_h = with_contiguous_rows(teacher_hidden);
  const at::Tensor teacher_w = with_contiguous_rows(teacher_weight);
  const Decoder p(h, w, kOp), teacher(teacher_h, teacher_w, kOp);
  const at::Tensor biases = float_vector(bias, p.vocabulary, kOp, "bias");
  const at::Tensor teacher_biases = float_vector(teacher_bias, p.vocabulary, kOp, "teacher_bias");
  const std::vector<int64_t> label = counted_labels(labels, ignore_index, p.vocabulary, kOp);
  const at::Tensor counted = labels.ne(ignore_index);
  const at::Tensor of_loss = at::where(counted, dloss.to(at::kFloat), 0.0).contiguous();
  const at::Tensor of_soft =
      at::where(counted, dsoft_loss.to(at::kFloat) * temperature, 0.0).contiguous();
  const at::Tensor lse = softmax_lse.contiguous();
  const float* lses = lse.const_data_ptr<float>();
  const DistillationGrad a{{{dtype_of(h, kOp), data_or_null(biases), label.data()},
                            {dtype_of(teacher_h, kOp), data_or_null(teacher_biases), nullptr},
                            static_cast<float>(1.0 / temperature)},
                           lses,
                           lses + p.rows,
                           lses + 2 * p.rows,
                           of_loss.const_data_ptr<float>(),
                           of_soft.const_data_ptr<float>()};
  const auto gradients = [&](BothStrips& weights, int64_t strip, float* logits, float* dbias) {
    weights.take(strip);
    for (int64_t block = 0; block < p.row_blocks; ++block) {
      const int64_t row = block * kBlock;
      weights.logits(block, logits + row * kStrip);
      kernels().distillation_gradients(a, row, p.rows_of(block), strip * kStrip,
                                       p.columns_of(strip), logits + row * kStrip,
                                       weights.teacher_logits.as<float>(), kStrip, dbias);
    }
  };
  return decoder_bwd(
      p, h, w, bias, need_dhidden, need_dweight, kOp, [&] { return BothStrips(p, teacher); },
      gradients);
}

}  // namespace fastbert
