// The backward of attention: Dao 2023, "FlashAttention-2", algorithm 2, in two kernels, one that
// owns queries and one that owns keys. No sum is made by atomics: every run gives the same bits.
#pragma once

#include "cuda/attention.cuh"

namespace fastbert {

// Tiles of a block's own rows, of which there are two, and of the other side's.
template <typename T, int kDim, int kOtherRows>
struct BackwardTiles {
  static constexpr int kOthers = kOtherRows;
  static constexpr size_t kElements = (2 * kOwnRows + 2 * 2 * kOthers) * kDim;
  static constexpr size_t kBytes = kElements * sizeof(T);
  static constexpr size_t kStatisticsBytes = 2 * 2 * kOthers * sizeof(float);
  static_assert(kBytes + kStatisticsBytes <= kMostShared);

  Shared<T> data = dynamic_shared<T>();

  __device__ __forceinline__ Tile<T, kDim> own(int i) const { return {data + i * kOwnRows * kDim}; }
  __device__ __forceinline__ Tile<T, kDim> other(int stage, int i) const {
    return {data + (2 * kOwnRows + (2 * stage + i) * kOthers) * kDim};
  }
  // Base and delta of each query of a tile, for each stage.
  __device__ __forceinline__ Shared<Two<float>> statistics() const {
    return shared_cast<Two<float>>(data + kElements);
  }
  __device__ __forceinline__ Shared<char> behind(size_t bytes) const {
    return shared_cast<char>(data) + bytes;
  }
};

// In powers of two, such that exp2(score - base) is the probability: 0 in rows without keys, and in
// those behind the last.
__device__ __forceinline__ float base_of(float lse, bool there) {
  return there && lse != -INFINITY ? lse * kLog2E : INFINITY;
}

// Of two queries of a lane: the row sum of out * dout, which is that of P * dP.
template <typename T>
__device__ __forceinline__ float delta_of(const HeadRows<const T>& out,
                                          const HeadRows<const T>& dout, int row, int head_dim,
                                          bool wide) {
  float sum = 0.0f;
  if (row < out.length) {
    constexpr int kPiece = Pack<T>::kSize;
    for (int column = lane_of() % 4 * kPiece; column < head_dim; column += 4 * kPiece) {
      const Pack<T> x = load_piece(out.row(row), column, head_dim, wide);
      const Pack<T> y = load_piece(dout.row(row), column, head_dim, wide);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        sum = fmaf(to_float(x.element[i]), to_float(y.element[i]), sum);
      }
    }
  }
  return reduce_quad<Sum>(sum);
}

// Of a score: what its value is multiplied by, and the gradient, both not yet scaled by
// softmax_scale.
struct Weighed {
  float weight, gradient;
};

__device__ __forceinline__ Weighed weigh(const Attention& a, const DropoutStream& stream,
                                         const ScoreBits& bits, int j, int i, float p,
                                         float gradient, float delta) {
  float weight = p;
  if (a.dropout.threshold > 0) {
    const bool keep = keeps(stream, bits, j, i);
    weight = keep ? p * a.dropout.scale : 0.0f;
    gradient = keep ? gradient * a.dropout.scale : 0.0f;
  }
  return {weight, p * (gradient - delta)};
}

template <typename T, int kDim, typename Tiles, typename Terms, typename Inputs>
__device__ __forceinline__ void attention_bwd_dq(const Attention& a, const Inputs& inputs) {
  constexpr int kKeys = Tiles::kOthers;
  const Block own = find_block(a.cu_seqlens_q, a.sequences, a.rows_q);
  if (own.first >= own.length) return;
  const OtherSide keys = other_side(a.cu_seqlens_k, own, a.sequences);
  const auto q_rows = rows_of<const T>(a.q, own.start, own.length);
  const auto dout_rows = rows_of<const T>(a.dout, own.start, own.length);
  const auto k_rows = rows_of<const T>(a.k, keys.start, keys.length);
  const auto v_rows = rows_of<const T>(a.v, keys.start, keys.length);
  const Range range = rows_in_sight<kKeys>(own.first, keys.length, a.left, a.right);
  const DropoutStream stream = stream_of(a.dropout);
  const float scale = a.softmax_scale * kLog2E;

  const Tiles tiles;
  const Terms terms(inputs, tiles.behind(Tiles::kBytes), own.first);
  const auto bring_keys = [&](int stage, int first) {
    bring<kKeys>(tiles.other(stage, 0), k_rows, first, a.head_dim, a.wide);
    bring<kKeys>(tiles.other(stage, 1), v_rows, first, a.head_dim, a.wide);
    terms.bring(first);
  };
  terms.bring_first();
  bring<kOwnRows>(tiles.own(0), q_rows, own.first, a.head_dim, a.wide);
  bring<kOwnRows>(tiles.own(1), dout_rows, own.first, a.head_dim, a.wide);
  if (range.low < range.high) bring_keys(0, range.low);
  copy_async_commit();

  const int query = own.first + first_row_of_warp() + lane_of() / 4;
  const auto out_rows = rows_of<const T>(a.out, own.start, own.length);
  float base[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = query + 8 * h;
    const bool there = row < own.length;
    const int64_t at = blockIdx.y * a.rows_q + own.start + row;
    delta[h] = delta_of(out_rows, dout_rows, row, a.head_dim, a.wide);
    base[h] = base_of(there ? a.lse[at] : 0.0f, there);
    if (there && lane_of() % 4 == 0) a.delta[at] = delta[h];
  }

  copy_async_wait<0>();
  __syncthreads();
  const OwnRows<T, kDim, kFitsRegisters<T>> queries(tiles.own(0)), gradients(tiles.own(1));
  float dq[kDim / 8][4] = {};
  int stage = 0;
  for (int first = range.low; first < range.high; first += kKeys, stage ^= 1) {
    if (first + kKeys < range.high) bring_keys(stage ^ 1, first + kKeys);
    copy_async_commit();
    const bool all = sees_all(a, own.first, kOwnRows, first, kKeys, keys.length);
#pragma unroll 1  // what the next piece needs early costs registers
    for (int c = 0; c < kKeys; c += kWarpRows) {
      const int key = first + c + lane_of() % 4 * 2;
      Scores s = queries.times(tiles.other(stage, 0), c);
      terms.add_to(s, queries, tiles.other(stage, 0), c, first + c);
      const Scores dp = gradients.times(tiles.other(stage, 1), c);
      ScoreBits bits;
      if (a.dropout.threshold > 0) {
        bits = bits_of_queries(stream, sequence_head(a, own.sequence),
                               own.first + first_row_of_warp(), first + c);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int h = i / 2;
          float p = exp2f(s.score[j][i] * scale - base[h]);
          if (!all && !sees(a, query + 8 * h, key + 8 * j + i % 2, keys.length)) p = 0.0f;
          s.score[j][i] = weigh(a, stream, bits, j, i, p, dp.score[j][i], delta[h]).gradient;
        }
      }
      add_product(dq, s, tiles.other(stage, 0), c);
      terms.add_gradient(dq, s, first + c);
    }
    copy_async_wait<0>();
    __syncthreads();  // the next tile is there, and this one may be overwritten
  }
  const float factor[2] = {a.softmax_scale, a.softmax_scale};
  write_rows(tiles.own(0), dq, factor, rows_of<T>(a.dq, own.start, own.length), own.first,
             a.head_dim, a.wide);
}

// Scores here have keys as rows, so that they are what the sums over queries multiply.
template <typename T, int kDim, typename Tiles, typename Terms, typename Inputs>
__device__ __forceinline__ void attention_bwd_dkv(const Attention& a, const Inputs& inputs) {
  constexpr int kQueries = Tiles::kOthers;
  const Block own = find_block(a.cu_seqlens_k, a.sequences, a.rows_k);
  if (own.first >= own.length) return;
  const OtherSide queries = other_side(a.cu_seqlens_q, own, a.sequences);
  const auto k_rows = rows_of<const T>(a.k, own.start, own.length);
  const auto v_rows = rows_of<const T>(a.v, own.start, own.length);
  const auto q_rows = rows_of<const T>(a.q, queries.start, queries.length);
  const auto dout_rows = rows_of<const T>(a.dout, queries.start, queries.length);
  // A key is seen by the queries that see it: the window the other way round.
  const Range range = rows_in_sight<kQueries>(own.first, queries.length, a.right, a.left);
  const DropoutStream stream = stream_of(a.dropout);
  const float scale = a.softmax_scale * kLog2E;

  const Tiles tiles;
  const Terms terms(inputs, tiles.behind(Tiles::kBytes + Tiles::kStatisticsBytes), own.first);
  const Shared<Two<float>> statistics = tiles.statistics();
  const auto bring_queries = [&](int stage, int first) {
    bring<kQueries>(tiles.other(stage, 0), q_rows, first, a.head_dim, a.wide);
    bring<kQueries>(tiles.other(stage, 1), dout_rows, first, a.head_dim, a.wide);
    terms.bring(first);
  };
  terms.bring_first();
  const int thread = static_cast<int>(threadIdx.x);
  const auto load_statistics = [&](int first) {
    const int row = first + thread;
    const bool there = thread < kQueries && row < queries.length;
    const int64_t at = blockIdx.y * a.rows_q + queries.start + row;
    return Two<float>{{base_of(there ? a.lse[at] : 0.0f, there), there ? a.delta[at] : 0.0f}};
  };
  bring<kOwnRows>(tiles.own(0), k_rows, own.first, a.head_dim, a.wide);
  bring<kOwnRows>(tiles.own(1), v_rows, own.first, a.head_dim, a.wide);
  if (range.low < range.high) bring_queries(0, range.low);
  copy_async_commit();
  if (thread < kQueries) statistics[thread] = load_statistics(range.low);
  copy_async_wait<0>();
  __syncthreads();

  constexpr bool kKept = kDim <= 64 && kFitsRegisters<T>;
  const OwnRows<T, kDim, kKept> keys(tiles.own(0)), values(tiles.own(1));
  const int key = own.first + first_row_of_warp() + lane_of() / 4;
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};
  int stage = 0;
  for (int first = range.low; first < range.high; first += kQueries, stage ^= 1) {
    const bool more = first + kQueries < range.high;
    if (more) bring_queries(stage ^ 1, first + kQueries);
    copy_async_commit();
    const int next_first = more ? first + kQueries : queries.length;
    Two<float> next;
    if (kKept) next = load_statistics(next_first);  // early where they do not cost registers
    const bool all = sees_all(a, first, kQueries, own.first, kOwnRows, own.length);
#pragma unroll 1
    for (int c = 0; c < kQueries; c += kWarpRows) {
      Scores p = keys.times(tiles.other(stage, 0), c);
      terms.add_to(p, keys, tiles.other(stage, 0), c, first + c);
      Scores ds = values.times(tiles.other(stage, 1), c);
      ScoreBits bits;
      if (a.dropout.threshold > 0) {
        bits = bits_of_keys(stream, sequence_head(a, own.sequence), first + c,
                            own.first + first_row_of_warp());
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = c + 8 * j + lane_of() % 4 * 2 + e;
          const Two<float> statistic = statistics[stage * kQueries + query];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& weight = p.score[j][2 * h + e];
            float& gradient = ds.score[j][2 * h + e];
            weight = exp2f(weight * scale - statistic.element[0]);
            if (!all && !sees(a, first + query, key + 8 * h, own.length)) weight = 0.0f;
            const Weighed w =
                weigh(a, stream, bits, j, 2 * h + e, weight, gradient, statistic.element[1]);
            weight = w.weight;
            gradient = w.gradient;
          }
        }
      }
      add_product(dv, p, tiles.other(stage, 1), c);
      add_product(dk, ds, tiles.other(stage, 0), c);
      terms.add_gradient(dk, ds, first + c);
    }
    if (!kKept) next = load_statistics(next_first);
    if (thread < kQueries) statistics[(stage ^ 1) * kQueries + thread] = next;
    copy_async_wait<0>();
    __syncthreads();  // the next tile is there, and this one may be overwritten
  }
  const float of_keys[2] = {a.softmax_scale, a.softmax_scale}, of_values[2] = {1.0f, 1.0f};
  write_rows(tiles.own(0), dk, of_keys, rows_of<T>(a.dk, own.start, own.length), own.first,
             a.head_dim, a.wide);
  write_rows(tiles.own(1), dv, of_values, rows_of<T>(a.dv, own.start, own.length), own.first,
             a.head_dim, a.wide);
}

template <typename T, int kDim>
using AttentionBackwardTiles =
    BackwardTiles<T, kDim, (kDim <= 64 ? 64 : 32) / (std::is_same_v<T, float> ? 2 : 1)>;

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, resident_blocks<T>(kDim))
    attention_bwd_dq_kernel(const Attention a) {
  attention_bwd_dq<T, kDim, AttentionBackwardTiles<T, kDim>, NoTerms>(a, a);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, resident_blocks<T>(kDim))
    attention_bwd_dkv_kernel(const Attention a) {
  attention_bwd_dkv<T, kDim, AttentionBackwardTiles<T, kDim>, NoTerms>(a, a);
}

template <typename T>
void launch_attention_bwd_of(const Attention& a, Stream stream) {
  with_padded_dim(a.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    using Tiles = AttentionBackwardTiles<T, kDim>;
    if (a.rows_q > 0) {
      launch(attention_bwd_dq_kernel<T, kDim>, dim3(blocks_of(a.rows_q, a.sequences), a.heads),
             kThreads, Tiles::kBytes, stream, a);
    }
    if (a.rows_k > 0) {
      launch(attention_bwd_dkv_kernel<T, kDim>, dim3(blocks_of(a.rows_k, a.sequences), a.heads),
             kThreads, Tiles::kBytes + Tiles::kStatisticsBytes, stream, a);
    }
  });
}

}  // namespace fastbert
