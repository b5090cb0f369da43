// Keep masks of both dropout maps of docs/dropout.md as tensors. Letters: T rows, C columns; b
// sequences, N heads.
//
// A thread makes the calls of whole runs of sixteen elements, so that a run is one 16-byte store.
#include "common/philox.h"
#include "cuda/common.cuh"

namespace fastbert {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 16;
constexpr int64_t kMostBlocksDown = 65535;

// What lies beyond the row has no place. With kWide rows are whole runs.
template <bool kWide>
__device__ __forceinline__ void store_run(bool* row, int64_t column, int64_t columns,
                                          const Pack<bool>& kept) {
  if constexpr (kWide) {
    store_pack(row + column, kept);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (column + i < columns) row[column + i] = kept.element[i];
    }
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) row_keep_mask_kernel(const RowKeepMask a) {
  const int64_t run = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t runs_of_row = ceil_div(a.columns, kRun);
  if (run >= a.rows * runs_of_row) return;
  const int64_t row = run / runs_of_row, column = run % runs_of_row * kRun;
  const DropoutStream stream = stream_of(a.dropout);
  const int64_t first_call = row * ceil_div(a.columns, kChunk) + column / kChunk;
  Pack<bool> kept;
#pragma unroll
  for (int half = 0; half < kRun / kChunk; ++half) {
    const PhiloxWords words = row_call(stream, first_call + half);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      kept.element[half * kChunk + i] = keeps(stream, words.word[i / 2], i % 2);
    }
  }
  store_run<kWide>(a.mask + row * a.columns, column, a.columns, kept);
}

// Sixteen keys of two queries, eight rows apart, are four calls.
template <bool kWide>
__global__ void __launch_bounds__(kThreads) score_keep_mask_kernel(const ScoreKeepMask a) {
  const int64_t block = blockIdx.x;
  const int64_t sequence = a.sequences[block / a.heads];
  const uint32_t head = static_cast<uint32_t>(sequence * a.heads + block % a.heads);
  const DropoutStream stream = stream_of(a.dropout);
  const int64_t key_runs = ceil_div(a.keys, kRun);
  const int64_t runs = ceil_div(a.queries, 2 * kChunk) * kChunk * key_runs;
  for (int64_t run = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; run < runs;
       run += static_cast<int64_t>(gridDim.y) * kThreads) {
    const int64_t pair = run / key_runs, key = run % key_runs * kRun;
    const int64_t query = pair / kChunk * 2 * kChunk + pair % kChunk;
    PhiloxWords words[4];
#pragma unroll
    for (int call = 0; call < 4; ++call) {
      const uint32_t first = static_cast<uint32_t>(key) + 2 * call;
      words[call] = score_call(stream, score_place(static_cast<uint32_t>(query), first), head);
    }
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int64_t row = query + 8 * lower;
      Pack<bool> kept;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        kept.element[i] = keeps(stream, words[i % 8 / 2].word[score_word(8 * lower, i)], i % 2);
      }
      if (row < a.queries) {
        store_run<kWide>(a.mask + (block * a.queries + row) * a.keys, key, a.keys, kept);
      }
    }
  }
}

}  // namespace

void launch_row_keep_mask(const RowKeepMask& a, Stream stream) {
  const int64_t runs = a.rows * ceil_div(a.columns, kRun);
  launch(a.wide ? row_keep_mask_kernel<true> : row_keep_mask_kernel<false>,
         static_cast<unsigned>(ceil_div(runs, kThreads)), kThreads, 0, stream, a);
}

void launch_score_keep_mask(const ScoreKeepMask& a, Stream stream) {
  const int64_t runs = ceil_div(a.queries, 2 * kChunk) * kChunk * ceil_div(a.keys, kRun);
  const int64_t down = ceil_div(runs, kThreads);
  const dim3 grid(static_cast<unsigned>(a.count * a.heads),
                  static_cast<unsigned>(down < kMostBlocksDown ? down : kMostBlocksDown));
  launch(a.wide ? score_keep_mask_kernel<true> : score_keep_mask_kernel<false>, grid, kThreads, 0,
         stream, a);
}

}  // namespace fastbert
