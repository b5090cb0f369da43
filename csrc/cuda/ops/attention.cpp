// attention for tensors.
#include <algorithm>
#include <array>
#include <limits>

#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "attention";

struct Options {
  double softmax_scale;
  c10::OptionalArrayRef<int64_t> window;
  double dropout_p;
  int64_t site;
  const std::optional<at::Tensor>& rng_state;
};

struct Lengths {
  at::Tensor q, k;  // int32 (B + 1,)
};

at::Tensor with_contiguous_heads(const at::Tensor& t) {
  return t.stride(2) == 1 || t.size(2) == 1 ? t : t.contiguous();
}

at::Tensor starts_of(const at::Tensor& cu_seqlens, const char* name) {
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, kOp, ": ", name, " must be int32, got ",
                   cu_seqlens.scalar_type(), "; call .int() on it");
  TORCH_CHECK_VALUE(cu_seqlens.numel() > 0, kOp, ": ", name,
                    " must have shape (B + 1,), got (0,); without sequences it is [0]");
  return cu_seqlens.contiguous();
}

// The kernel only reads those that are inputs.
Heads heads_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1)};
}

// Whether every row of every head is whole pieces of 16 bytes, on 16-byte boundaries.
bool are_wide_heads(std::initializer_list<at::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
    const int64_t piece = 16 / t.element_size();
    return t.size(2) % piece == 0 && t.stride(0) % piece == 0 && t.stride(1) % piece == 0 &&
           reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  });
}

Attention attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const Lengths& starts, const Options& options) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(q.size(0) <= kMostRows && k.size(0) <= kMostRows, kOp, ": at most ", kMostRows,
                    " rows are taken, got ", q.size(0), " and ", k.size(0), "; split the batch");
  const auto side = [&](size_t i) {
    const bool bound = options.window.has_value() && (*options.window)[i] >= 0;
    return bound ? static_cast<int>(std::min<int64_t>((*options.window)[i], kNoBound)) : kNoBound;
  };
  Attention a{};
  a.dtype = dtype_of(q, kOp);
  a.rows_q = q.size(0);
  a.rows_k = k.size(0);
  a.heads = static_cast<int>(q.size(1));
  a.head_dim = static_cast<int>(q.size(2));
  a.sequences = static_cast<int>(starts.q.size(0)) - 1;
  a.softmax_scale = static_cast<float>(options.softmax_scale);
  a.left = side(0);
  a.right = side(1);
  a.dropout = dropout_of(options.dropout_p, options.site, options.rng_state.value_or(at::Tensor()));
  a.cu_seqlens_q = starts.q.const_data_ptr<int32_t>();
  a.cu_seqlens_k = starts.k.const_data_ptr<int32_t>();
  a.q = heads_of(q);
  a.k = heads_of(k);
  a.v = heads_of(v);
  return a;
}

void attention_bwd_into(const at::Tensor& dout, const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value, const at::Tensor& out,
                        const at::Tensor& softmax_lse, const Lengths& starts,
                        const Options& options, const std::array<at::Tensor, 3>& gradients) {
  if (query.numel() == 0 && key.numel() == 0) return;
  const DeviceGuard guard(query);
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value), output = with_contiguous_heads(out);
  const at::Tensor gradient = with_contiguous_heads(dout.to(q.scalar_type()));
  const at::Tensor lse = softmax_lse.contiguous();
  at::Tensor delta = at::empty_like(lse);
  const auto& [dq, dk, dv] = gradients;
  Attention a = attention_of(q, k, v, starts, options);
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
  const Lengths starts{starts_of(cu_seqlens_q, "cu_seqlens_q"),
                       starts_of(cu_seqlens_k, "cu_seqlens_k")};
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  Attention a = attention_of(q, k, v, starts, {softmax_scale, window, dropout_p, site, rng_state});
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
  const Lengths starts{starts_of(cu_seqlens_q, "cu_seqlens_q"),
                       starts_of(cu_seqlens_k, "cu_seqlens_k")};
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
  const at::Tensor input = qkv.contiguous(), starts = starts_of(cu_seqlens, "cu_seqlens");
  const auto parts = split(input), gradients = split(dqkv);
  attention_bwd_into(dout, parts[0], parts[1], parts[2], out, softmax_lse, {starts, starts},
                     {softmax_scale, window, dropout_p, site, rng_state},
                     {gradients[0], gradients[1], gradients[2]});
  return dqkv;
}

}  // namespace fastbert
