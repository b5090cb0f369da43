// Attention over packed sequences as tasks on raw pointers, for the ops that compute it.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <vector>

#include "cpu/kernels.h"

namespace fastbert {

struct AttentionOptions {
  double softmax_scale;
  c10::OptionalArrayRef<int64_t> window;
  double dropout_p;
  int64_t site;
  const std::optional<at::Tensor>& rng_state;
};

// Of q (Tq, num_heads, head_dim), k and v (Tk, num_heads, head_dim) with contiguous heads, without
// what is written.
Attention attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options);

// The heads of all sequences; cut into blocks of queries where there are fewer than threads want.
std::vector<AttentionTask> attention_tasks(const at::Tensor& cu_seqlens_q,
                                           const at::Tensor& cu_seqlens_k, const Attention& a,
                                           bool cut_queries);

// Where forward writes: out (Tq, num_heads, head_dim) and lse (num_heads, Tq), undefined where it
// is of no use, with the values of the rows that no task writes.
void start_attention(Attention& a, const std::vector<AttentionTask>& tasks, const at::Tensor& out,
                     const at::Tensor& lse);

void run_attention_tasks(const Attention& a, const std::vector<AttentionTask>& tasks,
                         bool backward);

}  // namespace fastbert
