// GELU(x Wᵀ + b), with the GELU in the product's last step, and the gradients of the feed-forward
// network it begins.
#include <ATen/ATen.h>

#include <array>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "linear_gelu";

at::Tensor bias_gradient(const Source& gradient, const std::optional<at::Tensor>& bias,
                         const at::Tensor& like) {
  return bias.has_value() ? sum_columns(gradient).to(bias->scalar_type())
                          : at::empty({0}, like.options());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> linear_gelu_fwd_cpu(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& packed, std::string_view approximate, bool keep_preact) {
  const at::Tensor input = with_contiguous_rows(x);
  const int64_t columns = weight.size(0);
  const at::Tensor biases = float_vector(bias, columns, kOp, "bias");
  at::Tensor y = empty_from_pool({x.size(0), columns}, x.options());
  at::Tensor preact =
      keep_preact ? empty_from_pool(y.sizes(), x.options()) : at::empty({0}, x.options());
  Finish finish{dtype_of(y, kOp), y.mutable_data_ptr(), columns};
  finish.bias = data_or_null(biases);
  finish.gelu = gelu_of(approximate, kOp);
  finish.preact = keep_preact ? preact.mutable_data_ptr() : nullptr;
  multiply(source_of(input, kOp), false, packed_weights(weight, x.scalar_type(), packed, kOp),
           finish);
  return {y, preact};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_gelu_bwd_cpu(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& preact, std::string_view approximate,
    bool need_dx, bool need_dweight) {
  const at::Tensor gradient = dy.to(x.scalar_type()).contiguous(), u = preact.contiguous();
  const at::Tensor dpreact = empty_from_pool(u.sizes(), u.options());
  const BiasGelu slope{dtype_of(u, kOp),
                       gelu_of(approximate, kOp) == Gelu::kErf,
                       u.size(1),
                       u.const_data_ptr(),
                       nullptr,
                       gradient.const_data_ptr(),
                       dpreact.mutable_data_ptr()};
  for_each_row_range(u.size(0), u.size(1), [&](int64_t begin, int64_t end) {
    kernels().bias_gelu_bwd(slope, begin, end, nullptr);
  });
  const Source source = source_of(dpreact, kOp);
  return {need_dx ? input_gradient(source, x, weight, kOp) : at::empty({0}, x.options()),
          need_dweight ? weight_gradient(source, x, Gelu::kNone, weight, kOp)
                       : at::empty({0}, weight.options()),
          bias_gradient(source, bias, weight)};
}

// Of gelu(x W₁ᵀ + b₁) W₂ᵀ + b₂: GELU's slope is applied as the gradient of its output is made, its
// value computed again as the second weight's gradient reads it. needs: dx, dweight_in,
// dweight_out. dresidual is x's other gradient and added to dx.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gelu_mlp_bwd_cpu(
    const at::Tensor& dout, const at::Tensor& x, const at::Tensor& weight_in,
    const std::optional<at::Tensor>& bias_in, const at::Tensor& preact,
    const at::Tensor& weight_out, const std::optional<at::Tensor>& bias_out,
    std::string_view approximate, std::array<bool, 3> needs,
    const std::optional<at::Tensor>& dresidual) {
  const Gelu gelu = gelu_of(approximate, kOp);
  const at::Tensor gradient = with_contiguous_rows(dout.to(x.scalar_type()));
  const at::Tensor u = preact.contiguous();
  const Source source = source_of(gradient, kOp);
  const auto none = [&] { return at::empty({0}, x.options()); };
  const at::Tensor dweight_out =
      needs[2] ? weight_gradient(source, u, gelu, weight_out, kOp) : none();
  const at::Tensor dbias_out = bias_gradient(source, bias_out, weight_out);
  if (!needs[0] && !needs[1] && !bias_in.has_value()) {
    return {none(), none(), none(), dweight_out, dbias_out};
  }
  const at::Tensor dpreact = empty_from_pool(u.sizes(), u.options());
  Finish finish{dtype_of(u, kOp), dpreact.mutable_data_ptr(), u.size(1)};
  finish.gelu = gelu;
  finish.slope_at = u.const_data_ptr();
  input_gradient(source, weight_out, x.scalar_type(), finish, kOp);
  const Source inner = source_of(dpreact, kOp);
  return {needs[0] ? input_gradient(inner, x, weight_in, kOp, dresidual) : none(),
          needs[1] ? weight_gradient(inner, x, Gelu::kNone, weight_in, kOp) : none(),
          bias_gradient(inner, bias_in, weight_in), dweight_out, dbias_out};
}

}  // namespace fastbert
