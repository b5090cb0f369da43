// disentangled_attention for tensors.
#include <algorithm>
#include <array>

#include "cuda/ops/attention.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "disentangled_attention";
// Of the sums of positions there are as many parts as sequences of the longest one's length have
// this many rows.
constexpr int64_t kRowsOfParts = 2048;

struct Positions {
  at::Tensor key, query;  // (R, N, D), undefined without that term
  at::Tensor buckets;     // int32 (2 M + 1,)
};

at::Tensor table_of(const std::optional<at::Tensor>& table) {
  return table.has_value() ? with_contiguous_heads(*table) : at::Tensor();
}

Positions positions_of(const std::optional<at::Tensor>& key, const std::optional<at::Tensor>& query,
                       const at::Tensor& buckets) {
  TORCH_CHECK_TYPE(buckets.scalar_type() == at::kInt, kOp, ": buckets must be int32, got ",
                   buckets.scalar_type(), "; call .int() on it");
  TORCH_CHECK_VALUE(buckets.dim() == 1 && buckets.numel() % 2 == 1, kOp,
                    ": buckets must have shape (2 M + 1,), got ", buckets.sizes());
  return {table_of(key), table_of(query), buckets.contiguous()};
}

DisentangledAttention disentangled_attention_of(const Attention& content, const Positions& p) {
  return {content, heads_of(p.key), heads_of(p.query), p.buckets.const_data_ptr<int32_t>(),
          static_cast<int>(p.buckets.numel() / 2)};
}

// After backward, which has left delta.
at::Tensor position_gradient(const DisentangledAttention& p, const at::Tensor& table,
                             bool of_position_key, int64_t max_seqlen, Stream stream) {
  at::Tensor gradient = at::empty(table.sizes(), table.options());
  // Short sequences make few diagonals, each of pieces of many sequences.
  const int64_t longest = std::max<int64_t>(1, std::min(max_seqlen, p.content.rows_q));
  const int64_t diagonals = 2 * ((longest + 15) / 16) - 1;
  const int64_t parts =
      std::max<int64_t>(1, std::min<int64_t>(kRowsOfParts / longest, p.content.sequences));
  at::Tensor sums = at::empty({parts, diagonals, 32, table.size(1), table.size(2)},
                              table.options().dtype(at::kFloat));
  launch_position_gradient(p,
                           {of_position_key, parts, diagonals, sums.mutable_data_ptr<float>(),
                            table.size(0), gradient.mutable_data_ptr()},
                           stream);
  return gradient;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(disentangled_attention_fwd)(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& position_key, const std::optional<at::Tensor>& position_query,
    const at::Tensor& buckets, const at::Tensor& cu_seqlens, int64_t, double softmax_scale,
    double dropout_p, int64_t site, const std::optional<at::Tensor>& rng_state) {
  at::Tensor out = at::empty(query.sizes(), query.options());
  at::Tensor lse = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse};
  const DeviceGuard guard(query);
  const at::Tensor starts = starts_of(cu_seqlens, kOp, "cu_seqlens");
  const Positions p = positions_of(position_key, position_query, buckets);
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  Attention a = attention_of(q, k, v, {starts, starts},
                             {softmax_scale, std::nullopt, dropout_p, site, rng_state}, kOp);
  a.wide = are_wide_heads({q, k, v, out, p.key, p.query});
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  launch_disentangled_attention_fwd(disentangled_attention_of(a, p), guard.stream());
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(
    disentangled_attention_bwd)(const at::Tensor& dout, const at::Tensor& query,
                                const at::Tensor& key, const at::Tensor& value,
                                const std::optional<at::Tensor>& position_key,
                                const std::optional<at::Tensor>& position_query,
                                const at::Tensor& out, const at::Tensor& softmax_lse,
                                const at::Tensor& buckets, const at::Tensor& cu_seqlens,
                                int64_t max_seqlen, double softmax_scale, double dropout_p,
                                int64_t site, const std::optional<at::Tensor>& rng_state) {
  at::Tensor dq = at::empty(query.sizes(), query.options());
  at::Tensor dk = at::empty(key.sizes(), key.options());
  at::Tensor dv = at::empty(value.sizes(), value.options());
  const auto zeros_like = [&](const std::optional<at::Tensor>& table) {
    return table.has_value() ? at::zeros_like(*table, at::MemoryFormat::Contiguous)
                             : at::empty({0}, query.options());
  };
  if (query.numel() == 0) {
    return {dq, dk, dv, zeros_like(position_key), zeros_like(position_query)};
  }
  const DeviceGuard guard(query);
  const at::Tensor starts = starts_of(cu_seqlens, kOp, "cu_seqlens");
  const Positions p = positions_of(position_key, position_query, buckets);
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value), output = with_contiguous_heads(out);
  const at::Tensor gradient = with_contiguous_heads(dout.to(q.scalar_type()));
  const at::Tensor lse = softmax_lse.contiguous();
  at::Tensor delta = at::empty_like(lse);
  Attention a = attention_of(q, k, v, {starts, starts},
                             {softmax_scale, std::nullopt, dropout_p, site, rng_state}, kOp);
  a.wide = are_wide_heads({q, k, v, output, gradient, dq, dk, dv, p.key, p.query});
  a.out = heads_of(output);
  a.lse = const_cast<float*>(lse.const_data_ptr<float>());
  a.dout = heads_of(gradient);
  a.dq = heads_of(dq);
  a.dk = heads_of(dk);
  a.dv = heads_of(dv);
  a.delta = delta.mutable_data_ptr<float>();
  const DisentangledAttention inputs = disentangled_attention_of(a, p);
  launch_disentangled_attention_bwd(inputs, guard.stream());
  const auto of_table = [&](const at::Tensor& table, bool of_position_key) {
    if (!table.defined()) return at::empty({0}, query.options());
    return position_gradient(inputs, table, of_position_key, max_seqlen, guard.stream());
  };
  return {dq, dk, dv, of_table(p.key, true), of_table(p.query, false)};
}

}  // namespace fastbert
