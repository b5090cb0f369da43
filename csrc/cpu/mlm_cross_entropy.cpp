// The softmax loss of labelled rows, from logits that reach no memory (cpu/decoder.h).
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/decoder.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "mlm_cross_entropy";

// A strip's exponentials beside another peak. One whose logits are all -inf, as a bias masks words
// that do not exist, has none: beside its own peak they are NaN.
float beside(const LogitSums& strip, float peak) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const bool masked = strip.peak == kNothing && strip.all == kNothing;
  return masked && peak != kNothing ? 0.0f : strip.exponentials * std::exp(strip.peak - peak);
}

// One row's sums over the whole vocabulary, strip after strip.
LogitSums joined(const LogitSums* strips, int64_t count, int64_t step) {
  LogitSums all = strips[0];
  for (int64_t i = 1; i < count; ++i) {
    const LogitSums& next = strips[i * step];
    const float peak = std::max(all.peak, next.peak);
    all.exponentials = beside(all, peak) + beside(next, peak);
    all.peak = peak;
    all.all += next.all;
    all.label += next.label;
  }
  return all;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> mlm_cross_entropy_fwd_cpu(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& labels, int64_t ignore_index, double label_smoothing, double z_loss) {
  const at::Tensor h = with_contiguous_rows(hidden), w = with_contiguous_rows(weight);
  const Decoder p(h, w, kOp);
  const at::Tensor biases = float_vector(bias, p.vocabulary, kOp, "bias");
  const std::vector<int64_t> label = counted_labels(labels, ignore_index, p.vocabulary, kOp);
  at::Tensor loss = at::zeros({p.rows}, h.options().dtype(at::kFloat)), lse = at::zeros_like(loss);
  if (p.rows == 0) return {loss, lse};
  const CrossEntropy a{dtype_of(h, kOp), data_or_null(biases), label.data()};
  const Workspace all(p.strips() * p.rows * sizeof(LogitSums));
  LogitSums* sums = all.as<LogitSums>();
  struct Kept {
    DecoderStrip weights;
    Workspace logits;
  };
  in_turn(
      at::get_num_threads(), p.strips(),
      [&] { return Kept{DecoderStrip(p), Workspace(kBlock * kStrip * sizeof(float))}; },
      [&](Kept& kept, int64_t strip) {
        float* logits = kept.logits.as<float>();
        kept.weights.take(strip);
        for (int64_t block = 0; block < p.row_blocks; ++block) {
          const int64_t row = block * kBlock;
          kept.weights.logits(block, logits);
          kernels().sum_logits(a, row, p.rows_of(block), strip * kStrip, p.columns_of(strip),
                               logits, kStrip, sums + strip * p.rows + row);
        }
      });
  float *losses = loss.mutable_data_ptr<float>(), *lses = lse.mutable_data_ptr<float>();
  const auto smoothing = static_cast<float>(label_smoothing), z = static_cast<float>(z_loss);
  for (int64_t row = 0; row < p.rows; ++row) {
    const LogitSums s = joined(sums + row, p.strips(), p.rows);
    lses[row] = s.peak + std::log(s.exponentials);
    if (label[row] < 0) continue;
    const float mean = s.all / static_cast<float>(p.vocabulary);
    losses[row] = (1.0f - smoothing) * (lses[row] - s.label) + z * lses[row] * lses[row];
    if (smoothing > 0.0f) losses[row] += smoothing * (lses[row] - mean);
  }
  return {loss, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_cross_entropy_bwd_cpu(
    const at::Tensor& dloss, const at::Tensor& hidden, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& labels, const at::Tensor& softmax_lse,
    int64_t ignore_index, double label_smoothing, double z_loss, bool need_dhidden,
    bool need_dweight) {
  const at::Tensor h = with_contiguous_rows(hidden), w = with_contiguous_rows(weight);
  const Decoder p(h, w, kOp);
  const at::Tensor biases = float_vector(bias, p.vocabulary, kOp, "bias");
  const std::vector<int64_t> label = counted_labels(labels, ignore_index, p.vocabulary, kOp);
  const at::Tensor gradient = dloss.to(at::kFloat).contiguous(), lse = softmax_lse.contiguous();
  std::vector<float> factor(p.rows), hit(p.rows), every(p.rows);
  for (int64_t row = 0; row < p.rows; ++row) {
    const float d = label[row] < 0 ? 0.0f : gradient.const_data_ptr<float>()[row];
    const auto z = static_cast<float>(z_loss), smoothing = static_cast<float>(label_smoothing);
    factor[row] = d * (1.0f + 2.0f * z * lse.const_data_ptr<float>()[row]);
    hit[row] = -(1.0f - smoothing) * d;
    every[row] = -d * (smoothing / static_cast<float>(p.vocabulary));
  }
  const CrossEntropyGrad a{{dtype_of(h, kOp), data_or_null(biases), label.data()},
                           lse.const_data_ptr<float>(),
                           factor.data(),
                           hit.data(),
                           every.data()};
  const auto gradients = [&](DecoderStrip& weights, int64_t strip, float* logits, float* dbias) {
    weights.take(strip);
    for (int64_t block = 0; block < p.row_blocks; ++block) {
      const int64_t row = block * kBlock;
      weights.logits(block, logits + row * kStrip);
      kernels().logit_gradients(a, row, p.rows_of(block), strip * kStrip, p.columns_of(strip),
                                logits + row * kStrip, kStrip, dbias);
    }
  };
  return decoder_bwd(
      p, h, w, bias, need_dhidden, need_dweight, kOp, [&] { return DecoderStrip(p); }, gradients);
}

}  // namespace fastbert
