// The C++ kernels as ops: what fastbert/dispatch.py registers under the same names.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <vector>

namespace fastbert {

at::Tensor row_keep_mask_cpu(const at::Tensor&, int64_t, int64_t, int64_t, int64_t);
at::Tensor score_keep_mask_cpu(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t,
                               int64_t, int64_t);
at::Tensor bias_gelu_fwd_cpu(const at::Tensor&, const std::optional<at::Tensor>&, std::string_view);
std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cpu(const at::Tensor&, const at::Tensor&,
                                                     const std::optional<at::Tensor>&,
                                                     std::string_view);
at::Tensor geglu_fwd_cpu(const at::Tensor&, const std::optional<at::Tensor>&, std::string_view);
std::tuple<at::Tensor, at::Tensor> geglu_bwd_cpu(const at::Tensor&, const at::Tensor&,
                                                 const std::optional<at::Tensor>&,
                                                 std::string_view);
at::Tensor rotary_cpu(const at::Tensor&, int64_t, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_fwd_cpu(
    const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
    const at::Tensor&, const std::optional<at::Tensor>&, double, double, int64_t,
    const std::optional<at::Tensor>&, at::ScalarType, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_bwd_cpu(
    const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, double, int64_t, const std::optional<at::Tensor>&,
    at::ScalarType);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> embed_layer_norm_fwd_cpu(
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, double, const std::optional<at::Tensor>&, double, int64_t,
    const std::optional<at::Tensor>&, at::ScalarType);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
embed_layer_norm_bwd_cpu(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                         std::optional<int64_t>, double, int64_t, const std::optional<at::Tensor>&,
                         std::array<bool, 3>);
at::Tensor pack_linear_weights(at::TensorList, at::ScalarType);
at::Tensor quantize_linear_weights(at::TensorList, bool);
at::Tensor linear_fwd_cpu(const at::Tensor&, at::TensorList, at::TensorList,
                          const std::optional<at::Tensor>&);
std::tuple<at::Tensor, std::vector<at::Tensor>, std::vector<at::Tensor>> linear_bwd_cpu(
    const at::Tensor&, const at::Tensor&, at::TensorList, at::TensorList, bool, bool,
    const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor> linear_gelu_fwd_cpu(const at::Tensor&, const at::Tensor&,
                                                       const std::optional<at::Tensor>&,
                                                       const std::optional<at::Tensor>&,
                                                       std::string_view, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_gelu_bwd_cpu(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const at::Tensor&, std::string_view, bool, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gelu_mlp_bwd_cpu(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
    std::array<bool, 3>, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(const at::Tensor&, const at::Tensor&,
                                                     const at::Tensor&, const at::Tensor&,
                                                     const at::Tensor&, int64_t, int64_t, double,
                                                     c10::OptionalArrayRef<int64_t>, double,
                                                     int64_t, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd_cpu(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, double,
    c10::OptionalArrayRef<int64_t>, double, int64_t, const std::optional<at::Tensor>&);
at::Tensor attention_packed_qkv_bwd_cpu(const at::Tensor&, const at::Tensor&, int64_t,
                                        const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                        int64_t, double, c10::OptionalArrayRef<int64_t>, double,
                                        int64_t, const std::optional<at::Tensor>&);
at::Tensor encoder_fwd_cpu(const at::Tensor&, at::TensorList, at::TensorList, at::TensorList,
                           at::TensorList, const at::Tensor&, const at::Tensor&, int64_t, double,
                           double, std::string_view, std::optional<at::ScalarType>);
void empty_pool();
bool samples_match(at::TensorList, at::TensorList);
std::tuple<at::Tensor, at::Tensor> disentangled_attention_fwd_cpu(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, int64_t, double, double,
    int64_t, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
disentangled_attention_bwd_cpu(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&, const std::optional<at::Tensor>&,
                               const std::optional<at::Tensor>&, const at::Tensor&,
                               const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
                               double, double, int64_t, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor> mlm_cross_entropy_fwd_cpu(const at::Tensor&, const at::Tensor&,
                                                             const std::optional<at::Tensor>&,
                                                             const at::Tensor&, int64_t, double,
                                                             double);
std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_cross_entropy_bwd_cpu(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const at::Tensor&, const at::Tensor&, int64_t, double, double, bool, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_distillation_fwd_cpu(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t, double);
std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_distillation_bwd_cpu(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, int64_t, double, bool, bool);
at::Tensor unpad_cpu(const at::Tensor&, const at::Tensor&);
at::Tensor pad_cpu(const at::Tensor&, const at::Tensor&, int64_t);

}  // namespace fastbert
