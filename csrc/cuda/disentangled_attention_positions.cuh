// Sums by distance, for the gradients of the position tables.
//
// The gradient of a table's row sums over all pairs whose distance is in its bucket. A block, which
// is one warp, has the pieces of sixteen by sixteen scores on one diagonal of some of the
// sequences: their two runs of distances stay the same. It owns the side that the table does not
// multiply: then the other side's rows are columns of the scores and, with distances as rows, their
// gradients are what multiplies them from the left. Every run gives the same bits.
#pragma once

#include "cuda/attention_bwd.cuh"
#include "cuda/disentangled_attention.cuh"

namespace fastbert {

// The piece in hand; pieces of every `step`-th sequence follow one another.
template <bool kOwnsKeys>
struct Diagonal {
  const int32_t* cu_seqlens;
  int sequences, step;
  int offset;  // of the own rows to the other ones
  int sequence, start, length;
  int own;  // first own row

  __device__ __forceinline__ bool is_there() const { return sequence < sequences; }
  __device__ __forceinline__ int other() const { return own - offset; }
  __device__ __forceinline__ int first_query() const { return kOwnsKeys ? other() : own; }
  __device__ __forceinline__ int first_key() const { return kOwnsKeys ? own : other(); }

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

// Sixteen rows of keys and values and of queries and gradients, for two pieces. Of each pair the
// first makes scores.
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

template <bool kOwnsKeys, typename T, int kDim>
__device__ __forceinline__ void bring_piece(const Attention& a, const Diagonal<kOwnsKeys>& piece,
                                            const DiagonalTiles<T, kDim>& tiles, int stage) {
  const auto bring_side = [&](int i, const Heads& heads, int first) {
    const auto rows = rows_of<const T>(heads, piece.start, piece.length);
    bring<kWarpRows, 32>(tiles.own(stage, i), rows, first, a.head_dim, a.wide);
  };
  const int queries = kOwnsKeys ? 2 : 0, keys = 2 - queries;
  bring_side(queries, a.q, piece.first_query());
  bring_side(queries + 1, a.dout, piece.first_query());
  bring_side(keys, a.k, piece.first_key());
  bring_side(keys + 1, a.v, piece.first_key());
}

// Turns scores into their gradients, not yet scaled by softmax_scale.
template <bool kOwnsKeys>
__device__ __forceinline__ void to_gradients(const Attention& a, const DropoutStream& stream,
                                             const Diagonal<kOwnsKeys>& piece,
                                             const Scores& dweights, Scores& s) {
  const int first_query = piece.first_query(), first_key = piece.first_key();
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

// Of the sixteen distances of a run; `to` is the first one's row of one head.
template <int kEights>
__device__ __forceinline__ void write_sums(const Attention& a, const float (&sums)[kEights][4],
                                           float* to) {
  const int g = lane_of() / 4, t = lane_of() % 4;
  const int columns = a.head_dim - 2 * t;  // from the lane's first on
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* row = to + static_cast<int64_t>(g + 8 * h) * a.heads * a.head_dim + 2 * t;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (8 * j + e < columns) row[8 * j + e] = sums[j][2 * h + e] * a.softmax_scale;
      }
    }
  }
}

constexpr int kRunsOfDiagonal = 2;

template <typename T, int kDim, bool kOwnsKeys>
using DiagonalTerms = PositionTerms<T, kDim, kRunsOfDiagonal, kOwnsKeys>;

template <typename T, bool kOwnsKeys, int kDim>
__global__ void __launch_bounds__(32, 8)
    disentangled_attention_bwd_positions_kernel(const DisentangledAttention p,
                                                const PositionSums result) {
  const Attention& a = p.content;
  const int diagonal = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) / 2;
  const int offset = diagonal * kWarpRows;
  const DropoutStream stream = stream_of(a.dropout);
  const DiagonalTiles<T, kDim> tiles;
  const DiagonalTerms<T, kDim, kOwnsKeys> terms(p, tiles.behind(), offset);
  Diagonal<kOwnsKeys> piece{
      a.cu_seqlens_q, a.sequences, static_cast<int>(gridDim.z), offset, 0, 0, 0, 0};
  piece.enter(static_cast<int>(blockIdx.z));
  terms.template bring<kRunsOfDiagonal, 32>(0);
  if (piece.is_there()) bring_piece(a, piece, tiles, 0);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  float above[kDim / 8][4] = {}, below[kDim / 8][4] = {};
  int stage = 0;
#pragma unroll 1
  for (; piece.is_there(); piece.advance(), stage ^= 1) {
    Diagonal<kOwnsKeys> next = piece;
    next.advance();
    if (next.is_there()) bring_piece(a, next, tiles, stage ^ 1);
    copy_async_commit();
    const OwnRows<T, kDim, false> own(tiles.own(stage, 0)), own_weighing(tiles.own(stage, 1));
    Scores s = own.times(tiles.other(stage, 0), 0);
    terms.add_to(s, own, tiles.other(stage, 0), 0, 0);
    const Scores dweights = own_weighing.times(tiles.other(stage, 1), 0);
    to_gradients(a, stream, piece, dweights, s);
    const Scores by_distance = turn_columns<1>(s);
    add_product(above, only<OtherRun>(true, by_distance), tiles.other(stage, 0), 0);
    add_product(below, only<OtherRun>(false, by_distance), tiles.other(stage, 0), 0);
    copy_async_wait<0>();
    __syncthreads();  // the next rows are there, and these may be overwritten
  }

  const int64_t place = static_cast<int64_t>(blockIdx.z) * gridDim.x + blockIdx.x;
  float* sums = result.sums + (place * 32 * a.heads + blockIdx.y) * a.head_dim;
  write_sums(a, below, sums);
  write_sums(a, above, sums + static_cast<int64_t>(16) * a.heads * a.head_dim);
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
      constexpr size_t kBytes =
          DiagonalTiles<T, kDim>::kBytes + DiagonalTerms<T, kDim, kOwnsKeys>::kBytes;
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
