// Disentangled attention over packed sequences: the heads of all sequences are tasks. Backward
// takes the sequences in chains, each of which sums the gradients of the position tables in one
// order; which sequence is in which chain depends on the lengths alone, and the chains' sums are
// added up in order, so the results are the same for any number of threads.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "disentangled_attention";
// Multiplications of one task that are worth a thread.
constexpr int64_t kTaskGrain = int64_t{1} << 18;
constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 2;
// Chains of all heads together: each needs sums of its own.
constexpr int64_t kChains = 48;

struct Options {
  double softmax_scale, dropout_p;
  int64_t site;
  const std::optional<at::Tensor>& rng_state;
};

Heads heads_of(const at::Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }

at::Tensor with_contiguous_heads(const at::Tensor& t) {
  return t.stride(2) == 1 || t.size(2) == 1 ? t : t.contiguous();
}

// A sequence: its index and its rows.
struct Rows {
  int64_t sequence, first, count;
};

std::vector<Rows> sequences_of(const at::Tensor& cu_seqlens) {
  const at::Tensor starts = cu_seqlens.to(at::kLong).contiguous();
  const int64_t* start = starts.const_data_ptr<int64_t>();
  std::vector<Rows> found;
  for (int64_t i = 0; i + 1 < starts.numel(); ++i) {
    if (start[i + 1] > start[i]) found.push_back({i, start[i], start[i + 1] - start[i]});
  }
  return found;
}

// Rows that no task writes stand behind the last sequence.
bool leaves_rows(const at::Tensor& rows, const std::vector<Rows>& sequences) {
  return sequences.empty() || sequences.back().first + sequences.back().count < rows.size(0);
}

AttentionTask task_of(const Rows& rows, int64_t head) {
  return {rows.sequence, head,       rows.first, rows.count,
          rows.first,    rows.count, 0,          blocks_of(rows.count)};
}

// A position table spread out to a row a distance, and its packed blocks.
class SpreadTable {
 public:
  SpreadTable(const std::optional<at::Tensor>& table, const at::Tensor& index,
              Arithmetic arithmetic, bool backward) {
    if (!table.has_value()) return;
    rows_ = table->index_select(0, index);
    const int64_t heads = rows_.size(1), blocks = index.numel() / kBlock * blocks_of(rows_.size(2));
    const int64_t bytes = heads * blocks * bytes_per_block(arithmetic);
    panels_.emplace(bytes);
    if (backward) by_depth_.emplace(bytes);
  }

  Positions positions() const {
    if (!panels_.has_value()) return {};
    return {heads_of(rows_), panels_->as<char>(),
            by_depth_.has_value() ? by_depth_->as<char>() : nullptr};
  }

 private:
  at::Tensor rows_;
  std::optional<Workspace> panels_, by_depth_;
};

// The bucket of each distance from -32 half_blocks on: as the query's index rises, and as the
// key's does.
struct Distances {
  int64_t half_blocks;
  at::Tensor rising, falling;
};

Distances distances_of(const at::Tensor& buckets, const std::vector<Rows>& sequences) {
  const at::Tensor table = buckets.to(at::kLong).contiguous();
  const int64_t* bucket = table.const_data_ptr<int64_t>();
  const int64_t reach = table.numel() / 2;
  int64_t longest = 0;
  for (const Rows& rows : sequences) longest = std::max(longest, rows.count);
  // Behind a block of the last distance alone every block is like it.
  const int64_t half = std::min(blocks_of(reach) + 1, std::max<int64_t>(1, blocks_of(longest)));
  Distances d{half, at::empty({2 * half * kBlock}, at::kLong),
              at::empty({2 * half * kBlock}, at::kLong)};
  for (int64_t i = 0; i < 2 * half * kBlock; ++i) {
    const int64_t distance = std::clamp(i - half * kBlock, -reach, reach);
    d.rising.mutable_data_ptr<int64_t>()[i] = bucket[reach + distance];
    d.falling.mutable_data_ptr<int64_t>()[i] = bucket[reach - distance];
  }
  return d;
}

DisentangledAttention attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const Options& options) {
  Attention a{};
  a.dtype = dtype_of(q, kOp);
  // As for attention: scores of fp32 stay in plain fp32.
  a.arithmetic =
      q.scalar_type() == at::kFloat ? Arithmetic::kFloat : arithmetic_for(q.scalar_type());
  a.multiply = multiply_for(a.arithmetic);
  a.num_heads = q.size(1);
  a.head_dim = q.size(2);
  a.softmax_scale = static_cast<float>(options.softmax_scale);
  a.left = a.right = kFar;
  a.dropout = row_dropout(options.dropout_p, options.site, options.rng_state);
  a.q = heads_of(q);
  a.k = heads_of(k);
  a.v = heads_of(v);
  DisentangledAttention d{};
  d.content = a;
  return d;
}

// What a thread of either direction keeps.
struct Kept {
  Tiles tiles;
  Workspace scratch;
};

void pack_tables(const DisentangledAttention& d, bool backward) {
  for_each_range(d.content.num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) kernels().pack_positions(d, head, backward);
  });
}

std::vector<AttentionTask> forward_tasks(const std::vector<Rows>& sequences, int64_t num_heads) {
  const int64_t heads = static_cast<int64_t>(sequences.size()) * num_heads;
  const int64_t pieces = ceil_div(2 * at::get_num_threads(), std::max<int64_t>(1, heads));
  std::vector<AttentionTask> tasks;
  for (const Rows& rows : sequences) {
    const int64_t blocks = blocks_of(rows.count), step = ceil_div(blocks, pieces);
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t first = 0; first < blocks; first += step) {
        AttentionTask task = task_of(rows, head);
        task.first_block = first;
        task.last_block = std::min(blocks, first + step);
        tasks.push_back(task);
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const AttentionTask& x, const AttentionTask& y) {
    return (x.last_block - x.first_block) * x.num_k > (y.last_block - y.first_block) * y.num_k;
  });
  return tasks;
}

int64_t threads_for(const std::vector<Rows>& sequences, const Attention& a) {
  int64_t work = 0;
  for (const Rows& rows : sequences) work += rows.count * rows.count * a.head_dim * a.num_heads;
  return std::min<int64_t>(at::get_num_threads(), ceil_div(work, kTaskGrain));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> disentangled_attention_fwd_cpu(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& position_key, const std::optional<at::Tensor>& position_query,
    const at::Tensor& buckets, const at::Tensor& cu_seqlens, int64_t, double softmax_scale,
    double dropout_p, int64_t site, const std::optional<at::Tensor>& rng_state) {
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  const std::vector<Rows> sequences = sequences_of(cu_seqlens);
  const Distances distances = distances_of(buckets, sequences);
  DisentangledAttention d = attention_of(q, k, v, {softmax_scale, dropout_p, site, rng_state});
  Attention& a = d.content;
  const SpreadTable keys(position_key, distances.falling, a.arithmetic, false);
  const SpreadTable queries(position_query, distances.rising, a.arithmetic, false);
  d.half_blocks = distances.half_blocks;
  d.key = keys.positions();
  d.query = queries.positions();
  at::Tensor out = empty_from_pool({q.size(0), a.num_heads, a.head_dim}, q.options());
  at::Tensor lse = at::empty({a.num_heads, q.size(0)}, q.options().dtype(at::kFloat));
  if (leaves_rows(q, sequences)) {
    out.zero_();
    lse.fill_(-std::numeric_limits<float>::infinity());
  }
  a.out = heads_of(out);
  a.softmax_lse = lse.mutable_data_ptr<float>();
  a.lse_ld = q.size(0);
  pack_tables(d, false);
  const auto tasks = forward_tasks(sequences, a.num_heads);
  int64_t bytes = 0;
  for (const AttentionTask& t : tasks) {
    bytes = std::max(bytes, kernels().disentangled_attention_scratch(d, t, false));
  }
  in_turn(
      threads_for(sequences, a), static_cast<int64_t>(tasks.size()),
      [&] { return Kept{Tiles(a.arithmetic), Workspace(bytes)}; },
      [&](const Kept& kept, int64_t i) {
        kernels().disentangled_attention_fwd(d, tasks[i], kept.scratch.as<char>());
      });
  return {out, lse};
}

namespace {

using Chain = std::vector<Rows>;

// Long sequences first, each to the chain with the least work; in a chain in their order.
std::vector<Chain> chains_of(std::vector<Rows> sequences, int64_t num_heads) {
  const auto size = static_cast<int64_t>(sequences.size());
  const int64_t count = std::min(size, ceil_div(kChains, std::max<int64_t>(1, num_heads)));
  std::vector<Chain> chains(count);
  std::vector<int64_t> work(count);
  std::stable_sort(sequences.begin(), sequences.end(),
                   [](const Rows& x, const Rows& y) { return x.count > y.count; });
  for (const Rows& rows : sequences) {
    const auto least = std::min_element(work.begin(), work.end()) - work.begin();
    work[least] += blocks_of(rows.count) * blocks_of(rows.count);
    chains[least].push_back(rows);
  }
  return chains;
}

// The gradient of a table's rows, (rows, heads, head_dim), from the chains' sums by distance,
// (chains, heads, head_dim rounded up to 32, distances and more).
at::Tensor table_gradient(const std::optional<at::Tensor>& table, const at::Tensor& sums,
                          const at::Tensor& index) {
  if (!table.has_value()) return at::empty({0}, sums.options());
  const int64_t rows = table->size(0), heads = table->size(1), head_dim = table->size(2);
  const int64_t chains = sums.size(0), step = sums.size(3), plane = sums.size(2) * step;
  const int64_t* bucket = index.const_data_ptr<int64_t>();
  float* from = sums.mutable_data_ptr<float>();
  at::Tensor gradient = at::zeros({rows, heads, head_dim}, at::kFloat);
  float* to = gradient.mutable_data_ptr<float>();
  for_each_range(heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      float* sum = from + head * plane;
      for (int64_t chain = 1; chain < chains; ++chain) {
        kernels().add_to(sum + chain * heads * plane, sum, head_dim * step);
      }
      for (int64_t x = 0; x < index.numel(); ++x) {
        float* row = to + (bucket[x] * heads + head) * head_dim;
        for (int64_t column = 0; column < head_dim; ++column) {
          row[column] += sum[column * step + x];
        }
      }
    }
  });
  return gradient.to(table->scalar_type());
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
disentangled_attention_bwd_cpu(const at::Tensor& dout, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value,
                               const std::optional<at::Tensor>& position_key,
                               const std::optional<at::Tensor>& position_query, const at::Tensor&,
                               const at::Tensor& softmax_lse, const at::Tensor& buckets,
                               const at::Tensor& cu_seqlens, int64_t, double softmax_scale,
                               double dropout_p, int64_t site,
                               const std::optional<at::Tensor>& rng_state) {
  const at::Tensor q = with_contiguous_heads(query), k = with_contiguous_heads(key);
  const at::Tensor v = with_contiguous_heads(value);
  const at::Tensor gradient = with_contiguous_heads(dout.to(q.scalar_type()));
  const at::Tensor lse = softmax_lse.contiguous();
  const std::vector<Rows> sequences = sequences_of(cu_seqlens);
  const Distances distances = distances_of(buckets, sequences);
  DisentangledAttention d = attention_of(q, k, v, {softmax_scale, dropout_p, site, rng_state});
  Attention& a = d.content;
  const SpreadTable keys(position_key, distances.falling, a.arithmetic, true);
  const SpreadTable queries(position_query, distances.rising, a.arithmetic, true);
  d.half_blocks = distances.half_blocks;
  d.key = keys.positions();
  d.query = queries.positions();
  std::array<at::Tensor, 3> gradients;
  for (at::Tensor& g : gradients) {
    g = empty_from_pool(q.sizes(), q.options());
    if (leaves_rows(q, sequences)) g.zero_();
  }
  a.softmax_lse = const_cast<float*>(lse.const_data_ptr<float>());
  a.lse_ld = q.size(0);
  a.dout = heads_of(gradient);
  a.dq = heads_of(gradients[0]);
  a.dk = heads_of(gradients[1]);
  a.dv = heads_of(gradients[2]);
  pack_tables(d, true);
  const std::vector<Chain> chains = chains_of(sequences, a.num_heads);
  const auto num_chains = static_cast<int64_t>(chains.size());
  const int64_t width = blocks_of(a.head_dim) * kBlock;
  // Rows a power of two apart would crowd into a few sets of the L1 cache.
  const int64_t columns = 2 * d.half_blocks * kBlock + 16;
  const auto sums_for = [&](const Positions& table) {
    const int64_t count = table.panels == nullptr ? 0 : std::max<int64_t>(1, num_chains);
    return empty_from_pool({count, a.num_heads, width, columns}, q.options().dtype(at::kFloat))
        .zero_();
  };
  const at::Tensor key_sums = sums_for(d.key), query_sums = sums_for(d.query);
  int64_t bytes = 0;
  for (const Rows& rows : sequences) {
    bytes = std::max(bytes, kernels().disentangled_attention_scratch(d, task_of(rows, 0), true));
  }
  in_turn(
      threads_for(sequences, a), num_chains * a.num_heads,
      [&] { return Kept{Tiles(a.arithmetic), Workspace(bytes)}; },
      [&](const Kept& kept, int64_t i) {
        const int64_t at = i * width * columns;
        const auto part = [&](const at::Tensor& of_all) {
          return of_all.numel() == 0 ? nullptr : of_all.mutable_data_ptr<float>() + at;
        };
        const PositionSums sums{part(key_sums), part(query_sums), columns};
        for (const Rows& rows : chains[i / a.num_heads]) {
          kernels().disentangled_attention_bwd(d, task_of(rows, i % a.num_heads), sums,
                                               kept.scratch.as<char>());
        }
      });
  return {gradients[0], gradients[1], gradients[2],
          table_gradient(position_key, key_sums, distances.falling),
          table_gradient(position_query, query_sums, distances.rising)};
}

}  // namespace fastbert
