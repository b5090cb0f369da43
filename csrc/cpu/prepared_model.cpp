// A post-norm model from ids to outputs by one call: what its ops compute one after the other, with
// the same bits, over tensors that were looked at beforehand.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/ops.h"

namespace fastbert {
namespace {

using Tensors = std::vector<at::Tensor>;

// What a tensor was, which is not kept alive: torch.utils.swap_tensors would refuse it. What is
// read in every forward may get other values; what was packed may not.
struct Seen {
  bool packed;
  const void* data;
  std::optional<int64_t> version;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;

  Seen(const at::Tensor& t, bool packed)
      : packed(packed),
        data(t.const_data_ptr()),
        version(version_of(t)),
        dtype(t.scalar_type()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()) {}

  static std::optional<int64_t> version_of(const at::Tensor& t) {
    return t.is_inference() ? std::nullopt : std::optional<int64_t>(t._version());
  }

  bool holds(const at::Tensor& now) const {
    return now.device().is_cpu() && now.const_data_ptr() == data && now.scalar_type() == dtype &&
           now.sizes() == sizes && now.strides() == strides &&
           (!packed || version_of(now) == version);
  }
};

// The same memory under tensors of our own.
Tensors aliases(const Tensors& tensors) {
  Tensors found;
  for (const at::Tensor& t : tensors) found.push_back(t.detach());
  return found;
}

// A Linear; one without a weight is none.
struct Projection {
  Tensors weight, bias;
  std::optional<at::Tensor> packed;

  Projection(const Tensors& weight_and_bias, const std::optional<at::Tensor>& packed)
      : packed(packed) {
    if (weight_and_bias.empty()) return;
    weight = {weight_and_bias.at(0).detach()};
    bias = {weight_and_bias.at(1).detach()};
  }

  explicit operator bool() const { return !weight.empty(); }

  at::Tensor operator()(const at::Tensor& x, std::optional<at::ScalarType> compute_dtype) const {
    return linear_fwd_cpu(x.to(compute_dtype.value_or(x.scalar_type())), weight, bias, packed);
  }
};

// The rows of a batch that are computed.
struct PackedRows {
  std::optional<at::Tensor> indices;  // their positions among all; none where all are computed
  at::Tensor cu_seqlens_q, cu_seqlens_k;

  // (B, S) or (1, S) ids as (T,).
  at::Tensor of(const at::Tensor& ids, int64_t batch, int64_t seqlen) const {
    const at::Tensor rows =
        ids.expand({batch, seqlen}).to(at::kLong).contiguous().view({batch * seqlen});
    return indices.has_value() ? rows.index_select(0, *indices) : rows;
  }
};

// Those of a padded batch that are real tokens.
struct RealRows : PackedRows {
  at::Tensor firsts;
  bool starts_are_real = true;

  RealRows(const std::optional<at::Tensor>& mask, int64_t batch, int64_t seqlen)
      : firsts(at::empty({batch}, at::kLong)) {
    const at::Tensor real = mask.has_value() ? mask->ne(0).contiguous() : at::Tensor();
    const bool* is_real = mask.has_value() ? real.const_data_ptr<bool>() : nullptr;
    const at::Tensor found = at::empty({mask.has_value() ? batch * seqlen : 0}, at::kLong);
    int64_t *next = found.mutable_data_ptr<int64_t>(), *first = firsts.mutable_data_ptr<int64_t>();
    cu_seqlens_q = cu_seqlens_k = at::empty({batch + 1}, at::kInt);
    int32_t* starts = cu_seqlens_q.mutable_data_ptr<int32_t>();
    int64_t count = 0;
    for (int64_t text = 0; text < batch; ++text) {
      starts[text] = static_cast<int32_t>(count);
      first[text] = count;
      const int64_t begin = text * seqlen;
      if (is_real == nullptr) {
        count += seqlen;
        continue;
      }
      starts_are_real = starts_are_real && is_real[begin];
      for (int64_t row = begin; row < begin + seqlen; ++row) {
        if (is_real[row]) next[count++] = row;
      }
    }
    starts[batch] = static_cast<int32_t>(count);
    if (count < batch * seqlen) indices = found.narrow(0, 0, count);
  }

  // (T, C) back to (B, S, C), 0 at padding.
  at::Tensor padded(const at::Tensor& rows, int64_t batch, int64_t seqlen) const {
    const at::Tensor all = indices.has_value() ? pad_cpu(rows, *indices, batch * seqlen) : rows;
    return all.view({batch, seqlen, rows.size(1)});
  }
};

bool are_within(const at::Tensor& ids, const at::Tensor& table) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  return std::all_of(id, id + ids.numel(),
                     [rows = table.size(0)](int64_t i) { return i >= 0 && i < rows; });
}

}  // namespace

struct PreparedModel : torch::CustomClassHolder {
  Tensors tables, embedding_norm;
  Projection projection, pooler;
  Tensors weights, biases, norms, packed;
  int64_t num_heads;
  double embedding_eps, softmax_scale, eps;
  std::string approximate;
  std::optional<at::ScalarType> compute_dtype;
  Tensors views, samples;
  std::vector<Seen> seen;

  // read, packed_from: the model's tensors that are read in every forward, and those of which there
  // are packed copies.
  // tables: words, token types, positions. embedding_norm: weight and bias. projection, pooler:
  // weight and bias, or nothing. weights to packed, and what is behind: as encoder_fwd takes them.
  // views, samples: as samples_match does, of all weights that were packed.
  PreparedModel(const Tensors& read, const Tensors& packed_from, const Tensors& tables,
                const Tensors& embedding_norm, double embedding_eps, const Tensors& projection,
                const std::optional<at::Tensor>& packed_projection, const Tensors& pooler,
                const std::optional<at::Tensor>& packed_pooler, const Tensors& weights,
                const Tensors& biases, const Tensors& norms, Tensors packed, int64_t num_heads,
                double softmax_scale, double eps, std::string approximate,
                std::optional<at::ScalarType> compute_dtype, Tensors views, Tensors samples)
      : tables(aliases(tables)),
        embedding_norm(aliases(embedding_norm)),
        projection(projection, packed_projection),
        pooler(pooler, packed_pooler),
        weights(aliases(weights)),
        biases(aliases(biases)),
        norms(aliases(norms)),
        packed(std::move(packed)),
        num_heads(num_heads),
        embedding_eps(embedding_eps),
        softmax_scale(softmax_scale),
        eps(eps),
        approximate(std::move(approximate)),
        compute_dtype(compute_dtype),
        views(std::move(views)),
        samples(std::move(samples)) {
    for (const at::Tensor& t : read) seen.emplace_back(t, false);
    for (const at::Tensor& t : packed_from) seen.emplace_back(t, true);
  }

  // Whether `now`, what stands where `read` and `packed_from` were, is that, as far as can be seen
  // cheaply.
  bool holds(const Tensors& now) const {
    return std::equal(seen.begin(), seen.end(), now.begin(), now.end(),
                      [](const Seen& s, const at::Tensor& t) { return s.holds(t); }) &&
           samples_match(views, samples);
  }

  // input_ids: (B, S) integers. attention_mask, token_type_ids: (B, S) or none. position_ids:
  // (B, S) or (1, S). needs_first: position 0 of each text is read. Gives last_hidden_state
  // (B, S, C), or (B, 1, C) of position 0, and what is pooled (B, C); where there is no pooler the
  // rows at position 0, or nothing. Gives nothing where ids are outside their tables or position 0
  // is needed and masked.
  Tensors forward(const at::Tensor& input_ids, const std::optional<at::Tensor>& attention_mask,
                  const std::optional<at::Tensor>& token_type_ids, const at::Tensor& position_ids,
                  bool needs_first, bool first_only) const {
    RECORD_FUNCTION("fastbert::PreparedModel", c10::ArrayRef<const c10::IValue>{});
    const int64_t batch = input_ids.size(0), seqlen = input_ids.size(1);
    const RealRows real(attention_mask, batch, seqlen);
    if (needs_first && !real.starts_are_real) return {};
    const at::Tensor rows = encode(input_ids, token_type_ids, position_ids, real);
    if (!rows.defined()) return {};
    if (!needs_first) return {real.padded(rows, batch, seqlen)};
    const at::Tensor first = unpad_cpu(rows, real.firsts);
    return {first_only ? first.unsqueeze(1) : real.padded(rows, batch, seqlen),
            pooler ? pooler(first, compute_dtype).tanh_() : first};
  }

  // The same up to the rows (T, C) behind the last layer, of a batch whose rows are known.
  // indices: (T,), or none. cu_seqlens_q, cu_seqlens_k: as encoder_fwd takes them. Gives nothing
  // where ids are outside their tables.
  Tensors forward_rows(const at::Tensor& input_ids, const std::optional<at::Tensor>& token_type_ids,
                       const at::Tensor& position_ids, const std::optional<at::Tensor>& indices,
                       const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k) const {
    RECORD_FUNCTION("fastbert::PreparedModel", c10::ArrayRef<const c10::IValue>{});
    const at::Tensor rows =
        encode(input_ids, token_type_ids, position_ids, {indices, cu_seqlens_q, cu_seqlens_k});
    return rows.defined() ? Tensors{rows} : Tensors{};
  }

 private:
  at::Tensor encode(const at::Tensor& input_ids, const std::optional<at::Tensor>& token_type_ids,
                    const at::Tensor& position_ids, const PackedRows& some) const {
    const int64_t batch = input_ids.size(0), seqlen = input_ids.size(1);
    const at::Tensor ids = some.of(input_ids, batch, seqlen);
    const at::Tensor positions = some.of(position_ids, batch, seqlen);
    const at::Tensor types =
        token_type_ids.has_value() ? some.of(*token_type_ids, batch, seqlen) : at::zeros_like(ids);
    if (!are_within(ids, tables[0]) || !are_within(types, tables[1]) ||
        !are_within(positions, tables[2])) {
      return {};
    }
    at::Tensor rows = std::get<0>(
        embed_layer_norm_fwd_cpu(ids, types, positions, tables[0], tables[1], tables[2],
                                 embedding_norm[0], embedding_norm[1], embedding_eps, std::nullopt,
                                 0.0, 0, std::nullopt, tables[0].scalar_type()));
    if (projection) rows = projection(rows, compute_dtype);
    return encoder_fwd_cpu(rows, weights, biases, norms, packed, some.cu_seqlens_q,
                           some.cu_seqlens_k, num_heads, softmax_scale, eps, approximate,
                           compute_dtype);
  }
};

}  // namespace fastbert

TORCH_LIBRARY_FRAGMENT(fastbert, m) {
  using fastbert::PreparedModel;
  using Tensors = std::vector<at::Tensor>;
  m.class_<PreparedModel>("PreparedModel")
      .def(torch::init<Tensors, Tensors, Tensors, Tensors, double, Tensors,
                       std::optional<at::Tensor>, Tensors, std::optional<at::Tensor>, Tensors,
                       Tensors, Tensors, Tensors, int64_t, double, double, std::string,
                       std::optional<at::ScalarType>, Tensors, Tensors>())
      .def("holds", &PreparedModel::holds)
      .def("forward", &PreparedModel::forward)
      .def("forward_rows", &PreparedModel::forward_rows);
}
