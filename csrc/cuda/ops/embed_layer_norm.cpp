// embed_layer_norm for tensors.
#include <array>

#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "embed_layer_norm";

Ids ids_of(const at::Tensor& ids) { return {ids.const_data_ptr(), ids.scalar_type() == at::kLong}; }

// Rows of dh, fp32 (T, C), summed by id into a table like `table`; `skipped` gets no gradient.
at::Tensor table_gradient(const at::Tensor& dh, const at::Tensor& ids, const at::Tensor& table,
                          int64_t skipped, Stream stream) {
  const int64_t rows = dh.size(0), columns = dh.size(1), table_rows = table.size(0);
  at::Tensor dtable = at::zeros({table_rows, columns}, table.options());
  if (rows == 0) return dtable;
  const bool wide = are_wide(columns, {dh, dtable});
  if (table_rows <= kFewRows) {
    const at::Tensor index = ids.contiguous();
    const Parts parts = parts_of(rows, 1, kLayerNormMostParts);
    at::Tensor partial = at::empty({1, parts.count, table_rows * columns}, dh.options());
    launch_small_table_gradient({wide, rows, columns, table_rows, dh.const_data_ptr<float>(),
                                 ids_of(index), skipped, partial.mutable_data_ptr<float>(), parts},
                                stream);
    sum_parts(partial, {dtable.view(-1)}, kOp, stream);
    return dtable;
  }
  const auto [sorted, order] =
      at::sort(ids.to(at::kLong).clamp(0, table_rows - 1), /*stable=*/true, 0, false);
  launch_table_gradient(
      {wide, rows, columns, dh.const_data_ptr<float>(), sorted.const_data_ptr<int64_t>(),
       order.const_data_ptr<int64_t>(), skipped, mutable_vector(dtable, kOp)},
      stream);
  return dtable;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(embed_layer_norm_fwd)(
    const std::optional<at::Tensor>& input_ids, const at::Tensor& token_type_ids,
    const at::Tensor& position_ids, const std::optional<at::Tensor>& word_weight,
    const at::Tensor& token_type_weight, const at::Tensor& position_weight,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, double eps,
    const std::optional<at::Tensor>& inputs_embeds, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state, at::ScalarType out_dtype,
    const std::optional<at::Tensor>& flag) {
  const int64_t rows = token_type_ids.size(0), columns = weight.size(0);
  const std::array<at::Tensor, 3> tables = {
      (inputs_embeds.has_value() ? *inputs_embeds : *word_weight).contiguous(),
      token_type_weight.contiguous(), position_weight.contiguous()};
  const at::Tensor& words = tables[0];
  TORCH_CHECK(out_dtype == words.scalar_type() || out_dtype == at::kFloat, kOp,
              ": out_dtype must be ", words.scalar_type(), " like the tables, or fp32, got ",
              out_dtype);
  const DeviceGuard guard(words);
  at::Tensor y = at::empty({rows, columns}, words.options().dtype(out_dtype));
  at::Tensor h = at::empty({rows, columns}, words.options());
  at::Tensor mean = at::empty({rows, 1}, words.options().dtype(at::kFloat));
  at::Tensor rstd = at::empty_like(mean);
  if (rows == 0) return {y, h, mean, rstd};
  const std::array<at::Tensor, 3> ids = {
      input_ids.has_value() && !inputs_embeds.has_value() ? input_ids->contiguous() : at::Tensor(),
      token_type_ids.contiguous(), position_ids.contiguous()};
  const at::Tensor weights = vector_of(weight, columns, kOp, "weight");
  const at::Tensor biases = vector_of(bias, columns, kOp, "bias");
  EmbedLayerNorm a{};
  a.dtype = dtype_of(words, kOp);
  a.y_dtype = dtype_of(y, kOp);
  a.wide = are_wide(columns, {tables[0], tables[1], tables[2], weights, biases, y, h});
  a.rows = rows;
  a.columns = columns;
  a.eps = static_cast<float>(eps);
  a.dropout = dropout_of(dropout_p, site, rng_state.value_or(at::Tensor()));
  for (int i = 0; i < 3; ++i) {
    if (ids[i].defined()) a.ids[i] = ids_of(ids[i]);
    a.tables[i] = {tables[i].const_data_ptr(), tables[i].size(0)};
  }
  a.weight = const_vector(weights, kOp);
  a.bias = const_vector(biases, kOp);
  a.flag = flag.has_value() ? flag->mutable_data_ptr<int64_t>() : nullptr;
  a.y = y.mutable_data_ptr();
  a.h = h.mutable_data_ptr();
  a.mean = mean.mutable_data_ptr<float>();
  a.rstd = rstd.mutable_data_ptr<float>();
  launch_embed_layer_norm_fwd(a, guard.stream());
  return {y, h, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(
    embed_layer_norm_bwd)(const at::Tensor& dy, const at::Tensor& h,
                          const std::optional<at::Tensor>& input_ids,
                          const at::Tensor& token_type_ids, const at::Tensor& position_ids,
                          const std::optional<at::Tensor>& word_weight,
                          const at::Tensor& token_type_weight, const at::Tensor& position_weight,
                          const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          const at::Tensor& mean, const at::Tensor& rstd,
                          std::optional<int64_t> padding_idx, double dropout_p, int64_t site,
                          const std::optional<at::Tensor>& rng_state, std::array<bool, 3> needs) {
  const int64_t rows = h.size(0), columns = h.size(1);
  const DeviceGuard guard(h);
  const auto dy_dtype = dy.scalar_type() == h.scalar_type() ? h.scalar_type() : at::kFloat;
  const at::Tensor gradient = dy.to(dy_dtype).contiguous(), sum = h.contiguous();
  const at::Tensor weights = vector_of(weight, columns, kOp, "weight");
  const at::Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  at::Tensor dh = at::empty({rows, columns}, h.options());
  at::Tensor wide_dh =
      h.scalar_type() == at::kFloat ? dh : at::empty_like(dh, dh.options().dtype(at::kFloat));
  const std::vector<at::Tensor> vectors = {at::empty({columns}, weight.options()),
                                           at::empty({columns}, bias.value_or(weight).options())};
  const Parts parts = parts_of(rows, kLayerNormPartStep, kLayerNormMostParts);
  at::Tensor partial = at::empty({2, parts.count, columns}, h.options().dtype(at::kFloat));
  if (rows > 0) {
    EmbedLayerNormGrad a{};
    a.dtype = dtype_of(sum, kOp);
    a.y_dtype = dtype_of(gradient, kOp);
    a.wide = are_wide(columns, {gradient, sum, weights, dh, wide_dh});
    a.rows = rows;
    a.columns = columns;
    a.dropout = dropout_of(dropout_p, site, rng_state.value_or(at::Tensor()));
    a.dy = gradient.const_data_ptr();
    a.h = sum.const_data_ptr();
    a.weight = const_vector(weights, kOp);
    a.mean = means.const_data_ptr<float>();
    a.rstd = rstds.const_data_ptr<float>();
    a.dh = dh.mutable_data_ptr();
    a.wide_dh = wide_dh.is_same(dh) ? nullptr : wide_dh.mutable_data_ptr<float>();
    a.partial = partial.mutable_data_ptr<float>();
    a.parts = parts;
    launch_embed_layer_norm_bwd(a, guard.stream());
  }
  sum_parts(partial, vectors, kOp, guard.stream());
  const auto of_table = [&](bool needed, const std::optional<at::Tensor>& ids,
                            const std::optional<at::Tensor>& table, int64_t skipped) {
    if (!needed || !ids.has_value()) return at::empty({0}, h.options());
    return table_gradient(wide_dh, *ids, *table, skipped, guard.stream());
  };
  return {dh,
          of_table(needs[0], input_ids, word_weight, padding_idx.value_or(-1)),
          of_table(needs[1], token_type_ids, token_type_weight, -1),
          of_table(needs[2], position_ids, position_weight, -1),
          vectors[0],
          bias.has_value() ? vectors[1] : at::empty({0}, h.options())};
}

}  // namespace fastbert
