// mlm_cross_entropy for tensors: the decoder's products are PyTorch's, the rest is ours.
//
// Logits exist for some rows at a time, in a buffer used again. Chunks are of rows, not of the
// vocabulary, so that each row's gradient is one product, rounded once.
#include <algorithm>

#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "mlm_cross_entropy";

// Calls f(first row, rows, logits) for chunks of rows with at most `most` logits. The rows of the
// buffer begin on 16-byte boundaries whatever the vocabulary.
template <typename F>
void for_each_chunk(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias,
                    int64_t most, F f) {
  const int64_t rows = hidden.size(0), vocabulary = weight.size(0);
  if (rows == 0) return;
  const int64_t size = std::clamp(most / vocabulary, int64_t{1}, rows);
  const int64_t stride = (vocabulary + 7) / 8 * 8;
  const at::Tensor buffer = at::empty({size, stride}, hidden.options()).narrow(1, 0, vocabulary);
  const at::Tensor transposed = weight.t();
  for (int64_t first = 0; first < rows; first += size) {
    const int64_t count = std::min(size, rows - first);
    at::Tensor logits = buffer.narrow(0, 0, count);
    const at::Tensor part = hidden.narrow(0, first, count);
    if (bias.defined()) {
      at::addmm_out(logits, bias, part, transposed);
    } else {
      at::mm_out(logits, part, transposed);
    }
    f(first, count, logits);
  }
}

CrossEntropy problem(const at::Tensor& logits, const at::Tensor& labels, int64_t first,
                     int64_t ignore_index, double label_smoothing, double z_loss) {
  CrossEntropy a{};
  a.dtype = dtype_of(logits, kOp);
  a.rows = logits.size(0);
  a.vocabulary = logits.size(1);
  a.stride = logits.stride(0);
  a.logits = logits.mutable_data_ptr();
  a.labels = labels.const_data_ptr<int64_t>() + first;
  a.ignore_index = ignore_index;
  a.label_smoothing = static_cast<float>(label_smoothing);
  a.z_loss = static_cast<float>(z_loss);
  return a;
}

at::Tensor like_hidden(const std::optional<at::Tensor>& t, const at::Tensor& hidden) {
  return t.has_value() ? t->to(hidden.scalar_type()) : at::Tensor();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_cross_entropy_fwd)(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& labels, int64_t ignore_index, double label_smoothing, double z_loss,
    const std::optional<at::Tensor>& flag, int64_t max_logits) {
  const DeviceGuard guard(hidden);
  const at::Tensor label = labels.contiguous();
  at::Tensor loss = at::empty({hidden.size(0)}, hidden.options().dtype(at::kFloat));
  at::Tensor lse = at::empty_like(loss);
  for_each_chunk(hidden, weight.to(hidden.scalar_type()), like_hidden(bias, hidden), max_logits,
                 [&](int64_t first, int64_t, const at::Tensor& logits) {
                   CrossEntropy a =
                       problem(logits, label, first, ignore_index, label_smoothing, z_loss);
                   a.loss = loss.mutable_data_ptr<float>() + first;
                   a.lse = lse.mutable_data_ptr<float>() + first;
                   a.flag = flag.has_value() ? flag->mutable_data_ptr<int64_t>() : nullptr;
                   launch_cross_entropy_fwd(a, guard.stream());
                 });
  return {loss, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_cross_entropy_bwd)(
    const at::Tensor& dloss, const at::Tensor& hidden, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& labels, const at::Tensor& lse,
    int64_t ignore_index, double label_smoothing, double z_loss, bool need_dhidden,
    bool need_dweight, int64_t max_logits) {
  const DeviceGuard guard(hidden);
  const at::Tensor label = labels.contiguous(), lses = lse.contiguous();
  const at::Tensor dlosses = dloss.to(at::kFloat).contiguous();
  const at::Tensor weights = weight.to(hidden.scalar_type());
  at::Tensor dhidden =
      need_dhidden ? at::empty(hidden.sizes(), hidden.options()) : at::empty({0}, hidden.options());
  at::Tensor dweight, dbias;
  // The first chunk's sum as it is, then in fp32.
  const auto add = [](at::Tensor& sum, const at::Tensor& more) {
    sum = sum.defined() ? sum.to(at::kFloat).add_(more) : more;
  };
  const auto of_chunk = [&](int64_t first, int64_t count, at::Tensor& logits) {
    CrossEntropy a = problem(logits, label, first, ignore_index, label_smoothing, z_loss);
    a.forward_lse = lses.const_data_ptr<float>() + first;
    a.dloss = dlosses.const_data_ptr<float>() + first;
    a.parts = parts_of(count, 1, kLogitsMostParts);
    at::Tensor partial;
    if (bias.has_value()) {
      partial = at::empty({1, a.parts.count, a.vocabulary}, dlosses.options());
      a.partial = partial.mutable_data_ptr<float>();
    }
    launch_cross_entropy_bwd(a, guard.stream());
    if (bias.has_value()) {
      at::Tensor sums = at::empty({a.vocabulary}, dlosses.options());
      sum_parts(partial, {sums}, kOp, guard.stream());
      add(dbias, sums);
    }
    if (need_dhidden) {
      at::Tensor rows = dhidden.narrow(0, first, count);
      at::mm_out(rows, logits, weights);
    }
    if (need_dweight) add(dweight, at::mm(logits.t(), hidden.narrow(0, first, count)));
  };
  for_each_chunk(hidden, weights, like_hidden(bias, hidden), max_logits, of_chunk);
  if (!dweight.defined()) {
    dweight = need_dweight ? at::zeros(weight.sizes(), weight.options())
                           : at::empty({0}, weight.options());
  }
  if (!dbias.defined()) {
    dbias = bias.has_value() ? at::zeros(bias->sizes(), bias->options())
                             : at::empty({0}, hidden.options());
  }
  return {dhidden, dweight.to(weight.scalar_type()),
          bias.has_value() ? dbias.to(bias->scalar_type()) : dbias};
}

}  // namespace fastbert
