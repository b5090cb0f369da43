// attention for tensors.
#include "cuda/ops/attention.h"

#include <array>

namespace fastbert {
namespace {

constexpr const char* kOp = "attention";

void attention_bwd_into(const at::Tensor& dout, const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value, const at::Tensor& out,
                        const at::Tensor& softmax_lse, const Lengths& starts,
                        const AttentionOptions& options,
                        const std::array<at::Tensor, 3>& gradients) {
  if (query.numel() == 0 && key.numel() == 0) return;
  const DeviceGuard guard(query);
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value), output = with_contiguous_heads(out);
  const at::Tensor gradient = with_contiguous_heads(dout.to(q.scalar_type()));
  const at::Tensor lse = softmax_lse.contiguous();
  at::Tensor delta = at::empty_like(lse);
  const auto& [dq, dk, dv] = gradients;
  Attention a = attention_of(q, k, v, starts, options, kOp);
  a.wide = are_wide_heads({q, k, v, output, gradient, dq, dk, dv});
  a.out = heads_of(output);
  a.lse = const_cast<float*>(lse.const_data_ptr<float>());
  a.dout = heads_of(gradient);
  a.dq = heads_of(dq);
  a.dk = heads_of(dk);
  a.dv = heads_of(dv);
  a.delta = delta.mutable_data_ptr<float>();
  launch_attention_bwd(a, guard.stream());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(attention_fwd)(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, int64_t, int64_t,
    double softmax_scale, c10::OptionalArrayRef<int64_t> window, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state) {
  at::Tensor out = at::empty(query.sizes(), query.options());
  at::Tensor lse = at::empty({query.size(1), query.size(0)}, query.options().dtype(at::kFloat));
  if (out.numel() == 0) return {out, lse};
  const DeviceGuard guard(query);
  const Lengths starts{starts_of(cu_seqlens_q, kOp, "cu_seqlens_q"),
                       starts_of(cu_seqlens_k, kOp, "cu_seqlens_k")};
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  Attention a =
      attention_of(q, k, v, starts, {softmax_scale, window, dropout_p, site, rng_state}, kOp);
  a.wide = are_wide_heads({q, k, v, out});
  a.out = heads_of(out);
  a.lse = lse.mutable_data_ptr<float>();
  launch_attention_fwd(a, guard.stream());
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(attention_bwd)(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& softmax_lse, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t, int64_t, double softmax_scale,
    c10::OptionalArrayRef<int64_t> window, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state) {
  at::Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(k.sizes(), k.options());
  at::Tensor dv = at::empty(v.sizes(), v.options());
  const Lengths starts{starts_of(cu_seqlens_q, kOp, "cu_seqlens_q"),
                       starts_of(cu_seqlens_k, kOp, "cu_seqlens_k")};
  attention_bwd_into(dout, q, k, v, out, softmax_lse, starts,
                     {softmax_scale, window, dropout_p, site, rng_state}, {dq, dk, dv});
  return {dq, dk, dv};
}

at::Tensor FASTBERT_CUDA_OP(attention_packed_qkv_bwd)(
    const at::Tensor& dout, const at::Tensor& qkv, int64_t num_heads, const at::Tensor& out,
    const at::Tensor& softmax_lse, const at::Tensor& cu_seqlens, int64_t, double softmax_scale,
    c10::OptionalArrayRef<int64_t> window, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state) {
  at::Tensor dqkv = at::empty(qkv.sizes(), qkv.options());
  const auto split = [&](const at::Tensor& t) {
    return t.view({t.size(0), 3, num_heads, t.size(1) / (3 * num_heads)}).unbind(1);
  };
  const at::Tensor input = qkv.contiguous(), starts = starts_of(cu_seqlens, kOp, "cu_seqlens");
  const auto parts = split(input), gradients = split(dqkv);
  attention_bwd_into(dout, parts[0], parts[1], parts[2], out, softmax_lse, {starts, starts},
                     {softmax_scale, window, dropout_p, site, rng_state},
                     {gradients[0], gradients[1], gradients[2]});
  return dqkv;
}

}  // namespace fastbert
