// GELU(u) v of the halves (u, v) of x + bias, and its gradients.
#include <ATen/ATen.h>

#include "cpu/parallel.h"
#include "cpu/tensors.h"
#include "cpu/workspace.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "geglu";

bool is_erf(std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "geglu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  return approximate == "none";
}

int64_t half_columns(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) % 2 == 0, "geglu: x must have shape (T, 2F), got ",
                    x.sizes());
  return x.size(1) / 2;
}

}  // namespace

at::Tensor geglu_fwd_cpu(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                         std::string_view approximate) {
  const int64_t columns = half_columns(x);
  const at::Tensor input = x.contiguous();
  const at::Tensor bias_values = float_vector(bias, 2 * columns, kOp, "bias");
  at::Tensor y = empty_from_pool({x.size(0), columns}, input.options());
  const Geglu a{dtype_of(x, kOp),       is_erf(approximate),       columns,
                input.const_data_ptr(), data_or_null(bias_values), nullptr,
                y.mutable_data_ptr()};
  for_each_row_range(x.size(0), 2 * columns,
                     [&](int64_t begin, int64_t end) { kernels().geglu_fwd(a, begin, end); });
  return y;
}

std::tuple<at::Tensor, at::Tensor> geglu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x,
                                                 const std::optional<at::Tensor>& bias,
                                                 std::string_view approximate) {
  const int64_t columns = half_columns(x), rows = x.size(0);
  TORCH_CHECK_VALUE(dy.dim() == 2 && dy.size(0) == rows && dy.size(1) == columns,
                    "geglu: dy must have shape (", rows, ", ", columns, "), got ", dy.sizes());
  const at::Tensor input = x.contiguous();
  const at::Tensor gradient = dy.to(x.scalar_type()).contiguous();
  const at::Tensor bias_values = float_vector(bias, 2 * columns, kOp, "bias");
  at::Tensor dx = empty_from_pool(x.sizes(), input.options());
  const Geglu a{dtype_of(x, kOp),       is_erf(approximate),       columns,
                input.const_data_ptr(), data_or_null(bias_values), gradient.const_data_ptr(),
                dx.mutable_data_ptr()};
  if (!bias.has_value()) {
    for_each_row_range(rows, 2 * columns, [&](int64_t begin, int64_t end) {
      kernels().geglu_bwd(a, begin, end, nullptr);
    });
    return {dx, at::empty({0}, x.options())};
  }
  const at::Tensor dbias = column_sums(
      rows, 2 * columns, 1,
      [&](int64_t begin, int64_t end, float* sums) { kernels().geglu_bwd(a, begin, end, sums); });
  return {dx,
          dbias.view({2 * columns}).to(bias->scalar_type(), /*non_blocking=*/false, /*copy=*/true)};
}

}  // namespace fastbert
