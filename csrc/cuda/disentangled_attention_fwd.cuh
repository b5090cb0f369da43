// The forward of disentangled attention: attention's, with the terms of positions.
#pragma once

#include "cuda/attention_fwd.cuh"
#include "cuda/disentangled_attention.cuh"

namespace fastbert {

template <typename T, int kDim>
using DisentangledForwardTiles = ForwardTiles<T, kDim, kRowsBesideBands<kDim>>;

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, resident_blocks<T>(kDim))
    disentangled_attention_fwd_kernel(const DisentangledAttention p) {
  using Terms = BlockTerms<T, kDim, /*kOwnsKeys=*/false>;
  attention_fwd<T, kDim, DisentangledForwardTiles<T, kDim>, Terms>(p.content, p);
}

template <typename T>
void launch_disentangled_attention_fwd_of(const DisentangledAttention& p, Stream stream) {
  with_padded_dim(p.content.head_dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    constexpr size_t kBytes =
        DisentangledForwardTiles<T, kDim>::kBytes + BlockTerms<T, kDim, false>::kBytes;
    static_assert(kBytes <= kMostShared);
    launch(disentangled_attention_fwd_kernel<T, kDim>,
           dim3(blocks_of(p.content.rows_q, p.content.sequences), p.content.heads), kThreads,
           kBytes, stream, p);
  });
}

}  // namespace fastbert
