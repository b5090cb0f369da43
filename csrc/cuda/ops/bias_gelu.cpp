// bias_gelu for tensors.
#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "bias_gelu";

// What forward and backward share; rows are those of the last dimension.
BiasGelu problem(const at::Tensor& x, const at::Tensor& bias, at::Tensor& out,
                 std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "bias_gelu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  BiasGelu a{};
  a.dtype = dtype_of(x, kOp);
  a.erf = approximate == "none";
  a.columns = x.size(-1);
  a.rows = x.numel() / a.columns;
  a.wide = are_wide(a.columns, {x, bias, out});
  a.x = x.const_data_ptr();
  a.bias = const_vector(bias, kOp);
  a.out = out.mutable_data_ptr();
  return a;
}

}  // namespace

at::Tensor FASTBERT_CUDA_OP(bias_gelu_fwd)(const at::Tensor& x,
                                           const std::optional<at::Tensor>& bias,
                                           std::string_view approximate) {
  const DeviceGuard guard(x);
  const at::Tensor input = x.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  const at::Tensor biases = vector_of(bias, x.size(-1), kOp, "bias");
  launch_bias_gelu_fwd(problem(input, biases, y, approximate), guard.stream());
  return y;
}

std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(bias_gelu_bwd)(
    const at::Tensor& dy, const at::Tensor& x, const std::optional<at::Tensor>& bias,
    std::string_view approximate) {
  TORCH_CHECK_VALUE(dy.sizes() == x.sizes(), "bias_gelu: dy must have the shape of x ", x.sizes(),
                    ", got ", dy.sizes());
  const DeviceGuard guard(x);
  const at::Tensor input = x.contiguous();
  const at::Tensor gradient = dy.to(x.scalar_type()).contiguous();
  at::Tensor dx = at::empty(x.sizes(), x.options());
  at::Tensor dbias =
      bias.has_value() ? at::empty({x.size(-1)}, bias->options()) : at::empty({0}, x.options());
  if (x.numel() == 0) return {dx, dbias.zero_()};
  const at::Tensor biases = vector_of(bias, x.size(-1), kOp, "bias");
  BiasGelu a = problem(input, biases, dx, approximate);
  a.wide = a.wide && are_wide(a.columns, {gradient});
  a.dy = gradient.const_data_ptr();
  a.parts = parts_of(a.rows, 1, kBiasGeluMostParts);
  at::Tensor partial;
  if (bias.has_value()) {
    partial = at::empty({1, a.parts.count, a.columns}, x.options().dtype(at::kFloat));
    a.partial = partial.mutable_data_ptr<float>();
  }
  launch_bias_gelu_bwd(a, guard.stream());
  if (bias.has_value()) sum_parts(partial, {dbias}, kOp, guard.stream());
  return {dx, dbias};
}

}  // namespace fastbert
