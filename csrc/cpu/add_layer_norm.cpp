// LayerNorm(residual + dropout(x + linear_bias)) and its gradients.
#include <ATen/ATen.h>

#include "cpu/parallel.h"
#include "cpu/tensors.h"
#include "cpu/workspace.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "add_layer_norm";

// x and residual as the kernels take them: of one dtype, or with an fp32 residual.
at::Tensor residual_for(const at::Tensor& x, const std::optional<at::Tensor>& residual) {
  if (!residual.has_value()) return {};
  const bool same = residual->scalar_type() == x.scalar_type();
  return (same ? *residual : residual->to(at::kFloat)).contiguous();
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd_cpu(
    const at::Tensor& x, const std::optional<at::Tensor>& linear_bias,
    const std::optional<at::Tensor>& residual, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, double eps, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state, at::ScalarType out_dtype, bool keep_sum) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const at::Tensor input = x.contiguous(), added = residual_for(x, residual);
  const auto sum_dtype = residual.has_value()
                             ? at::promote_types(x.scalar_type(), residual->scalar_type())
                             : x.scalar_type();
  const RowDropout dropout = row_dropout(dropout_p, site, rng_state);
  const bool identity =
      !linear_bias.has_value() && !residual.has_value() && dropout.stream.threshold == 0;
  at::Tensor y = empty_from_pool({rows, columns}, x.options().dtype(sum_dtype));
  at::Tensor h = keep_sum && !identity ? empty_from_pool({rows, columns}, y.options())
                                       : at::empty({0}, x.options());
  at::Tensor mean = at::empty({rows, 1}, x.options().dtype(at::kFloat));
  at::Tensor rstd = at::empty_like(mean);
  const at::Tensor weights = float_vector(weight, columns, kOp, "weight");
  const at::Tensor biases = float_vector(bias, columns, kOp, "bias");
  const at::Tensor linear_biases = float_vector(linear_bias, columns, kOp, "linear_bias");
  const AddLayerNorm a{
      dtype_of(x, kOp),
      added.defined() ? dtype_of(added, kOp) : dtype_of(x, kOp),
      columns,
      static_cast<float>(eps),
      dropout,
      input.const_data_ptr(),
      data_or_null(linear_biases),
      added.defined() ? added.const_data_ptr() : nullptr,
      weights.const_data_ptr<float>(),
      data_or_null(biases),
      y.mutable_data_ptr(),
      h.numel() > 0 ? h.mutable_data_ptr() : nullptr,
      mean.mutable_data_ptr<float>(),
      rstd.mutable_data_ptr<float>(),
  };
  for_each_row_range(rows, columns, [&](int64_t begin, int64_t end) {
    kernels().add_layer_norm_fwd(a, begin, end);
  });
  return {y.to(out_dtype), h, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd_cpu(
    const at::Tensor& dy, const std::optional<at::Tensor>& dh, const at::Tensor& h,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& mean,
    const at::Tensor& rstd, const std::optional<at::Tensor>& linear_bias, double dropout_p,
    int64_t site, const std::optional<at::Tensor>& rng_state, at::ScalarType x_dtype) {
  const int64_t rows = h.size(0), columns = h.size(1);
  const RowDropout dropout = row_dropout(dropout_p, site, rng_state);
  // The kernels take h of x's dtype, or fp32 where x is narrower; dy has h's dtype.
  const bool widen = h.scalar_type() != x_dtype && h.scalar_type() != at::kFloat;
  const auto h_dtype = widen ? at::kFloat : h.scalar_type();
  const at::Tensor sum = h.to(h_dtype).contiguous(), gradient = dy.to(h_dtype).contiguous();
  const at::Tensor sum_gradient = dh.has_value() ? dh->to(h_dtype).contiguous() : at::Tensor();
  const bool same = dropout.stream.threshold == 0 && x_dtype == h.scalar_type();
  at::Tensor dresidual = empty_from_pool({rows, columns}, sum.options());
  at::Tensor dx = same ? at::empty({0}, h.options())
                       : empty_from_pool({rows, columns}, h.options().dtype(x_dtype));
  const at::Tensor weights = float_vector(weight, columns, kOp, "weight");
  const at::Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const AddLayerNormGrad a{
      dtype_of(sum, kOp),
      same ? dtype_of(sum, kOp) : dtype_of(dx, kOp),
      columns,
      dropout,
      gradient.const_data_ptr(),
      dh.has_value() ? sum_gradient.const_data_ptr() : nullptr,
      sum.const_data_ptr(),
      weights.const_data_ptr<float>(),
      means.const_data_ptr<float>(),
      rstds.const_data_ptr<float>(),
      same ? nullptr : dx.mutable_data_ptr(),
      dresidual.mutable_data_ptr(),
  };
  const int64_t vectors = 1 + bias.has_value() + linear_bias.has_value();
  const at::Tensor sums =
      column_sums(rows, columns, vectors, [&](int64_t begin, int64_t end, float* part) {
        kernels().add_layer_norm_bwd(
            a, begin, end,
            {part, bias.has_value() ? part + columns : nullptr,
             linear_bias.has_value() ? part + (vectors - 1) * columns : nullptr});
      });
  const auto vector = [&](const std::optional<at::Tensor>& like, int64_t index) {
    if (!like.has_value()) return at::empty({0}, h.options());
    return sums[index].to(like->scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  };
  return {dx, dresidual.to(h.scalar_type()), vector(weight, 0), vector(bias, 1),
          vector(linear_bias, vectors - 1)};
}

}  // namespace fastbert
