// What both attentions ask of tensors.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/ops/tensors.h"

namespace fastbert {

struct AttentionOptions {
  double softmax_scale;
  c10::OptionalArrayRef<int64_t> window;
  double dropout_p;
  int64_t site;
  const std::optional<at::Tensor>& rng_state;
};

struct Lengths {
  at::Tensor q, k;  // int32 (B + 1,)
};

inline at::Tensor with_contiguous_heads(const at::Tensor& t) {
  return t.stride(2) == 1 || t.size(2) == 1 ? t : t.contiguous();
}

inline at::Tensor starts_of(const at::Tensor& cu_seqlens, const char* op, const char* name) {
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt, op, ": ", name, " must be int32, got ",
                   cu_seqlens.scalar_type(), "; call .int() on it");
  TORCH_CHECK_VALUE(cu_seqlens.numel() > 0, op, ": ", name,
                    " must have shape (B + 1,), got (0,); without sequences it is [0]");
  return cu_seqlens.contiguous();
}

// The kernel only reads those that are inputs; none where there is no tensor.
inline Heads heads_of(const at::Tensor& t) {
  if (!t.defined()) return {nullptr, 0, 0};
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1)};
}

// Whether every row of every head is whole pieces of 16 bytes, on 16-byte boundaries.
inline bool are_wide_heads(std::initializer_list<at::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
    if (!t.defined()) return true;
    const int64_t piece = 16 / t.element_size();
    return t.size(2) % piece == 0 && t.stride(0) % piece == 0 && t.stride(1) % piece == 0 &&
           reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  });
}

inline Attention attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const Lengths& starts, const AttentionOptions& options,
                              const char* op) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(q.size(0) <= kMostRows && k.size(0) <= kMostRows, op, ": at most ", kMostRows,
                    " rows are taken, got ", q.size(0), " and ", k.size(0), "; split the batch");
  const auto side = [&](size_t i) {
    const bool bound = options.window.has_value() && (*options.window)[i] >= 0;
    return bound ? static_cast<int>(std::min<int64_t>((*options.window)[i], kNoBound)) : kNoBound;
  };
  Attention a{};
  a.dtype = dtype_of(q, op);
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

}  // namespace fastbert
