// Keep masks of both dropout maps as tensors.
#include "common/philox.h"

#include <ATen/ATen.h>

#include <vector>

#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr int64_t kCallGrain = 4096;  // calls a thread should get at least
constexpr int64_t kTile = 16;

}  // namespace

at::Tensor row_keep_mask_cpu(const at::Tensor& rng_state, int64_t num_rows, int64_t num_cols,
                             int64_t threshold, int64_t site) {
  at::Tensor mask = at::empty({num_rows, num_cols}, rng_state.options().dtype(at::kBool));
  if (threshold == 0) return mask.fill_(true);
  const DropoutStream stream = stream_of(rng_state, static_cast<uint32_t>(threshold), site);
  bool* data = mask.mutable_data_ptr<bool>();
  const int64_t grain = kCallGrain / std::max<int64_t>(1, ceil_div(num_cols, 8));
  for_each_range(num_rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> bits(ceil_div(num_cols, 32));
    for (int64_t row = begin; row < end; ++row) {
      kernels().row_keep_bits(stream, row, num_cols, bits.data());
      kernels().expand_bits(bits.data(), num_cols, data + row * num_cols);
    }
  });
  return mask;
}

at::Tensor score_keep_mask_cpu(const at::Tensor& rng_state, const at::Tensor& sequences,
                               int64_t num_heads, int64_t seqlen_q, int64_t seqlen_k,
                               int64_t threshold, int64_t site) {
  check_score_mask(sequences, seqlen_q, seqlen_k);
  const int64_t batch = sequences.size(0);
  at::Tensor mask =
      at::empty({batch, num_heads, seqlen_q, seqlen_k}, rng_state.options().dtype(at::kBool));
  if (threshold == 0) return mask.fill_(true);
  const DropoutStream stream = stream_of(rng_state, static_cast<uint32_t>(threshold), site);
  const at::Tensor index = sequences.contiguous();
  const int64_t* sequence = index.const_data_ptr<int64_t>();
  bool* data = mask.mutable_data_ptr<bool>();
  const int64_t tiles = ceil_div(seqlen_q, kTile), words = ceil_div(seqlen_k, 32);
  const int64_t grain = kCallGrain / std::max<int64_t>(1, 8 * ceil_div(seqlen_k, 4));
  for_each_range(batch * num_heads * tiles, grain, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> bits(kTile * words);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / tiles, first = i % tiles * kTile;
      const auto sequence_head = static_cast<uint32_t>(
          static_cast<uint64_t>(sequence[block / num_heads]) * num_heads + block % num_heads);
      kernels().score_keep_bits(stream, sequence_head, first, 0, seqlen_k, words, bits.data());
      for (int64_t row = first; row < std::min(seqlen_q, first + kTile); ++row) {
        kernels().expand_bits(bits.data() + (row - first) * words, seqlen_k,
                              data + (block * seqlen_q + row) * seqlen_k);
      }
    }
  });
  return mask;
}

}  // namespace fastbert
