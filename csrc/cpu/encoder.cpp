// All layers of a post-norm encoder on packed rows, without dropout: what the layers' own ops run,
// one after the other on buffers that are made once, with the same bits. Under autocast hidden
// states are wider than what products read and give.
#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "encoder";
// Tensors of a layer: query, key, value, attention output, intermediate, output; weight and bias of
// the two norms; packed weights, the first three in one.
constexpr size_t kLinears = 6, kNorms = 4, kPacked = 4;
// Rows whose feed-forward network is computed at a time, which bounds the memory of its inside.
constexpr int64_t kFeedForwardRows = 512;

// One layer's vectors, as floats.
struct Vectors {
  const float *qkv, *attention_output, *intermediate, *output;  // biases
  const float *attention_norm_weight, *attention_norm_bias;
  const float *output_norm_weight, *output_norm_bias;
};

struct Layer {
  PackedRight qkv, attention_output, intermediate, output;
  Vectors vectors;
};

// The layers' tensors as the op gets them; `weights` is empty where the originals were dropped.
struct Parameters {
  at::TensorList weights, biases, norms, packed;

  size_t layers() const { return packed.size() / kPacked; }

  at::TensorList originals(size_t layer, size_t first, size_t count) const {
    return weights.empty() ? at::TensorList() : weights.slice(layer * kLinears + first, count);
  }

  int64_t columns() const {
    int64_t total = 0;
    for (const at::Tensor& t : biases) total += t.numel();
    for (const at::Tensor& t : norms) total += t.numel();
    return total;
  }
};

void check_parameters(const at::Tensor& x, const Parameters& p, int64_t num_heads) {
  const size_t layers = p.layers();
  TORCH_CHECK_VALUE(p.packed.size() == layers * kPacked && p.biases.size() == layers * kLinears &&
                        p.norms.size() == layers * kNorms &&
                        (p.weights.empty() || p.weights.size() == layers * kLinears),
                    kOp, ": a layer has ", kLinears, " weights (or none), ", kLinears, " biases, ",
                    kNorms, " vectors of norms and ", kPacked, " packed weights, got ",
                    p.weights.size(), ", ", p.biases.size(), ", ", p.norms.size(), " and ",
                    p.packed.size());
  TORCH_CHECK_VALUE(x.dim() == 2 && num_heads > 0 && x.size(1) % num_heads == 0, kOp,
                    ": x must be (T, C) with C a multiple of the ", num_heads, " heads, got ",
                    x.sizes());
}

// Appends tensors to a run of floats and gives the place of the first.
const float* append(float*& next, at::TensorList tensors, int64_t size) {
  const float* first = next;
  for (const at::Tensor& t : tensors) {
    const at::Tensor vector = t.contiguous();
    kernels().convert(dtype_of(vector, kOp), vector.const_data_ptr(), Dtype::kFloat, next,
                      vector.numel());
    next += vector.numel();
  }
  TORCH_CHECK_VALUE(next - first == size, kOp, ": expected ", size, " values of biases or norms, ",
                    "got ", next - first);
  return first;
}

std::vector<Layer> layers_of(int64_t columns, at::ScalarType compute_dtype, const Parameters& p,
                             float* vectors) {
  std::vector<Layer> layers;
  layers.reserve(p.layers());
  for (size_t i = 0; i < p.layers(); ++i) {
    const auto weight = [&](size_t first, size_t count, size_t packed, int64_t depth) {
      PackedRight right = packed_weights(p.originals(i, first, count), compute_dtype,
                                         p.packed[i * kPacked + packed], kOp);
      TORCH_CHECK_VALUE(right.depth() == depth, kOp, ": weight ", first, " of layer ", i,
                        " must have ", depth, " columns, got ", right.depth());
      return right;
    };
    PackedRight qkv = weight(0, 3, 0, columns), attention_output = weight(3, 1, 1, columns);
    PackedRight intermediate = weight(4, 1, 2, columns);
    PackedRight output = weight(5, 1, 3, intermediate.columns());
    TORCH_CHECK_VALUE(qkv.columns() == 3 * columns && attention_output.columns() == columns &&
                          output.columns() == columns,
                      kOp, ": the projections of layer ", i, " must have ", columns, " rows each");
    const at::TensorList biases = p.biases.slice(i * kLinears, kLinears);
    const at::TensorList norms = p.norms.slice(i * kNorms, kNorms);
    const Vectors v{append(vectors, biases.slice(0, 3), 3 * columns),
                    append(vectors, biases[3], columns),
                    append(vectors, biases[4], intermediate.columns()),
                    append(vectors, biases[5], columns),
                    append(vectors, norms[0], columns),
                    append(vectors, norms[1], columns),
                    append(vectors, norms[2], columns),
                    append(vectors, norms[3], columns)};
    layers.push_back({std::move(qkv), std::move(attention_output), std::move(intermediate),
                      std::move(output), v});
  }
  return layers;
}

// A run of rows of a row-major matrix.
struct Rows {
  Dtype dtype;
  char* data;
  int64_t rows, columns;

  explicit Rows(const at::Tensor& t)
      : dtype(dtype_of(t, kOp)),
        data(static_cast<char*>(const_cast<void*>(t.const_data_ptr()))),
        rows(t.size(0)),
        columns(t.size(1)) {}

  Rows part(int64_t first, int64_t count) const {
    Rows some = *this;
    some.data += first * columns * (dtype == Dtype::kFloat ? 4 : 2);
    some.rows = count;
    return some;
  }
};

// HiddenStates states as residuals, and as products read them: the same rows where the dtypes are.
struct HiddenStates {
  Rows states, rounded;

  HiddenStates part(int64_t first, int64_t count) const {
    return {states.part(first, count), rounded.part(first, count)};
  }

  void round(int64_t begin, int64_t end) const {
    if (rounded.dtype == states.dtype) return;
    const int64_t count = end - begin;
    kernels().convert(states.dtype, states.part(begin, count).data, rounded.dtype,
                      rounded.part(begin, count).data, count * states.columns);
  }
};

// left · right + bias, through GELU where that is said, into `out`; then finish_rows.
void project(const Rows& left, const PackedRight& right, const float* bias, Gelu gelu,
             const Rows& out, const FinishRows& finish_rows = {}) {
  Finish finish{out.dtype, out.data, right.columns()};
  finish.bias = bias;
  finish.gelu = gelu;
  multiply({left.dtype, left.data, left.rows, left.columns, left.columns}, false, right, finish,
           finish_rows);
}

struct Norm {
  const float *weight, *bias;
  float eps;
  float* statistics;  // 2 floats a row
};

// out = LayerNorm(residual + left · right + bias); `sum` holds the product.
void project_add_norm(const Rows& left, const PackedRight& right, const float* bias,
                      const Rows& residual, const Norm& norm, const Rows& sum,
                      const HiddenStates& out) {
  const AddLayerNorm a{sum.dtype,
                       residual.dtype,
                       sum.columns,
                       norm.eps,
                       {DropoutStream{}, 1.0f},
                       sum.data,
                       nullptr,
                       residual.data,
                       norm.weight,
                       norm.bias,
                       out.states.data,
                       nullptr,
                       norm.statistics,
                       norm.statistics + sum.rows};
  project(left, right, bias, Gelu::kNone, sum, [&](int64_t begin, int64_t end) {
    kernels().add_layer_norm_fwd(a, begin, end);
    out.round(begin, end);
  });
}

}  // namespace

at::Tensor encoder_fwd_cpu(const at::Tensor& hidden_states, at::TensorList weights,
                           at::TensorList biases, at::TensorList norms, at::TensorList packed,
                           const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                           int64_t num_heads, double softmax_scale, double eps,
                           std::string_view approximate,
                           std::optional<at::ScalarType> compute_dtype) {
  const at::Tensor input = hidden_states.contiguous();
  const Parameters parameters{weights, biases, norms, packed};
  check_parameters(input, parameters, num_heads);
  const at::ScalarType computed = compute_dtype.value_or(input.scalar_type());
  const bool rounds = computed != input.scalar_type();
  TORCH_CHECK_VALUE(!rounds || input.scalar_type() == at::kFloat, kOp, ": x must be ", computed,
                    ", which products are computed in, or Float, got ", input.scalar_type());
  const Gelu gelu = gelu_of(approximate, kOp);
  const int64_t rows = input.size(0), columns = input.size(1),
                some = std::min(rows, kFeedForwardRows);
  const Workspace vectors(parameters.columns() * sizeof(float));
  const Workspace statistics(2 * rows * sizeof(float));
  const std::vector<Layer> layers = layers_of(columns, computed, parameters, vectors.as<float>());
  int64_t widest = 0;
  for (const Layer& layer : layers) widest = std::max(widest, layer.intermediate.columns());

  const at::TensorOptions options = input.options().dtype(computed);
  const auto buffer = [&](int64_t height, int64_t width) {
    return empty_from_pool({height, width}, options);
  };
  const at::Tensor y = empty_from_pool({rows, columns}, input.options());
  const at::Tensor attended = empty_from_pool({rows, columns}, input.options());
  const at::Tensor rounded = buffer(rounds ? rows : 0, columns);
  const at::Tensor qkv = buffer(rows, 3 * columns), projected = buffer(rows, columns);
  const at::Tensor hidden = buffer(some, widest);
  const at::Tensor heads_out = empty_from_pool({rows, num_heads, columns / num_heads}, options);

  const auto heads = qkv.view({rows, 3, num_heads, columns / num_heads}).unbind(1);
  const std::optional<at::Tensor> no_rng_state;
  Attention attention = attention_of(heads[0], heads[1], heads[2],
                                     {softmax_scale, std::nullopt, 0.0, 0, no_rng_state});
  auto tasks = attention_tasks(cu_seqlens_q, cu_seqlens_k, attention, true);
  for (AttentionTask& task : tasks) task.first_k = task.first_q;  // keys lie among all rows
  start_attention(attention, tasks, heads_out, {});

  const Rows context(heads_out.view({rows, columns})), all_projected(projected);
  // What is rounded is read by one product, and then the next: one buffer serves both.
  const auto rows_of = [&](const at::Tensor& states) {
    return HiddenStates{Rows(states), Rows(rounds ? rounded : states)};
  };
  const HiddenStates all_attended = rows_of(attended), out = rows_of(y);
  HiddenStates x = rows_of(input);
  if (rounds) {
    for_each_row_range(rows, columns, [&](int64_t begin, int64_t end) { x.round(begin, end); });
  }
  for (const Layer& layer : layers) {
    const Vectors& v = layer.vectors;
    const Norm attention_norm{v.attention_norm_weight, v.attention_norm_bias,
                              static_cast<float>(eps), statistics.as<float>()};
    const Norm output_norm{v.output_norm_weight, v.output_norm_bias, static_cast<float>(eps),
                           statistics.as<float>()};
    project(x.rounded, layer.qkv, v.qkv, Gelu::kNone, Rows(qkv));
    run_attention_tasks(attention, tasks, false);
    project_add_norm(context, layer.attention_output, v.attention_output, x.states, attention_norm,
                     all_projected, all_attended);
    for (int64_t first = 0; first < rows; first += kFeedForwardRows) {
      const int64_t count = std::min(kFeedForwardRows, rows - first);
      const HiddenStates part = all_attended.part(first, count);
      Rows inner(hidden);
      inner.rows = count;
      inner.columns = layer.intermediate.columns();
      project(part.rounded, layer.intermediate, v.intermediate, gelu, inner);
      project_add_norm(inner, layer.output, v.output, part.states, output_norm,
                       all_projected.part(first, count), out.part(first, count));
    }
    x = out;
  }
  return layers.empty() ? input.clone() : y;
}

}  // namespace fastbert
