// The sum of BERT's three embeddings, LayerNorm and dropout, and their gradients. The gradient of
// a table is summed per table row over its tokens in their order: no atomics, any thread count.
#include <ATen/ATen.h>

#include <array>
#include <cstring>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/tensors.h"
#include "cpu/workspace.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "embed_layer_norm";
constexpr int64_t kFewRows = 8;  // tables this small are summed by parts of the tokens instead

at::Tensor int64_ids(const at::Tensor& ids) { return ids.to(at::kLong).contiguous(); }

// Callers check ranges with better words; a kernel must not read outside in any case.
void check_range(const char* name, const at::Tensor& ids, int64_t rows) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < rows, kOp, ": ", name, " holds ", id[i], " at row ", i,
                      ", its table has ", rows, " rows");
  }
}

// Tokens by table row: those of row r are order[starts[r]] to order[starts[r + 1] - 1], ascending.
void sort_by_row(const int64_t* ids, int64_t count, int64_t rows, int64_t* starts, int64_t* order) {
  std::fill_n(starts, rows + 2, 0);
  for (int64_t i = 0; i < count; ++i) ++starts[ids[i] + 2];
  for (int64_t row = 2; row < rows + 2; ++row) starts[row] += starts[row - 1];
  for (int64_t i = 0; i < count; ++i) order[starts[ids[i] + 1]++] = i;
}

at::Tensor few_rows_gradient(const float* dh, const int64_t* ids, int64_t count,
                             const at::Tensor& table, int64_t padding_idx) {
  const int64_t columns = table.size(1);
  return column_sums(count, columns, table.size(0),
                     [&](int64_t begin, int64_t end, float* sums) {
                       for (int64_t i = begin; i < end; ++i) {
                         if (ids[i] == padding_idx) continue;
                         kernels().add_to(dh + i * columns, sums + ids[i] * columns, columns);
                       }
                     })
      .to(table.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

at::Tensor table_gradient(const float* dh, const at::Tensor& ids, const at::Tensor& table,
                          int64_t padding_idx) {
  const int64_t rows = table.size(0), columns = table.size(1), count = ids.numel();
  const int64_t* id = ids.const_data_ptr<int64_t>();
  if (rows <= kFewRows) return few_rows_gradient(dh, id, count, table, padding_idx);
  at::Tensor gradient = empty_from_pool({rows, columns}, table.options());
  const Dtype dtype = dtype_of(table, kOp);
  const Workspace index((rows + 2 + count) * sizeof(int64_t));
  int64_t *starts = index.as<int64_t>(), *order = starts + rows + 2;
  sort_by_row(id, count, rows, starts, order);
  char* out = static_cast<char*>(gradient.mutable_data_ptr());
  const int64_t bytes = columns * table.element_size();
  for_each_row_range(rows, columns, [&](int64_t begin, int64_t end) {
    std::vector<float> total(columns);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = starts[row], last = starts[row + 1];
      if (first == last || row == padding_idx) {
        std::memset(out + row * bytes, 0, bytes);
        continue;
      }
      std::copy_n(dh + order[first] * columns, columns, total.data());
      for (int64_t i = first + 1; i < last; ++i) {
        kernels().add_to(dh + order[i] * columns, total.data(), columns);
      }
      kernels().convert(Dtype::kFloat, total.data(), dtype, out + row * bytes, columns);
    }
  });
  return gradient;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> embed_layer_norm_fwd_cpu(
    const std::optional<at::Tensor>& input_ids, const at::Tensor& token_type_ids,
    const at::Tensor& position_ids, const std::optional<at::Tensor>& word_weight,
    const at::Tensor& token_type_weight, const at::Tensor& position_weight,
    const at::Tensor& weight, const std::optional<at::Tensor>& bias, double eps,
    const std::optional<at::Tensor>& inputs_embeds, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state, at::ScalarType out_dtype) {
  const at::Tensor words = (inputs_embeds.has_value() ? *inputs_embeds : *word_weight).contiguous();
  const int64_t rows = token_type_ids.size(0), columns = weight.size(0);
  const bool has_ids = !inputs_embeds.has_value();
  const at::Tensor ids = has_ids ? int64_ids(*input_ids) : at::Tensor();
  const at::Tensor types = int64_ids(token_type_ids), positions = int64_ids(position_ids);
  if (has_ids) check_range("input_ids", ids, words.size(0));
  check_range("token_type_ids", types, token_type_weight.size(0));
  check_range("position_ids", positions, position_weight.size(0));
  const at::Tensor type_table = token_type_weight.contiguous();
  const at::Tensor position_table = position_weight.contiguous();
  const at::Tensor weights = float_vector(weight, columns, kOp, "weight");
  const at::Tensor biases = float_vector(bias, columns, kOp, "bias");
  at::Tensor y = empty_from_pool({rows, columns}, words.options());
  at::Tensor h = empty_from_pool({rows, columns}, words.options());
  at::Tensor mean = at::empty({rows, 1}, words.options().dtype(at::kFloat));
  at::Tensor rstd = at::empty_like(mean);
  const EmbedLayerNorm a{
      dtype_of(words, kOp),
      columns,
      static_cast<float>(eps),
      row_dropout(dropout_p, site, rng_state),
      has_ids ? ids.const_data_ptr<int64_t>() : nullptr,
      types.const_data_ptr<int64_t>(),
      positions.const_data_ptr<int64_t>(),
      words.const_data_ptr(),
      type_table.const_data_ptr(),
      position_table.const_data_ptr(),
      weights.const_data_ptr<float>(),
      data_or_null(biases),
      y.mutable_data_ptr(),
      h.mutable_data_ptr(),
      mean.mutable_data_ptr<float>(),
      rstd.mutable_data_ptr<float>(),
  };
  for_each_row_range(rows, columns, [&](int64_t begin, int64_t end) {
    kernels().embed_layer_norm_fwd(a, begin, end);
  });
  return {y.to(out_dtype), h, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
embed_layer_norm_bwd_cpu(const at::Tensor& dy, const at::Tensor& h,
                         const std::optional<at::Tensor>& input_ids,
                         const at::Tensor& token_type_ids, const at::Tensor& position_ids,
                         const std::optional<at::Tensor>& word_weight,
                         const at::Tensor& token_type_weight, const at::Tensor& position_weight,
                         const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const at::Tensor& mean, const at::Tensor& rstd,
                         std::optional<int64_t> padding_idx, double dropout_p, int64_t site,
                         const std::optional<at::Tensor>& rng_state, std::array<bool, 3> needs) {
  const int64_t rows = h.size(0), columns = h.size(1);
  const at::Tensor sum = h.contiguous(), gradient = dy.to(h.scalar_type()).contiguous();
  const at::Tensor weights = float_vector(weight, columns, kOp, "weight");
  const at::Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  const at::Tensor dh = empty_from_pool({rows, columns}, h.options().dtype(at::kFloat));
  const EmbedLayerNormGrad a{
      dtype_of(sum, kOp),
      columns,
      row_dropout(dropout_p, site, rng_state),
      gradient.const_data_ptr(),
      sum.const_data_ptr(),
      weights.const_data_ptr<float>(),
      means.const_data_ptr<float>(),
      rstds.const_data_ptr<float>(),
      dh.mutable_data_ptr<float>(),
  };
  const at::Tensor sums = column_sums(
      rows, columns, 1 + bias.has_value(), [&](int64_t begin, int64_t end, float* part) {
        kernels().embed_layer_norm_bwd(
            a, begin, end, {part, bias.has_value() ? part + columns : nullptr, nullptr});
      });
  const at::Tensor empty = at::empty({0}, h.options());
  const auto of_table = [&](bool needed, const std::optional<at::Tensor>& ids,
                            const std::optional<at::Tensor>& table, int64_t padding) {
    if (!needed || !ids.has_value()) return empty;
    const at::Tensor index = int64_ids(*ids);
    check_range("ids", index, table->size(0));
    return table_gradient(dh.const_data_ptr<float>(), index, *table, padding);
  };
  return {dh.to(h.scalar_type()),
          of_table(needs[0], input_ids, word_weight, padding_idx.value_or(-1)),
          of_table(needs[1], token_type_ids, token_type_weight, -1),
          of_table(needs[2], position_ids, position_weight, -1),
          sums[0].to(weight.scalar_type(), /*non_blocking=*/false, /*copy=*/true),
          bias.has_value() ? sums[1].to(bias->scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                           : empty};
}

}  // namespace fastbert
