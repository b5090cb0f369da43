// Rows that the registers of a warp or a block hold, their normalisation and its gradient: shared
// by add_layer_norm and embed_layer_norm.
#pragma once

#include <stdexcept>

#include "cuda/common.cuh"

namespace fastbert {

// How rows lie in a block: kWarps warps hold one, and each thread of them kChunks chunks of it,
// neighbours side by side. With one warp to a row a block has four rows.
template <int kWarps_, int kChunks_, bool kWide_>
struct RowLayout {
  static constexpr int kWarps = kWarps_, kChunks = kChunks_;
  static constexpr bool kWide = kWide_;
  static constexpr int kThreadsOfRow = 32 * kWarps;
  static constexpr int kThreads = kWarps == 1 ? 128 : kThreadsOfRow;
  static constexpr int kRows = kThreads / kThreadsOfRow;
  static constexpr int kColumns = kThreadsOfRow * kChunks * kChunk;

  static __device__ __forceinline__ int row_of_block() {
    return static_cast<int>(threadIdx.x) / kThreadsOfRow;
  }
  static __device__ __forceinline__ int column(int chunk) {
    return (chunk * kThreadsOfRow + static_cast<int>(threadIdx.x) % kThreadsOfRow) * kChunk;
  }
  static __device__ __forceinline__ bool inside(int chunk, int i, int64_t columns) {
    return kWide ? column(chunk) < columns : column(chunk) + i < columns;
  }
};

// Calls f with the layout for rows of `columns`.
template <typename F>
void with_layout(int64_t columns, bool wide, F f) {
  if (!wide) {
    if (columns <= RowLayout<1, 4, false>::kColumns) return f(RowLayout<1, 4, false>());
    return f(RowLayout<8, 4, false>());
  }
  if (columns <= RowLayout<1, 2, true>::kColumns) return f(RowLayout<1, 2, true>());
  if (columns <= RowLayout<1, 3, true>::kColumns) return f(RowLayout<1, 3, true>());
  if (columns <= RowLayout<1, 4, true>::kColumns) return f(RowLayout<1, 4, true>());
  f(RowLayout<8, 4, true>());
}

// Calls f with a number of each type: of an input, of the sum, of the output. The sum is of the
// input's type or fp32, the output of the sum's or fp32.
template <typename F>
void with_types(Dtype input, Dtype sum, Dtype output, F f) {
  if (input == Dtype::kFloat) return f(float(), float(), float());
  const auto with_input = [&](auto narrow) {
    if (sum == Dtype::kFloat) return f(narrow, float(), float());
    if (output == Dtype::kFloat) return f(narrow, narrow, float());
    f(narrow, narrow, narrow);
  };
  if (input == Dtype::kBFloat16) return with_input(bf16());
  with_input(fp16());
}

// The rows of a thread's chunks minus their mean, times rstd; two passes, as a large mean would
// cancel in one.
template <typename Layout>
__device__ __forceinline__ void normalise(float (&v)[Layout::kChunks][kChunk], int64_t columns,
                                          float eps, float& mean, float& rstd) {
  float sum[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[0] += v[c][i];
  }
  reduce_row<Layout::kWarps, Sum>(sum);
  mean = sum[0] / static_cast<float>(columns);
  float squares[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      v[c][i] = Layout::inside(c, i, columns) ? v[c][i] - mean : 0.0f;
      squares[0] += v[c][i] * v[c][i];
    }
  }
  reduce_row<Layout::kWarps, Sum>(squares);
  rstd = 1.0f / sqrtf(squares[0] / static_cast<float>(columns) + eps);
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) v[c][i] *= rstd;
  }
}

// normal * weight + bias, of one chunk.
template <bool kWide>
__device__ __forceinline__ void scale_and_shift(const ConstVector& weight, const ConstVector& bias,
                                                int64_t column, int64_t columns,
                                                float (&v)[kChunk]) {
  float w[kChunk];
  load_vector<kWide>(weight, column, columns, w);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) v[i] *= w[i];
  if (bias.data == nullptr) return;
  load_vector<kWide>(bias, column, columns, w);
  add_to(v, w);
}

// From dy, in `g`, and the row that was normalised to the gradient of that row, which replaces dy;
// what the row adds to the gradients of weight and bias goes to their sums.
template <typename Layout, typename H>
__device__ __forceinline__ void norm_gradient(const H* h, float mean, float rstd,
                                              const ConstVector& weight, int64_t columns,
                                              float (&g)[Layout::kChunks][kChunk],
                                              float (&dweight)[Layout::kChunks][kChunk],
                                              float (&dbias)[Layout::kChunks][kChunk]) {
  float normal[Layout::kChunks][kChunk];
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    load_chunk<Layout::kWide>(h, Layout::column(c), columns, normal[c]);
    float w[kChunk];
    load_vector<Layout::kWide>(weight, Layout::column(c), columns, w);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      normal[c][i] = (normal[c][i] - mean) * rstd;
      dweight[c][i] += g[c][i] * normal[c][i];
      dbias[c][i] += g[c][i];
      g[c][i] *= w[i];  // 0 beyond the columns, as dy is
      sums[0] += g[c][i];
      sums[1] += g[c][i] * normal[c][i];
    }
  }
  reduce_row<Layout::kWarps, Sum>(sums);
  const float mean_of_g = sums[0] / static_cast<float>(columns);
  const float slope = sums[1] / static_cast<float>(columns);
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      g[c][i] = rstd * (g[c][i] - mean_of_g - normal[c][i] * slope);
    }
  }
}

// Shared memory that store_part asks for.
template <typename Layout>
constexpr size_t part_bytes() {
  return Layout::kRows > 1 ? sizeof(float) * Layout::kRows * Layout::kColumns : 0;
}

// A block's sums of one vector to its row of the partial sums: those of its row places are added in
// their order.
template <typename Layout>
__device__ __forceinline__ void store_part(const float (&sums)[Layout::kChunks][kChunk],
                                           float* part, int64_t columns) {
  if constexpr (Layout::kRows == 1) {
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      store_chunk<Layout::kWide>(part, Layout::column(c), columns, sums[c]);
    }
  } else {
    const Shared<float> of_rows = dynamic_shared<float>();
    const Shared<Pack<float>> packs = shared_cast<Pack<float>>(of_rows);
    __syncthreads();  // the vector before this one has been read
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      const int place = (Layout::row_of_block() * Layout::kColumns + Layout::column(c)) / 4;
      packs[place] = Pack<float>{{sums[c][0], sums[c][1], sums[c][2], sums[c][3]}};
      packs[place + 1] = Pack<float>{{sums[c][4], sums[c][5], sums[c][6], sums[c][7]}};
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < columns; column += Layout::kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int row = 0; row < Layout::kRows; ++row) {
        total += of_rows[row * Layout::kColumns + column];
      }
      part[column] = total;
    }
  }
}

}  // namespace fastbert
