// GELU(x + bias) and its gradient.
#include <ATen/ATen.h>

#include "cpu/parallel.h"
#include "cpu/tensors.h"
#include "cpu/workspace.h"

namespace fastbert {
namespace {

constexpr int64_t kRun = 512;

bool is_erf(std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "bias_gelu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  return approximate == "none";
}

}  // namespace

at::Tensor bias_gelu_fwd_cpu(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                             std::string_view approximate) {
  const bool erf = is_erf(approximate);
  const at::Tensor input = x.contiguous();
  at::Tensor y = empty_from_pool(x.sizes(), input.options());
  if (x.numel() == 0) return y;
  // Without a bias rows mean nothing, and one long row has no short tail.
  const int64_t columns = bias.has_value() ? x.size(-1) : kRun;
  const at::Tensor bias_values = float_vector(bias, columns, "bias_gelu", "bias");
  BiasGelu a{dtype_of(x, "bias_gelu"),
             erf,
             columns,
             input.const_data_ptr(),
             data_or_null(bias_values),
             nullptr,
             y.mutable_data_ptr()};
  const int64_t rows = x.numel() / columns, tail = x.numel() % columns;
  for_each_row_range(rows, columns,
                     [&](int64_t begin, int64_t end) { kernels().bias_gelu_fwd(a, begin, end); });
  if (tail > 0) {
    const int64_t done = rows * columns * x.element_size();
    a.columns = tail;
    a.x = static_cast<const char*>(a.x) + done;
    a.out = static_cast<char*>(a.out) + done;
    kernels().bias_gelu_fwd(a, 0, 1);
  }
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x,
                                                     const std::optional<at::Tensor>& bias,
                                                     std::string_view approximate) {
  const bool erf = is_erf(approximate);
  TORCH_CHECK_VALUE(dy.sizes() == x.sizes(), "bias_gelu: dy must have the shape of x ", x.sizes(),
                    ", got ", dy.sizes());
  const at::Tensor input = x.contiguous();
  const at::Tensor gradient = dy.to(x.scalar_type()).contiguous();
  at::Tensor dx = empty_from_pool(x.sizes(), input.options());
  const int64_t columns = x.size(-1);
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const at::Tensor bias_values = float_vector(bias, columns, "bias_gelu", "bias");
  const BiasGelu a{dtype_of(x, "bias_gelu"),
                   erf,
                   columns,
                   input.const_data_ptr(),
                   data_or_null(bias_values),
                   gradient.const_data_ptr(),
                   dx.mutable_data_ptr()};
  if (!bias.has_value()) {
    for_each_row_range(rows, columns, [&](int64_t begin, int64_t end) {
      kernels().bias_gelu_bwd(a, begin, end, nullptr);
    });
    return {dx, at::empty({0}, x.options())};
  }
  const at::Tensor dbias =
      column_sums(rows, columns, 1, [&](int64_t begin, int64_t end, float* sums) {
        kernels().bias_gelu_bwd(a, begin, end, sums);
      });
  return {dx, dbias.view({columns}).to(bias->scalar_type(), /*non_blocking=*/false, /*copy=*/true)};
}

}  // namespace fastbert
