// Keep masks of both dropout maps as tensors.
//
// Philox runs on blocks of 16 calls, one counter a lane, which the compiler turns into vector code
// for each instruction set.
#include "common/philox.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstring>

#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace fastbert {
constexpr int kLanes = 16;
constexpr int64_t kGrain = 4096;  // calls a thread should get at least

// bits[lane][word][half] of the calls with counters (c0[lane], c1[lane], site, offset).
FASTBERT_EACH_ISA void philox_block(const DropoutStream& s, const uint32_t* c0, const uint32_t* c1,
                                    uint16_t* bits) {
  uint32_t words[4][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const PhiloxWords w = philox4x32_7(c0[i], c1[i], s.site, s.offset, s.key_low, s.key_high);
    for (int k = 0; k < 4; ++k) words[k][i] = w.word[k];
  }
  for (int i = 0; i < kLanes; ++i) {
    for (int k = 0; k < 4; ++k) {
      bits[i * 8 + 2 * k] = static_cast<uint16_t>(words[k][i]);
      bits[i * 8 + 2 * k + 1] = static_cast<uint16_t>(words[k][i] >> 16);
    }
  }
}

FASTBERT_EACH_ISA void compare_bits(const uint16_t* bits, uint16_t threshold, int64_t n,
                                    bool* kept) {
  for (int64_t i = 0; i < n; ++i) kept[i] = bits[i] >= threshold;
}

namespace {

// The rows [begin, end) of a mask of `columns` features.
void row_keep_mask_rows(const DropoutStream& s, int64_t columns, int64_t begin, int64_t end,
                        bool* mask) {
  const int64_t calls = ceil_div(columns, 8);
  uint32_t low[kLanes], high[kLanes];
  uint16_t bits[kLanes * 8];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t first = 0; first < calls; first += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        const uint64_t call = static_cast<uint64_t>(row) * calls + first + i;
        low[i] = static_cast<uint32_t>(call);
        high[i] = static_cast<uint32_t>(call >> 32);
      }
      philox_block(s, low, high, bits);
      const int64_t column = first * 8;
      compare_bits(bits, static_cast<uint16_t>(s.threshold),
                   std::min<int64_t>(kLanes * 8, columns - column), mask + row * columns + column);
    }
  }
}

// Sixteen rows of the scores of one sequence and head, from row 16 * tile.
void score_keep_mask_tile(const DropoutStream& s, uint32_t sequence_head, int64_t tile,
                          int64_t seqlen_q, int64_t seqlen_k, bool* mask) {
  uint32_t place[kLanes], head[kLanes];
  uint16_t bits[kLanes * 8], row_bits[kLanes * 4];
  std::fill_n(head, kLanes, sequence_head);
  for (int64_t r = 0; r < 8 && tile * 16 + r < seqlen_q; ++r) {
    for (int64_t column = 0; column < seqlen_k; column += kLanes * 4) {
      for (int i = 0; i < kLanes; ++i) {
        place[i] = score_place(static_cast<uint32_t>(tile * 16 + r),
                               static_cast<uint32_t>(column + i / 4 * 16 + i % 4 * 2));
      }
      philox_block(s, place, head, bits);
      for (int below = 0; below < 2; ++below) {
        const int64_t row = tile * 16 + r + 8 * below;
        if (row >= seqlen_q) break;
        // Lane i holds columns 16 (i / 4) + 2 (i % 4) + {0, 1} of the left half of a tile and, in
        // its next word, of the right half.
        for (int i = 0; i < kLanes; ++i) {
          const int left = i / 4 * 16 + i % 4 * 2;
          std::memcpy(row_bits + left, bits + i * 8 + 4 * below, 4);
          std::memcpy(row_bits + left + 8, bits + i * 8 + 4 * below + 2, 4);
        }
        compare_bits(row_bits, static_cast<uint16_t>(s.threshold),
                     std::min<int64_t>(kLanes * 4, seqlen_k - column),
                     mask + row * seqlen_k + column);
      }
    }
  }
}

DropoutStream stream_of(const at::Tensor& rng_state, int64_t threshold, int64_t site) {
  TORCH_CHECK(rng_state.numel() == 2 && rng_state.scalar_type() == at::kLong,
              "keep mask: rng_state must be int64 of shape (2,), got ", rng_state.sizes());
  const at::Tensor state = rng_state.contiguous();
  const int64_t* values = state.const_data_ptr<int64_t>();
  return dropout_stream(values[0], values[1], static_cast<uint32_t>(site),
                        static_cast<uint32_t>(threshold));
}

}  // namespace

at::Tensor row_keep_mask_cpu(const at::Tensor& rng_state, int64_t num_rows, int64_t num_cols,
                             int64_t threshold, int64_t site) {
  at::Tensor mask = at::empty({num_rows, num_cols}, rng_state.options().dtype(at::kBool));
  if (threshold == 0 || threshold == kKeepNone) return mask.fill_(threshold == 0);
  const DropoutStream stream = stream_of(rng_state, threshold, site);
  bool* data = mask.mutable_data_ptr<bool>();
  const int64_t grain = kGrain / std::max<int64_t>(1, ceil_div(num_cols, 8));
  for_each_range(num_rows, grain, [&](int64_t begin, int64_t end) {
    row_keep_mask_rows(stream, num_cols, begin, end, data);
  });
  return mask;
}

at::Tensor score_keep_mask_cpu(const at::Tensor& rng_state, const at::Tensor& sequences,
                               int64_t num_heads, int64_t seqlen_q, int64_t seqlen_k,
                               int64_t threshold, int64_t site) {
  TORCH_CHECK(sequences.dim() == 1 && sequences.scalar_type() == at::kLong,
              "score_keep_mask: sequences must be int64 of shape (b,), got ", sequences.sizes());
  TORCH_CHECK_VALUE(seqlen_q <= 131072 && seqlen_k <= 262144,
                    "dropout of attention probabilities: at most 131072 queries and 262144 keys "
                    "in a sequence, got ",
                    seqlen_q, " and ", seqlen_k);
  const int64_t batch = sequences.size(0);
  at::Tensor mask =
      at::empty({batch, num_heads, seqlen_q, seqlen_k}, rng_state.options().dtype(at::kBool));
  if (threshold == 0 || threshold == kKeepNone) return mask.fill_(threshold == 0);
  const DropoutStream stream = stream_of(rng_state, threshold, site);
  const at::Tensor index = sequences.contiguous();
  const int64_t* sequence = index.const_data_ptr<int64_t>();
  bool* data = mask.mutable_data_ptr<bool>();
  const int64_t tiles = ceil_div(seqlen_q, 16);
  const int64_t grain = kGrain / std::max<int64_t>(1, 8 * ceil_div(seqlen_k, 4));
  for_each_range(batch * num_heads * tiles, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / tiles;
      const uint64_t sequence_head =
          static_cast<uint64_t>(sequence[block / num_heads]) * num_heads + block % num_heads;
      score_keep_mask_tile(stream, static_cast<uint32_t>(sequence_head), i % tiles, seqlen_q,
                           seqlen_k, data + block * seqlen_q * seqlen_k);
    }
  });
  return mask;
}

}  // namespace fastbert
