// mlm_cross_entropy for tensors: the decoder's products are PyTorch's, the rest is ours.
#include "cuda/ops/decoder.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "mlm_cross_entropy";

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

}  // namespace

std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_cross_entropy_fwd)(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& labels, int64_t ignore_index, double label_smoothing, double z_loss,
    const std::optional<at::Tensor>& flag, int64_t max_logits) {
  const DeviceGuard guard(hidden);
  const at::Tensor label = labels.contiguous();
  at::Tensor loss = at::empty({hidden.size(0)}, hidden.options().dtype(at::kFloat));
  at::Tensor lse = at::empty_like(loss);
  const LogitChunks chunks(hidden, weight, bias, max_logits);
  chunks.for_each([&](int64_t first, int64_t count) {
    const at::Tensor logits = chunks.logits(first, count);
    CrossEntropy a = problem(logits, label, first, ignore_index, label_smoothing, z_loss);
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
  const LogitChunks chunks(hidden, weight, bias, max_logits);
  DecoderGradients gradients(hidden, weight, chunks.weight(), bias, need_dhidden, need_dweight);
  chunks.for_each([&](int64_t first, int64_t count) {
    const at::Tensor logits = chunks.logits(first, count);
    CrossEntropy a = problem(logits, label, first, ignore_index, label_smoothing, z_loss);
    a.forward_lse = lses.const_data_ptr<float>() + first;
    a.dloss = dlosses.const_data_ptr<float>() + first;
    a.parts = parts_of(count, 1, kLogitsMostParts);
    const at::Tensor partial = gradients.partial(a.parts, a.partial);
    launch_cross_entropy_bwd(a, guard.stream());
    gradients.add(first, logits, partial, kOp, guard.stream());
  });
  return gradients.result();
}

}  // namespace fastbert
