// geglu for tensors.
#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "geglu";

// What forward and backward share; `out` is y or dx.
Geglu problem(const at::Tensor& x, const at::Tensor& bias, at::Tensor& out,
              std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "geglu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  Geglu a{};
  a.dtype = dtype_of(x, kOp);
  a.erf = approximate == "none";
  a.rows = x.size(0);
  a.columns = x.size(1) / 2;
  a.wide = are_wide(a.columns, {x, bias, out});
  a.x = x.const_data_ptr();
  a.bias = const_vector(bias, kOp);
  a.out = out.mutable_data_ptr();
  return a;
}

int64_t half_columns(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) % 2 == 0, "geglu: x must have shape (T, 2F), got ",
                    x.sizes());
  return x.size(1) / 2;
}

}  // namespace

at::Tensor FASTBERT_CUDA_OP(geglu_fwd)(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                                       std::string_view approximate) {
  const DeviceGuard guard(x);
  const at::Tensor input = x.contiguous();
  at::Tensor y = at::empty({x.size(0), half_columns(x)}, x.options());
  if (y.numel() == 0) return y;
  const at::Tensor biases = vector_of(bias, x.size(1), kOp, "bias");
  launch_geglu_fwd(problem(input, biases, y, approximate), guard.stream());
  return y;
}

std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(geglu_bwd)(
    const at::Tensor& dy, const at::Tensor& x, const std::optional<at::Tensor>& bias,
    std::string_view approximate) {
  const int64_t columns = half_columns(x);
  TORCH_CHECK_VALUE(dy.dim() == 2 && dy.size(0) == x.size(0) && dy.size(1) == columns,
                    "geglu: dy must have shape (", x.size(0), ", ", columns, "), got ", dy.sizes());
  const DeviceGuard guard(x);
  const at::Tensor input = x.contiguous();
  const at::Tensor gradient = dy.to(x.scalar_type()).contiguous();
  at::Tensor dx = at::empty(x.sizes(), x.options());
  at::Tensor dbias =
      bias.has_value() ? at::empty({x.size(1)}, bias->options()) : at::empty({0}, x.options());
  if (x.numel() == 0) return {dx, dbias.zero_()};
  const at::Tensor biases = vector_of(bias, x.size(1), kOp, "bias");
  Geglu a = problem(input, biases, dx, approximate);
  a.wide = a.wide && are_wide(columns, {gradient});
  a.dy = gradient.const_data_ptr();
  a.parts = parts_of(a.rows, 1, kGegluMostParts);
  at::Tensor partial;
  if (bias.has_value()) {
    partial = at::empty({2, a.parts.count, columns}, x.options().dtype(at::kFloat));
    a.partial = partial.mutable_data_ptr<float>();
  }
  launch_geglu_bwd(a, guard.stream());
  if (bias.has_value()) {
    sum_parts(partial, {dbias.narrow(0, 0, columns), dbias.narrow(0, columns, columns)}, kOp,
              guard.stream());
  }
  return {dx, dbias};
}

}  // namespace fastbert
