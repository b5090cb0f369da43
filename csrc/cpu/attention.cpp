// Attention over packed sequences: the heads of all sequences are tasks, long ones first, that
// threads take one after the other. Every task writes rows of its own, so the order is of no
// consequence to the results.
#include "cpu/attention.h"

#include <algorithm>
#include <array>
#include <limits>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "attention";
// Multiplications of one task that are worth a thread.
constexpr int64_t kTaskGrain = int64_t{1} << 18;
constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 2;
// Blocks of queries in a forward task with a window, so that the keys it sees stay in cache.
constexpr int64_t kWindowPiece = 16;

Heads heads_of(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

at::Tensor with_contiguous_heads(const at::Tensor& t) {
  return t.stride(2) == 1 || t.size(2) == 1 ? t : t.contiguous();
}

bool has_window(const Attention& a) { return a.left < kFar && a.right < kFar; }

using Kernel = void (*)(const Attention&, const AttentionTask&, char*);

// Rows that no task writes: behind the last sequence, and those of sequences without keys.
bool leaves_rows(const at::Tensor& rows, const std::vector<AttentionTask>& tasks, bool keys) {
  int64_t written = 0;
  for (const AttentionTask& t : tasks) {
    if (t.head == 0 && t.first_block == 0) written += keys ? t.num_k : t.num_q;
  }
  return written < rows.size(0);
}

}  // namespace

Attention attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOptions& options) {
  const auto side = [&](size_t i) {
    const bool bound = options.window.has_value() && (*options.window)[i] >= 0;
    return bound ? (*options.window)[i] : kFar;
  };
  Attention a{};
  a.dtype = dtype_of(q, kOp);
  // Scores of fp32 are few beside the layer's products: they stay in plain fp32.
  a.arithmetic =
      q.scalar_type() == at::kFloat ? Arithmetic::kFloat : arithmetic_for(q.scalar_type());
  a.multiply = multiply_for(a.arithmetic);
  a.num_heads = q.size(1);
  a.head_dim = q.size(2);
  a.softmax_scale = static_cast<float>(options.softmax_scale);
  a.left = side(0);
  a.right = side(1);
  a.dropout = row_dropout(options.dropout_p, options.site, options.rng_state);
  a.q = heads_of(q);
  a.k = heads_of(k);
  a.v = heads_of(v);
  return a;
}

// The host bounds of the lengths are of no use here: the lengths themselves are read.
std::vector<AttentionTask> attention_tasks(const at::Tensor& cu_seqlens_q,
                                           const at::Tensor& cu_seqlens_k, const Attention& a,
                                           bool cut_queries) {
  const at::Tensor q = cu_seqlens_q.to(at::kLong).contiguous();
  const at::Tensor k = cu_seqlens_k.to(at::kLong).contiguous();
  const int64_t *q_starts = q.const_data_ptr<int64_t>(), *k_starts = k.const_data_ptr<int64_t>();
  const int64_t sequences = q.numel() - 1;
  int64_t used = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    used += q_starts[i + 1] > q_starts[i] && k_starts[i + 1] > k_starts[i];
  }
  const int64_t wanted = 2 * at::get_num_threads();
  const int64_t pieces =
      cut_queries ? ceil_div(wanted, std::max<int64_t>(1, used * a.num_heads)) : 1;
  std::vector<AttentionTask> tasks;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t num_q = q_starts[i + 1] - q_starts[i], num_k = k_starts[i + 1] - k_starts[i];
    if (num_q == 0 || num_k == 0) continue;
    const int64_t blocks = ceil_div(num_q, kBlock);
    const int64_t most = cut_queries && has_window(a) ? kWindowPiece : blocks;
    const int64_t step = std::min(most, ceil_div(blocks, pieces));
    for (int64_t head = 0; head < a.num_heads; ++head) {
      for (int64_t first = 0; first < blocks; first += step) {
        tasks.push_back({i, head, q_starts[i], num_q, k_starts[i], num_k, first,
                         std::min(blocks, first + step)});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const AttentionTask& x, const AttentionTask& y) {
    return (x.last_block - x.first_block) * x.num_k > (y.last_block - y.first_block) * y.num_k;
  });
  return tasks;
}

void run_attention_tasks(const Attention& a, const std::vector<AttentionTask>& tasks,
                         bool backward) {
  if (tasks.empty()) return;
  int64_t bytes = 0, work = 0;
  for (const AttentionTask& t : tasks) {
    bytes = std::max(bytes, kernels().attention_scratch(a, t, backward));
    work += (t.last_block - t.first_block) * kBlock * t.num_k * a.head_dim;
  }
  const Kernel kernel = backward ? kernels().attention_bwd : kernels().attention_fwd;
  struct Kept {
    Tiles tiles;
    Workspace scratch;
  };
  in_turn(
      std::min<int64_t>(at::get_num_threads(), ceil_div(work, kTaskGrain)),
      static_cast<int64_t>(tasks.size()),
      [&] { return Kept{Tiles(a.arithmetic), Workspace(bytes)}; },
      [&](const Kept& kept, int64_t i) { kernel(a, tasks[i], kept.scratch.as<char>()); });
}

void start_attention(Attention& a, const std::vector<AttentionTask>& tasks, const at::Tensor& out,
                     const at::Tensor& lse) {
  if (leaves_rows(out, tasks, false)) {
    out.zero_();
    if (lse.defined()) lse.fill_(-std::numeric_limits<float>::infinity());
  }
  a.out = heads_of(out);
  if (!lse.defined()) return;
  a.softmax_lse = lse.mutable_data_ptr<float>();
  a.lse_ld = lse.size(1);
}

std::tuple<at::Tensor, at::Tensor> attention_fwd_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, int64_t, int64_t,
    double softmax_scale, c10::OptionalArrayRef<int64_t> window, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state) {
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  Attention a = attention_of(q, k, v, {softmax_scale, window, dropout_p, site, rng_state});
  const auto tasks = attention_tasks(cu_seqlens_q, cu_seqlens_k, a, true);
  at::Tensor out = empty_from_pool({q.size(0), a.num_heads, a.head_dim}, q.options());
  at::Tensor lse = at::empty({a.num_heads, q.size(0)}, q.options().dtype(at::kFloat));
  start_attention(a, tasks, out, lse);
  run_attention_tasks(a, tasks, false);
  return {out, lse};
}

namespace {

void attention_bwd_into(const at::Tensor& dout, const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value, const at::Tensor& softmax_lse,
                        const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                        const AttentionOptions& options, std::array<at::Tensor, 3> gradients) {
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  const at::Tensor gradient = with_contiguous_heads(dout.to(q.scalar_type()));
  const at::Tensor lse = softmax_lse.contiguous();
  Attention a = attention_of(q, k, v, options);
  const auto tasks = attention_tasks(cu_seqlens_q, cu_seqlens_k, a, false);
  for (int i = 0; i < 3; ++i) {
    if (leaves_rows(gradients[i], tasks, i > 0)) gradients[i].zero_();
  }
  a.softmax_lse = const_cast<float*>(lse.const_data_ptr<float>());
  a.lse_ld = q.size(0);
  a.dout = heads_of(gradient);
  a.dq = heads_of(gradients[0]);
  a.dk = heads_of(gradients[1]);
  a.dv = heads_of(gradients[2]);
  run_attention_tasks(a, tasks, true);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_bwd_cpu(
    const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor&, const at::Tensor& softmax_lse, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, int64_t, int64_t, double softmax_scale,
    c10::OptionalArrayRef<int64_t> window, double dropout_p, int64_t site,
    const std::optional<at::Tensor>& rng_state) {
  at::Tensor dq = empty_from_pool(q.sizes(), q.options());
  at::Tensor dk = empty_from_pool(k.sizes(), k.options());
  at::Tensor dv = empty_from_pool(v.sizes(), v.options());
  attention_bwd_into(dout, q, k, v, softmax_lse, cu_seqlens_q, cu_seqlens_k,
                     {softmax_scale, window, dropout_p, site, rng_state}, {dq, dk, dv});
  return {dq, dk, dv};
}

at::Tensor attention_packed_qkv_bwd_cpu(const at::Tensor& dout, const at::Tensor& qkv,
                                        int64_t num_heads, const at::Tensor&,
                                        const at::Tensor& softmax_lse, const at::Tensor& cu_seqlens,
                                        int64_t, double softmax_scale,
                                        c10::OptionalArrayRef<int64_t> window, double dropout_p,
                                        int64_t site, const std::optional<at::Tensor>& rng_state) {
  at::Tensor dqkv = empty_from_pool(qkv.sizes(), qkv.options());
  const auto split = [&](const at::Tensor& t) {
    return t.view({t.size(0), 3, num_heads, t.size(1) / (3 * num_heads)}).unbind(1);
  };
  const at::Tensor input = qkv.contiguous();
  const auto parts = split(input), gradients = split(dqkv);
  attention_bwd_into(dout, parts[0], parts[1], parts[2], softmax_lse, cu_seqlens, cu_seqlens,
                     {softmax_scale, window, dropout_p, site, rng_state},
                     {gradients[0], gradients[1], gradients[2]});
  return dqkv;
}

}  // namespace fastbert
