// mlm_distillation for tensors: both decoders' products are PyTorch's, the rest is ours.
#include "cuda/ops/decoder.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "mlm_distillation";

Distillation problem(const at::Tensor& logits, const at::Tensor& teacher_logits,
                     const at::Tensor& labels, const at::Tensor& lse, int64_t first,
                     int64_t ignore_index, double temperature) {
  Distillation a{};
  a.dtype = dtype_of(logits, kOp);
  a.rows = logits.size(0);
  a.vocabulary = logits.size(1);
  a.stride = logits.stride(0);
  a.logits = logits.mutable_data_ptr();
  a.teacher_logits = teacher_logits.const_data_ptr();
  a.labels = labels.const_data_ptr<int64_t>() + first;
  a.ignore_index = ignore_index;
  a.temperature = static_cast<float>(temperature);
  a.lse = lse.mutable_data_ptr<float>() + first;
  a.soft_lse = a.lse + lse.size(1);
  a.teacher_lse = a.soft_lse + lse.size(1);
  return a;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_distillation_fwd)(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& labels, const at::Tensor& teacher_hidden, const at::Tensor& teacher_weight,
    const std::optional<at::Tensor>& teacher_bias, int64_t ignore_index, double temperature,
    const std::optional<at::Tensor>& flag, int64_t max_logits) {
  const DeviceGuard guard(hidden);
  const at::Tensor label = labels.contiguous();
  at::Tensor loss = at::empty({hidden.size(0)}, hidden.options().dtype(at::kFloat));
  at::Tensor soft_loss = at::empty_like(loss), lse = at::empty({3, loss.size(0)}, loss.options());
  const LogitChunks chunks(hidden, weight, bias, max_logits);
  const LogitChunks teacher(teacher_hidden, teacher_weight, teacher_bias, max_logits);
  chunks.for_each([&](int64_t first, int64_t count) {
    const at::Tensor logits = chunks.logits(first, count);
    Distillation a =
        problem(logits, teacher.logits(first, count), label, lse, first, ignore_index, temperature);
    a.loss = loss.mutable_data_ptr<float>() + first;
    a.soft_loss = soft_loss.mutable_data_ptr<float>() + first;
    a.flag = flag.has_value() ? flag->mutable_data_ptr<int64_t>() : nullptr;
    launch_distillation_fwd(a, guard.stream());
  });
  return {loss, soft_loss, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_distillation_bwd)(
    const at::Tensor& dloss, const at::Tensor& dsoft_loss, const at::Tensor& hidden,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& labels,
    const at::Tensor& teacher_hidden, const at::Tensor& teacher_weight,
    const std::optional<at::Tensor>& teacher_bias, const at::Tensor& lse, int64_t ignore_index,
    double temperature, bool need_dhidden, bool need_dweight, int64_t max_logits) {
  const DeviceGuard guard(hidden);
  const at::Tensor label = labels.contiguous(), lses = lse.contiguous();
  const at::Tensor of_loss = dloss.to(at::kFloat).contiguous();
  const at::Tensor of_soft = dsoft_loss.to(at::kFloat).contiguous();
  const LogitChunks chunks(hidden, weight, bias, max_logits);
  const LogitChunks teacher(teacher_hidden, teacher_weight, teacher_bias, max_logits);
  DecoderGradients gradients(hidden, weight, chunks.weight(), bias, need_dhidden, need_dweight);
  chunks.for_each([&](int64_t first, int64_t count) {
    const at::Tensor logits = chunks.logits(first, count);
    Distillation a = problem(logits, teacher.logits(first, count), label, lses, first, ignore_index,
                             temperature);
    a.dloss = of_loss.const_data_ptr<float>() + first;
    a.dsoft_loss = of_soft.const_data_ptr<float>() + first;
    a.parts = parts_of(count, 1, kLogitsMostParts);
    const at::Tensor partial = gradients.partial(a.parts, a.partial);
    launch_distillation_bwd(a, guard.stream());
    gradients.add(first, logits, partial, kOp, guard.stream());
  });
  return gradients.result();
}

}  // namespace fastbert
