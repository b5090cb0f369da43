// The backward of disentangled attention: attention's two kernels with the terms of positions. The
// gradients of their tables follow (disentangled_attention_positions.cuh).
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

}  // namespace fastbert
