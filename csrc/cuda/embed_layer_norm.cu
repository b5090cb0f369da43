// dropout(LayerNorm(word + token type + position)) and its gradients. Letters: T rows, C columns,
// V rows of a table.
//
// Gradients of the tables are deterministic: rows are sorted by id, and the block whose place is
// the first of an id sums that id's rows in their order; a table of a few rows is summed like a
// bias. T is the type of the tables and of h, Y that of y.
#include "cuda/layer_norm.cuh"

namespace fastbert {
namespace {

constexpr int kWords = 0, kTables = 3;
constexpr int kLanes = 32, kSlices = 4;
constexpr int kBlockColumns = kLanes * kChunk;
constexpr int kStep = 4;  // rows of an id that a slice has in flight

__device__ __forceinline__ int64_t id_at(const Ids& ids, int64_t row) {
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[row]
                      : static_cast<const int32_t*>(ids.data)[row];
}

// An id outside its table is clamped, and remembered in the flag: an error nobody waits for.
__device__ __forceinline__ int64_t table_row(const EmbedLayerNorm& a, int table, int64_t row) {
  if (a.ids[table].data == nullptr) return row;
  const int64_t id = id_at(a.ids[table], row);
  if (a.flag == nullptr) return id;
  const int64_t most = a.tables[table].rows - 1;
  if (id < 0 || id > most) *a.flag = 1;
  return id < 0 ? 0 : id > most ? most : id;
}

template <typename T, typename Y, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads)
    embed_layer_norm_fwd_kernel(const EmbedLayerNorm a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Layout::kRows + Layout::row_of_block();
  if (row >= a.rows) return;  // whole warps that meet no others
  float v[Layout::kChunks][kChunk] = {};
#pragma unroll
  for (int table = kWords; table < kTables; ++table) {
    const int64_t from = table_row(a, table, row) * a.columns;
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      float other[kChunk];
      load_chunk<Layout::kWide>(static_cast<const T*>(a.tables[table].data) + from,
                                Layout::column(c), a.columns, other);
      add_to(v[c], other);
    }
  }
  T* h = static_cast<T*>(a.h) + row * a.columns;
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    store_chunk<Layout::kWide>(h, Layout::column(c), a.columns, v[c]);
  }
  float mean, rstd;
  normalise<Layout>(v, a.columns, a.eps, mean, rstd);
  Y* y = static_cast<Y*>(a.y) + row * a.columns;
  const DropoutStream stream = stream_of(a.dropout);
  const int64_t first_call = row * ceil_div(a.columns, kChunk);
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    const int column = Layout::column(c);
    scale_and_shift<Layout::kWide>(a.weight, a.bias, column, a.columns, v[c]);
    if (a.dropout.threshold > 0) {
      drop_chunk(stream, a.dropout.scale, first_call + column / kChunk, v[c]);
    }
    store_chunk<Layout::kWide>(y, column, a.columns, v[c]);
  }
  if (Layout::column(0) == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
}

template <typename T, typename Y, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads)
    embed_layer_norm_bwd_kernel(const EmbedLayerNormGrad a) {
  const int64_t part = blockIdx.x;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  const DropoutStream stream = stream_of(a.dropout);
  float dweight[Layout::kChunks][kChunk] = {};
  float dbias[Layout::kChunks][kChunk] = {};
  for (int64_t row = part * a.parts.rows + Layout::row_of_block(); row < end;
       row += Layout::kRows) {
    const int64_t offset = row * a.columns;
    const int64_t first_call = row * ceil_div(a.columns, kChunk);
    float g[Layout::kChunks][kChunk];
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      const int column = Layout::column(c);
      load_chunk<Layout::kWide>(static_cast<const Y*>(a.dy) + offset, column, a.columns, g[c]);
      if (a.dropout.threshold > 0) {
        drop_chunk(stream, a.dropout.scale, first_call + column / kChunk, g[c]);
      }
    }
    norm_gradient<Layout>(static_cast<const T*>(a.h) + offset, a.mean[row], a.rstd[row], a.weight,
                          a.columns, g, dweight, dbias);
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      const int column = Layout::column(c);
      store_chunk<Layout::kWide>(static_cast<T*>(a.dh) + offset, column, a.columns, g[c]);
      if (a.wide_dh != nullptr) {
        store_chunk<Layout::kWide>(a.wide_dh + offset, column, a.columns, g[c]);
      }
    }
  }
  store_part<Layout>(dweight, a.partial + part * a.columns, a.columns);
  store_part<Layout>(dbias, a.partial + (a.parts.count + part) * a.columns, a.columns);
}

// A slice of threads takes runs of kStep rows of the block's id, the others those between.
template <bool kWide>
__global__ void __launch_bounds__(kLanes* kSlices) table_gradient_kernel(const TableGradient a) {
  const int64_t place = blockIdx.x;
  const int64_t id = a.sorted_ids[place];
  if (id == a.skipped || (place > 0 && a.sorted_ids[place - 1] == id)) return;  // whole blocks
  const int lane = static_cast<int>(threadIdx.x), slice = static_cast<int>(threadIdx.y);
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kLanes + lane) * kChunk;
  float sums[kChunk] = {};
  bool more = true;
  for (int64_t first = place + slice * kStep; more; first += kSlices * kStep) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const bool same = first + i < a.rows && a.sorted_ids[first + i] == id;
      more = more && same;
      if (!same) continue;
      float v[kChunk];
      load_chunk<kWide>(a.dh + a.order[first + i] * a.columns, column, a.columns, v);
      add_to(sums, v);
    }
  }
  FASTBERT_SHARED(float, of_slices, kSlices* kBlockColumns);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) of_slices[(slice * kChunk + i) * kLanes + lane] = sums[i];
  __syncthreads();
  if (slice > 0) return;
#pragma unroll
  for (int other = 1; other < kSlices; ++other) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sums[i] += of_slices[(other * kChunk + i) * kLanes + lane];
  }
  store_any<kWide>(a.table.data, a.table.dtype, id * a.columns, column, a.columns, sums);
}

// Each slice of threads is a part of its own, with sums for every row of the table.
template <bool kWide>
__global__ void __launch_bounds__(kLanes* kSlices)
    small_table_gradient_kernel(const SmallTableGradient a) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kSlices + threadIdx.y;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kLanes + threadIdx.x) * kChunk;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  float sums[kFewRows][kChunk] = {};
  for (int64_t row = part * a.parts.rows; row < end; ++row) {
    const int64_t id = id_at(a.ids, row);
    const int64_t within = id < 0 ? 0 : id < a.table_rows ? id : a.table_rows - 1;
    float v[kChunk];
    load_chunk<kWide>(a.dh + row * a.columns, column, a.columns, v);
#pragma unroll
    for (int slot = 0; slot < kFewRows; ++slot) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        sums[slot][i] += slot == within && slot != a.skipped ? v[i] : 0.0f;
      }
    }
  }
  if (part >= a.parts.count) return;
#pragma unroll
  for (int slot = 0; slot < kFewRows; ++slot) {
    if (slot >= a.table_rows) return;
    store_chunk<kWide>(a.partial + (part * a.table_rows + slot) * a.columns, column, a.columns,
                       sums[slot]);
  }
}

}  // namespace

void launch_embed_layer_norm_fwd(const EmbedLayerNorm& a, Stream stream) {
  with_types(a.dtype, a.dtype, a.y_dtype, [&](auto number, auto, auto y) {
    with_layout(a.columns, a.wide, [&](auto layout) {
      using Layout = decltype(layout);
      launch(embed_layer_norm_fwd_kernel<decltype(number), decltype(y), Layout>,
             static_cast<unsigned>(ceil_div(a.rows, Layout::kRows)), Layout::kThreads, 0, stream,
             a);
    });
  });
}

void launch_embed_layer_norm_bwd(const EmbedLayerNormGrad& a, Stream stream) {
  with_types(a.dtype, a.dtype, a.y_dtype, [&](auto number, auto, auto y) {
    with_layout(a.columns, a.wide, [&](auto layout) {
      using Layout = decltype(layout);
      launch(embed_layer_norm_bwd_kernel<decltype(number), decltype(y), Layout>,
             static_cast<unsigned>(a.parts.count), Layout::kThreads, part_bytes<Layout>(), stream,
             a);
    });
  });
}

void launch_table_gradient(const TableGradient& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>(a.rows),
                  static_cast<unsigned>(ceil_div(a.columns, kBlockColumns)));
  launch(a.wide ? table_gradient_kernel<true> : table_gradient_kernel<false>, grid,
         dim3(kLanes, kSlices), 0, stream, a);
}

void launch_small_table_gradient(const SmallTableGradient& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.parts.count, kSlices)),
                  static_cast<unsigned>(ceil_div(a.columns, kBlockColumns)));
  launch(a.wide ? small_table_gradient_kernel<true> : small_table_gradient_kernel<false>, grid,
         dim3(kLanes, kSlices), 0, stream, a);
}

}  // namespace fastbert
