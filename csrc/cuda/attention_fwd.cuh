// The forward of attention: Dao 2023, "FlashAttention-2", section 3.1.
#pragma once

#include "cuda/attention.cuh"

namespace fastbert {

template <typename T, int kDim, int kKeyRows>
struct ForwardTiles {
  static constexpr int kKeys = kKeyRows;
  static constexpr size_t kBytes = (kOwnRows + 2 * 2 * kKeys) * kDim * sizeof(T);
  static_assert(kBytes <= kMostShared);

  Shared<T> data = dynamic_shared<T>();

  __device__ __forceinline__ Tile<T, kDim> q() const { return {data}; }
  __device__ __forceinline__ Tile<T, kDim> k(int stage) const {
    return {data + (kOwnRows + 2 * stage * kKeys) * kDim};
  }
  __device__ __forceinline__ Tile<T, kDim> v(int stage) const {
    return {k(stage).data + kKeys * kDim};
  }
  __device__ __forceinline__ Shared<char> behind() const {
    return shared_cast<char>(data) + kBytes;
  }
};

// Of a warp's queries, two rows a lane: the softmax so far.
template <int kDim>
struct RunningSoftmax {
  float out[kDim / 8][4] = {};
  float peak[2] = {-INFINITY, -INFINITY};  // the largest score, in powers of two
  float total[2] = {0.0f, 0.0f};           // of exp2(score - peak), of the lane's own columns

  // Replaces scores by exp2(score - peak), with a peak that covers them, too.
  template <int kPieces>
  __device__ __forceinline__ void take(Scores (&s)[kPieces]) {
    float base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = peak[h];
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, s[c].score[i / 2][2 * h + i % 2]);
      }
      most = reduce_quad<Max>(most);
      // Rows that have seen no key yet keep finite exponents.
      base[h] = most == -INFINITY ? 0.0f : most;
      const float shrink = exp2f(peak[h] - base[h]);
      peak[h] = most;
      total[h] *= shrink;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        out[j][2 * h] *= shrink;
        out[j][2 * h + 1] *= shrink;
      }
    }
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = s[c].score[j][i];
          score = exp2f(score - base[i / 2]);
          total[i / 2] += score;
        }
      }
    }
  }
};

__device__ __forceinline__ void hide_unseen(const Attention& a, int first_query, int first_key,
                                            int num_keys, Scores& s) {
  const int query = first_query + first_row_of_warp() + lane_of() / 4;
  const int key = first_key + lane_of() % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!sees(a, query + i / 2 * 8, key + 8 * j + i % 2, num_keys)) s.score[j][i] = -INFINITY;
    }
  }
}

// `Terms` are added to the products of queries and keys, from what `inputs` has beside `a`.
template <typename T, int kDim, typename Tiles, typename Terms, typename Inputs>
__device__ __forceinline__ void attention_fwd(const Attention& a, const Inputs& inputs) {
  constexpr int kKeys = Tiles::kKeys, kPieces = kKeys / kWarpRows;
  const Block own = find_block(a.cu_seqlens_q, a.sequences, a.rows_q);
  if (own.first >= own.length) return;
  const OtherSide keys = other_side(a.cu_seqlens_k, own, a.sequences);
  const auto q_rows = rows_of<const T>(a.q, own.start, own.length);
  const auto k_rows = rows_of<const T>(a.k, keys.start, keys.length);
  const auto v_rows = rows_of<const T>(a.v, keys.start, keys.length);
  const Range range = rows_in_sight<kKeys>(own.first, keys.length, a.left, a.right);
  const DropoutStream stream = stream_of(a.dropout);
  const float scale = a.softmax_scale * kLog2E;

  const Tiles tiles;
  const Terms terms(inputs, tiles.behind(), own.first);
  const auto bring_keys = [&](int stage, int first) {
    bring<kKeys>(tiles.k(stage), k_rows, first, a.head_dim, a.wide);
    bring<kKeys>(tiles.v(stage), v_rows, first, a.head_dim, a.wide);
    terms.bring(first);
  };
  terms.bring_first();
  bring<kOwnRows>(tiles.q(), q_rows, own.first, a.head_dim, a.wide);
  if (range.low < range.high) bring_keys(0, range.low);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  const OwnRows<T, kDim, kFitsRegisters<T>> queries(tiles.q());
  RunningSoftmax<kDim> softmax;
  int stage = 0;
  for (int first = range.low; first < range.high; first += kKeys, stage ^= 1) {
    if (first + kKeys < range.high) bring_keys(stage ^ 1, first + kKeys);
    copy_async_commit();
    Scores s[kPieces];
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      s[c] = queries.times(tiles.k(stage), c * kWarpRows);
      terms.add_to(s[c], queries, tiles.k(stage), c * kWarpRows, first + c * kWarpRows);
#pragma unroll
      for (int i = 0; i < 8; ++i) s[c].score[i / 4][i % 4] *= scale;
    }
    if (!sees_all(a, own.first, kOwnRows, first, kKeys, keys.length)) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        hide_unseen(a, own.first, first + c * kWarpRows, keys.length, s[c]);
      }
    }
    softmax.take(s);
    if (a.dropout.threshold > 0) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const ScoreBits bits =
            bits_of_queries(stream, sequence_head(a, own.sequence), own.first + first_row_of_warp(),
                            first + c * kWarpRows);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (!keeps(stream, bits, i / 4, i % 4)) s[c].score[i / 4][i % 4] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      add_product(softmax.out, s[c], tiles.v(stage), c * kWarpRows);
    }
    copy_async_wait<0>();
    __syncthreads();  // the next tile is there, and this one may be overwritten
  }

  const int row = own.first + first_row_of_warp() + lane_of() / 4;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = reduce_quad<Sum>(softmax.total[h]);
    const bool blind = total == 0.0f;
    factor[h] = blind ? 0.0f : a.dropout.scale / total;
    if (lane_of() % 4 == 0 && row + 8 * h < own.length) {
      a.lse[blockIdx.y * a.rows_q + own.start + row + 8 * h] =
          blind ? -INFINITY : (softmax.peak[h] + log2f(total)) * kLn2;
    }
  }
  write_rows(tiles.q(), softmax.out, factor, rows_of<T>(a.out, own.start, own.length), own.first,
             a.head_dim, a.wide);
}

template <typename T, int kDim>
using AttentionForwardTiles = ForwardTiles<T, kDim, std::is_same_v<T, float> ? 32 : 64>;

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, resident_blocks<T>(kDim))
    attention_fwd_kernel(const Attention a) {
  attention_fwd<T, kDim, AttentionForwardTiles<T, kDim>, NoTerms>(a, a);
}

template <typename T>
void launch_attention_fwd_of(const Attention& a, Stream stream) {
  with_padded_dim(a.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    launch(attention_fwd_kernel<T, kDim>, dim3(blocks_of(a.rows_q, a.sequences), a.heads), kThreads,
           AttentionForwardTiles<T, kDim>::kBytes, stream, a);
  });
}

}  // namespace fastbert
