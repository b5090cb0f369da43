// Keep masks for tensors.
#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kRun = 16;

}  // namespace

at::Tensor FASTBERT_CUDA_OP(row_keep_mask)(const at::Tensor& rng_state, int64_t num_rows,
                                           int64_t num_cols, int64_t threshold, int64_t site) {
  const DeviceGuard guard(rng_state);
  at::Tensor mask = at::empty({num_rows, num_cols}, rng_state.options().dtype(at::kBool));
  if (threshold == 0) return mask.fill_(true);
  if (mask.numel() == 0) return mask;
  const at::Tensor state = rng_state.contiguous();
  RowKeepMask a{};
  a.dropout = dropout_of_threshold(static_cast<uint32_t>(threshold), site, state);
  a.wide = num_cols % kRun == 0;
  a.rows = num_rows;
  a.columns = num_cols;
  a.mask = mask.mutable_data_ptr<bool>();
  launch_row_keep_mask(a, guard.stream());
  return mask;
}

at::Tensor FASTBERT_CUDA_OP(score_keep_mask)(const at::Tensor& rng_state,
                                             const at::Tensor& sequences, int64_t num_heads,
                                             int64_t seqlen_q, int64_t seqlen_k, int64_t threshold,
                                             int64_t site) {
  check_score_mask(sequences, seqlen_q, seqlen_k);
  const DeviceGuard guard(rng_state);
  at::Tensor mask = at::empty({sequences.size(0), num_heads, seqlen_q, seqlen_k},
                              rng_state.options().dtype(at::kBool));
  if (threshold == 0) return mask.fill_(true);
  if (mask.numel() == 0) return mask;
  const at::Tensor state = rng_state.contiguous(), index = sequences.contiguous();
  ScoreKeepMask a{};
  a.dropout = dropout_of_threshold(static_cast<uint32_t>(threshold), site, state);
  a.wide = seqlen_k % kRun == 0;
  a.count = sequences.size(0);
  a.heads = num_heads;
  a.queries = seqlen_q;
  a.keys = seqlen_k;
  a.sequences = index.const_data_ptr<int64_t>();
  a.mask = mask.mutable_data_ptr<bool>();
  launch_score_keep_mask(a, guard.stream());
  return mask;
}

}  // namespace fastbert
