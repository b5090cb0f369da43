// LayerNorm(residual + dropout(x + linear_bias)) and its gradients. Letters: T rows, C columns.
//
// Up to 1024 columns a warp holds a row in its registers, beyond that a block; memory is read and
// written once. X is the type of x, S that of the sum h, Y that of y.
#include "cuda/layer_norm.cuh"

namespace fastbert {
namespace {

// Room for 512 threads on an SM is promised: without, ptxas keeps to a budget of its own for more
// of them and spills (sm_100).
template <typename X, typename S, typename Y, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads, 512 / Layout::kThreads)
    add_layer_norm_fwd_kernel(const AddLayerNorm a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Layout::kRows + Layout::row_of_block();
  if (row >= a.rows) return;  // whole warps that meet no others
  const X* x = static_cast<const X*>(a.x) + row * a.columns;
  const DropoutStream stream = stream_of(a.dropout);
  const int64_t first_call = row * ceil_div(a.columns, kChunk);
  float v[Layout::kChunks][kChunk];
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    const int column = Layout::column(c);
    load_chunk<Layout::kWide>(x, column, a.columns, v[c]);
    float other[kChunk];
    if (a.linear_bias.data != nullptr) {
      load_vector<Layout::kWide>(a.linear_bias, column, a.columns, other);
      add_to(v[c], other);
    }
    if (a.dropout.threshold > 0) {
      drop_chunk(stream, a.dropout.scale, first_call + column / kChunk, v[c]);
    }
    if (a.residual != nullptr) {
      const S* residual = static_cast<const S*>(a.residual) + row * a.columns;
      load_chunk<Layout::kWide>(residual, column, a.columns, other);
      add_to(v[c], other);
    }
    if (a.h != nullptr) {
      S* h = static_cast<S*>(a.h) + row * a.columns;
      store_chunk<Layout::kWide>(h, column, a.columns, v[c]);
    }
  }
  float mean, rstd;
  normalise<Layout>(v, a.columns, a.eps, mean, rstd);
  if (Layout::column(0) == 0) {
    a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
  Y* y = static_cast<Y*>(a.y) + row * a.columns;
#pragma unroll
  for (int c = 0; c < Layout::kChunks; ++c) {
    const int column = Layout::column(c);
    scale_and_shift<Layout::kWide>(a.weight, a.bias, column, a.columns, v[c]);
    store_chunk<Layout::kWide>(y, column, a.columns, v[c]);
  }
}

template <typename X, typename S, typename Y, typename Layout>
__global__ void __launch_bounds__(Layout::kThreads)
    add_layer_norm_bwd_kernel(const AddLayerNormGrad a) {
  const int64_t part = blockIdx.x;
  const int64_t last = (part + 1) * a.parts.rows;
  const int64_t end = last < a.rows ? last : a.rows;
  const DropoutStream stream = stream_of(a.dropout);
  float dweight[Layout::kChunks][kChunk] = {};
  float dbias[Layout::kChunks][kChunk] = {};
  float dlinear_bias[Layout::kChunks][kChunk] = {};
  for (int64_t row = part * a.parts.rows + Layout::row_of_block(); row < end;
       row += Layout::kRows) {
    const int64_t offset = row * a.columns;
    const int64_t first_call = row * ceil_div(a.columns, kChunk);
    float g[Layout::kChunks][kChunk];
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      load_chunk<Layout::kWide>(static_cast<const Y*>(a.dy) + offset, Layout::column(c), a.columns,
                                g[c]);
    }
    norm_gradient<Layout>(static_cast<const S*>(a.h) + offset, a.mean[row], a.rstd[row], a.weight,
                          a.columns, g, dweight, dbias);
#pragma unroll
    for (int c = 0; c < Layout::kChunks; ++c) {
      const int column = Layout::column(c);
      if (a.dh != nullptr) {
        float dh[kChunk];
        load_chunk<Layout::kWide>(static_cast<const S*>(a.dh) + offset, column, a.columns, dh);
        add_to(g[c], dh);
      }
      store_chunk<Layout::kWide>(static_cast<S*>(a.dresidual) + offset, column, a.columns, g[c]);
      if (a.dropout.threshold > 0) {
        drop_chunk(stream, a.dropout.scale, first_call + column / kChunk, g[c]);
      }
      if (a.dx != nullptr) {
        store_chunk<Layout::kWide>(static_cast<X*>(a.dx) + offset, column, a.columns, g[c]);
      }
      if (a.has_linear_bias) add_to(dlinear_bias[c], g[c]);
    }
  }
  store_part<Layout>(dweight, a.partial + part * a.columns, a.columns);
  store_part<Layout>(dbias, a.partial + (a.parts.count + part) * a.columns, a.columns);
  if (a.has_linear_bias) {
    store_part<Layout>(dlinear_bias, a.partial + (2 * a.parts.count + part) * a.columns, a.columns);
  }
}

}  // namespace

void launch_add_layer_norm_fwd(const AddLayerNorm& a, Stream stream) {
  with_types(a.x_dtype, a.sum_dtype, a.y_dtype, [&](auto x, auto sum, auto y) {
    with_layout(a.columns, a.wide, [&](auto layout) {
      using Layout = decltype(layout);
      launch(add_layer_norm_fwd_kernel<decltype(x), decltype(sum), decltype(y), Layout>,
             static_cast<unsigned>(ceil_div(a.rows, Layout::kRows)), Layout::kThreads, 0, stream,
             a);
    });
  });
}

void launch_add_layer_norm_bwd(const AddLayerNormGrad& a, Stream stream) {
  with_types(a.x_dtype, a.sum_dtype, a.y_dtype, [&](auto x, auto sum, auto y) {
    with_layout(a.columns, a.wide, [&](auto layout) {
      using Layout = decltype(layout);
      launch(add_layer_norm_bwd_kernel<decltype(x), decltype(sum), decltype(y), Layout>,
             static_cast<unsigned>(a.parts.count), Layout::kThreads, part_bytes<Layout>(), stream,
             a);
    });
  });
}

}  // namespace fastbert
