// x [W ...]ᵀ + [b ...] and its gradients, in the dtype of x whatever the weights'.
#include <ATen/ATen.h>

#include <vector>

#include "cpu/gemm.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "linear";

at::Tensor joined_biases(at::TensorList biases, int64_t size) {
  if (biases.empty()) return {};
  const at::Tensor all = biases.size() == 1 ? biases[0] : at::cat(biases);
  return float_vector(all, size, kOp, "bias");
}

}  // namespace

at::Tensor pack_linear_weights(at::TensorList weights, at::ScalarType dtype) {
  return packed_weights(weights, dtype, std::nullopt, kOp).to_tensor();
}

at::Tensor quantize_linear_weights(at::TensorList weights, bool dynamic) {
  return quantized_weights(weights, dynamic, kOp).to_tensor();
}

at::Tensor linear_fwd_cpu(const at::Tensor& x, at::TensorList weights, at::TensorList biases,
                          const std::optional<at::Tensor>& packed) {
  const at::Tensor input = with_contiguous_rows(x);
  const PackedRight right = packed_weights(weights, x.scalar_type(), packed, kOp);
  const int64_t columns = right.columns();
  TORCH_CHECK_VALUE(x.size(1) == right.depth(), kOp, ": x must have ", right.depth(),
                    " columns, got ", x.sizes());
  const at::Tensor bias = joined_biases(biases, columns);
  at::Tensor y = empty_from_pool({x.size(0), columns}, x.options());
  Finish finish{dtype_of(y, kOp), y.mutable_data_ptr(), columns};
  finish.bias = data_or_null(bias);
  multiply(source_of(input, kOp), false, right, finish);
  return y;
}

std::tuple<at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>> linear_bwd_cpu(
    const at::Tensor& dy, const at::Tensor& x, at::TensorList weights, at::TensorList biases,
    bool need_dx, bool need_dweights, const std::optional<at::Tensor>& dresidual) {
  const at::Tensor gradient = with_contiguous_rows(dy.to(x.scalar_type()));
  const Source source = source_of(gradient, kOp);
  const at::Tensor dx =
      need_dx ? input_gradient(source, x, weights, kOp, dresidual) : at::empty({0}, x.options());
  std::vector<at::Tensor> dweights, dbiases;
  int64_t column = 0;
  for (const at::Tensor& weight : weights) {
    if (!need_dweights) break;
    const at::Tensor part = gradient.narrow(1, column, weight.size(0));
    dweights.push_back(weight_gradient(source_of(part, kOp), x, Gelu::kNone, weight, kOp));
    column += weight.size(0);
  }
  if (!biases.empty()) {
    const at::Tensor sums = sum_columns(source);
    column = 0;
    for (const at::Tensor& bias : biases) {
      dbiases.push_back(sums.narrow(0, column, bias.size(0))
                            .to(bias.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
      column += bias.size(0);
    }
  }
  return {dx, dweights, dbiases};
}

}  // namespace fastbert
