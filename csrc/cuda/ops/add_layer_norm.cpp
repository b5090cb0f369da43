// add_layer_norm for tensors.
#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "add_layer_norm";

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(add_layer_norm_fwd)(
    const at::Tensor& x, const std::optional<at::Tensor>& linear_bias,
    const std::optional<at::Tensor>& residual, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, double eps, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state, at::ScalarType out_dtype, bool keep_sum) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const auto sum_dtype = residual.has_value()
                             ? at::promote_types(x.scalar_type(), residual->scalar_type())
                             : x.scalar_type();
  TORCH_CHECK(out_dtype == sum_dtype || out_dtype == at::kFloat, kOp, ": out_dtype must be ",
              sum_dtype, " like the sum, or fp32, got ", out_dtype);
  const DeviceGuard guard(x);
  const at::Tensor input = x.contiguous();
  const at::Tensor added =
      residual.has_value() ? residual->to(sum_dtype).contiguous() : at::Tensor();
  const Dropout dropout = dropout_of(dropout_p, site, rng_state.value_or(at::Tensor()));
  const bool identity = !linear_bias.has_value() && !added.defined() && dropout.threshold == 0;
  at::Tensor y = at::empty({rows, columns}, x.options().dtype(out_dtype));
  at::Tensor h = keep_sum && !identity ? at::empty({rows, columns}, x.options().dtype(sum_dtype))
                                       : at::empty({0}, x.options());
  at::Tensor mean = at::empty({rows, 1}, x.options().dtype(at::kFloat));
  at::Tensor rstd = at::empty_like(mean);
  if (rows == 0) return {y, h, mean, rstd};
  const at::Tensor weights = vector_of(weight, columns, kOp, "weight");
  const at::Tensor biases = vector_of(bias, columns, kOp, "bias");
  const at::Tensor linear_biases = vector_of(linear_bias, columns, kOp, "linear_bias");
  AddLayerNorm a{};
  a.x_dtype = dtype_of(x, kOp);
  a.sum_dtype = added.defined() ? dtype_of(added, kOp) : a.x_dtype;
  a.y_dtype = dtype_of(y, kOp);
  a.wide = are_wide(columns, {input, added, weights, biases, linear_biases, y, h});
  a.rows = rows;
  a.columns = columns;
  a.eps = static_cast<float>(eps);
  a.dropout = dropout;
  a.x = input.const_data_ptr();
  a.linear_bias = const_vector(linear_biases, kOp);
  a.residual = data_or_null(added);
  a.weight = const_vector(weights, kOp);
  a.bias = const_vector(biases, kOp);
  a.y = y.mutable_data_ptr();
  a.h = h.numel() > 0 ? h.mutable_data_ptr() : nullptr;
  a.mean = mean.mutable_data_ptr<float>();
  a.rstd = rstd.mutable_data_ptr<float>();
  launch_add_layer_norm_fwd(a, guard.stream());
  return {y, h, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(
    add_layer_norm_bwd)(const at::Tensor& dy, const std::optional<at::Tensor>& dh,
                        const at::Tensor& h, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias, const at::Tensor& mean,
                        const at::Tensor& rstd, const std::optional<at::Tensor>& linear_bias,
                        double dropout_p, int64_t site, const std::optional<at::Tensor>& rng_state,
                        at::ScalarType x_dtype) {
  const int64_t rows = h.size(0), columns = h.size(1);
  TORCH_CHECK(x_dtype == h.scalar_type() || h.scalar_type() == at::kFloat, kOp,
              ": h must be of x's dtype ", x_dtype, " or fp32, got ", h.scalar_type());
  const DeviceGuard guard(h);
  const Dropout dropout = dropout_of(dropout_p, site, rng_state.value_or(at::Tensor()));
  const bool same = dropout.threshold == 0 && x_dtype == h.scalar_type();
  const auto dy_dtype = dy.scalar_type() == h.scalar_type() ? h.scalar_type() : at::kFloat;
  const at::Tensor gradient = dy.to(dy_dtype).contiguous(), sum = h.contiguous();
  const at::Tensor sum_gradient =
      dh.has_value() ? dh->to(h.scalar_type()).contiguous() : at::Tensor();
  at::Tensor dresidual = at::empty({rows, columns}, h.options());
  at::Tensor dx =
      same ? at::empty({0}, h.options()) : at::empty({rows, columns}, h.options().dtype(x_dtype));
  const at::Tensor weights = vector_of(weight, columns, kOp, "weight");
  const at::Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  std::vector<at::Tensor> vectors = {at::empty({columns}, weight.options()),
                                     at::empty({columns}, bias.value_or(weight).options())};
  if (linear_bias.has_value()) vectors.push_back(at::empty({columns}, linear_bias->options()));
  const Parts parts = parts_of(rows, kLayerNormPartStep, kLayerNormMostParts);
  at::Tensor partial = at::empty({static_cast<int64_t>(vectors.size()), parts.count, columns},
                                 h.options().dtype(at::kFloat));
  if (rows > 0) {
    AddLayerNormGrad a{};
    a.sum_dtype = dtype_of(sum, kOp);
    a.x_dtype = same ? a.sum_dtype : dtype_of(dx, kOp);
    a.y_dtype = dtype_of(gradient, kOp);
    a.wide = are_wide(columns, {gradient, sum_gradient, sum, weights, dx, dresidual});
    a.rows = rows;
    a.columns = columns;
    a.dropout = dropout;
    a.dy = gradient.const_data_ptr();
    a.dh = data_or_null(sum_gradient);
    a.h = sum.const_data_ptr();
    a.weight = const_vector(weights, kOp);
    a.mean = means.const_data_ptr<float>();
    a.rstd = rstds.const_data_ptr<float>();
    a.dx = same ? nullptr : dx.mutable_data_ptr();
    a.dresidual = dresidual.mutable_data_ptr();
    a.partial = partial.mutable_data_ptr<float>();
    a.has_linear_bias = linear_bias.has_value();
    a.parts = parts;
    launch_add_layer_norm_bwd(a, guard.stream());
  }
  sum_parts(partial, vectors, kOp, guard.stream());
  return {dx, dresidual, vectors[0], bias.has_value() ? vectors[1] : at::empty({0}, h.options()),
          linear_bias.has_value() ? vectors[2] : at::empty({0}, h.options())};
}

}  // namespace fastbert
