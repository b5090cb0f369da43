// The backward of disentangled attention: attention's two kernels with the terms of positions, and
// one for the gradients of their tables. Every run gives the same bits.
#pragma once

#include "cuda/attention_bwd.cuh"
#include "cuda/disentangled_attention.cuh"

namespace fastbert {

template <typename T, int kDim>
using DisentangledBackwardTiles = BackwardTiles<T, kDim, kRowsBesideBands<kDim>>;

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, resident_blocks<T>(kDim))
    disentangled_attention_bwd_dq_kernel(const DisentangledAttention p) {
  using Terms = BlockTerms<T, kDim, /*kOwnsKeys=*/false>;
  attention_bwd_dq<T, kDim, DisentangledBackwardTiles<T, kDim>, Terms>(p.content, p);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    disentangled_attention_bwd_dkv_kernel(const DisentangledAttention p) {
  using Terms = BlockTerms<T, kDim, /*kOwnsKeys=*/true>;
  attention_bwd_dkv<T, kDim, DisentangledBackwardTiles<T, kDim>, Terms>(p.content, p);
}

template <typename T>
void launch_disentangled_attention_bwd_of(const DisentangledAttention& p, Stream stream) {
  with_padded_dim(p.content.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    using Tiles = DisentangledBackwardTiles<T, kDim>;
    constexpr size_t kBytes = Tiles::kBytes + BlockTerms<T, kDim, false>::kBytes;
    static_assert(kBytes + Tiles::kStatisticsBytes <= kMostShared);
    const dim3 grid(blocks_of(p.content.rows_q, p.content.sequences), p.content.heads);
    launch(disentangled_attention_bwd_dq_kernel<T, kDim>, grid, kThreads, kBytes, stream, p);
    launch(disentangled_attention_bwd_dkv_kernel<T, kDim>, grid, kThreads,
           kBytes + Tiles::kStatisticsBytes, stream, p);
  });
}

// --- sums by distance ---
//
// The gradient of a table's row sums over all pairs whose distance is in its bucket. A block, which
// is one warp, has the pieces of sixteen by sixteen scores on one diagonal of some of the
// sequences: their two runs of distances stay the same. It owns the side that the table does not
// multiply, so that each product takes the scores' gradients from left to right: 16 distances, 16
// other rows.

// Which pieces: of every `step`-th sequence, from the first on those that have both sides' rows.
struct Diagonal {
  const int32_t* cu_seqlens;
  int sequences, step;
  int offset;  // of the own rows to the other ones
  int sequence, start, length;
  int own;  // first row of the piece

  __device__ __forceinline__ bool is_there() const { return sequence < sequences; }
  __device__ __forceinline__ int other() const { return own - offset; }

  __device__ __forceinline__ void enter(int first) {
    for (sequence = first; sequence < sequences; sequence += step) {
      start = cu_seqlens[sequence];
      length = cu_seqlens[sequence + 1] - start;
      own = max(offset, 0);
      if (max(own, other()) < length) return;
    }
  }
  __device__ __forceinline__ void advance() {
    own += kWarpRows;
    if (max(own, other()) >= length) enter(sequence + step);
  }
};

// Sixteen rows of own keys and values, or queries and gradients, and of the other side's; twice.
template <typename T, int kDim>
struct DiagonalTiles {
  static constexpr size_t kBytes = 2 * 4 * kWarpRows * kDim * sizeof(T);

  Shared<T> data = dynamic_shared<T>();

  __device__ __forceinline__ Tile<T, kDim> own(int stage, int i) const {
    return {data + (4 * stage + i) * kWarpRows * kDim};
  }
  __device__ __forceinline__ Tile<T, kDim> other(int stage, int i) const {
    return own(stage, 2 + i);
  }
  __device__ __forceinline__ Shared<char> behind() const {
    return shared_cast<char>(data) + kBytes;
  }
};

// The gradients of a piece's scores, not yet scaled by softmax_scale.
template <bool kOwnsKeys>
__device__ __forceinline__ void take_gradients(const Attention& a, const DropoutStream& stream,
                                               const Diagonal& piece, const Scores& dweights,
                                               Scores& s) {
  const int first_query = kOwnsKeys ? piece.other() : piece.own;
  const int first_key = kOwnsKeys ? piece.own : piece.other();
  const uint32_t place = sequence_head(a, piece.sequence);
  ScoreBits bits;
  if (a.dropout.threshold > 0) {
    bits = kOwnsKeys ? bits_of_keys(stream, place, first_query, first_key)
                     : bits_of_queries(stream, place, first_query, first_key);
  }
  const int64_t first_statistic = blockIdx.y * a.rows_q + piece.start + first_query;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane_of() / 4 + i / 2 * 8, column = 8 * j + lane_of() % 4 * 2 + i % 2;
      const int query = kOwnsKeys ? column : row, key = kOwnsKeys ? row : column;
      const bool there = first_query + query < piece.length;
      const float base = base_of(there ? a.lse[first_statistic + query] : 0.0f, there);
      const float delta = there ? a.delta[first_statistic + query] : 0.0f;
      float p = exp2f(s.score[j][i] * (a.softmax_scale * kLog2E) - base);
      if (first_key + key >= piece.length) p = 0.0f;
      s.score[j][i] = weigh(a, stream, bits, j, i, p, dweights.score[j][i], delta).gradient;
    }
  }
}

constexpr int kRunsOfDiagonal = 2;

template <typename T, int kDim, bool kOwnsKeys>
constexpr size_t kDiagonalBytes =
    DiagonalTiles<T, kDim>::kBytes + PositionTerms<T, kDim, kRunsOfDiagonal, kOwnsKeys>::kBytes;

template <typename T, bool kOwnsKeys, int kDim>
__global__ void __launch_bounds__(32, 8)
    disentangled_attention_bwd_positions_kernel(const DisentangledAttention p,
                                                const PositionSums result) {
  const Attention& a = p.content;
  const int diagonal = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) / 2;
  const int offset = diagonal * kWarpRows;
  const DropoutStream stream = stream_of(a.dropout);
  const DiagonalTiles<T, kDim> tiles;
  const PositionTerms<T, kDim, kRunsOfDiagonal, kOwnsKeys> terms(p, tiles.behind(), offset);
  const auto bring_side = [&](const Tile<T, kDim>& tile, const Heads& heads, const Diagonal& piece,
                              int first) {
    const auto rows = rows_of<const T>(heads, piece.start, piece.length);
    bring<kWarpRows, 32>(tile, rows, first, a.head_dim, a.wide);
  };
  const auto bring_piece = [&](int stage, const Diagonal& piece) {
    const int query = kOwnsKeys ? 2 : 0, key = 2 - query;
    const int first_query = kOwnsKeys ? piece.other() : piece.own;
    const int first_key = kOwnsKeys ? piece.own : piece.other();
    bring_side(tiles.own(stage, query), a.q, piece, first_query);
    bring_side(tiles.own(stage, query + 1), a.dout, piece, first_query);
    bring_side(tiles.own(stage, key), a.k, piece, first_key);
    bring_side(tiles.own(stage, key + 1), a.v, piece, first_key);
  };

  Diagonal next{a.cu_seqlens_q, a.sequences, static_cast<int>(gridDim.z), offset, 0, 0, 0, 0};
  next.enter(static_cast<int>(blockIdx.z));
  terms.template bring<kRunsOfDiagonal, 32>(0);
  if (next.is_there()) bring_piece(0, next);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  float above[kDim / 8][4] = {}, below[kDim / 8][4] = {};
  int stage = 0;
#pragma unroll 1
  while (next.is_there()) {
    const Diagonal piece = next;
    next.advance();
    if (next.is_there()) bring_piece(stage ^ 1, next);
    copy_async_commit();
    const OwnRows<T, kDim, false> own(tiles.own(stage, 0)), own_weighing(tiles.own(stage, 1));
    Scores s = own.times(tiles.other(stage, 0), 0);
    terms.add_to(s, own, tiles.other(stage, 0), 0, 0);
    const Scores dweights = own_weighing.times(tiles.other(stage, 1), 0);
    take_gradients<kOwnsKeys>(a, stream, piece, dweights, s);
    const Scores by_distance = turn_columns<1>(s);
    add_product(above, only(by_distance, OtherRun(), true), tiles.other(stage, 0), 0);
    add_product(below, only(by_distance, OtherRun(), false), tiles.other(stage, 0), 0);
    copy_async_wait<0>();
    __syncthreads();  // the next rows are there, and these may be overwritten
    stage ^= 1;
  }

  const int64_t place = static_cast<int64_t>(blockIdx.z) * gridDim.x + blockIdx.x;
  const int g = lane_of() / 4, t = lane_of() % 4;
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int distance = g + i / 2 * 8, column = 8 * j + 2 * t + i % 2;
      if (column >= a.head_dim) continue;
      float* to = result.sums + ((place * 32 + distance) * a.heads + blockIdx.y) * a.head_dim;
      to[column] = below[j][i] * a.softmax_scale;
      to[static_cast<int64_t>(16) * a.heads * a.head_dim + column] = above[j][i] * a.softmax_scale;
    }
  }
}

template <typename T>
void launch_position_sums_of(const DisentangledAttention& p, const PositionSums& sums,
                             Stream stream) {
  with_padded_dim(p.content.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    const dim3 grid(static_cast<unsigned>(sums.diagonals), p.content.heads,
                    static_cast<unsigned>(sums.parts));
    const auto launch_owning = [&](auto owns_keys) {
      constexpr bool kOwnsKeys = decltype(owns_keys)::value;
      constexpr size_t kBytes = kDiagonalBytes<T, kDim, kOwnsKeys>;
      static_assert(kBytes <= kMostShared);
      launch(disentangled_attention_bwd_positions_kernel<T, kOwnsKeys, kDim>, grid, 32, kBytes,
             stream, p, sums);
    };
    // The queries' table is that of keys of positions, and the blocks own the other side.
    if (sums.of_position_key) return launch_owning(std::true_type());
    launch_owning(std::false_type());
  });
}

}  // namespace fastbert
