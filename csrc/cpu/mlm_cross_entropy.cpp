// The decoder's product and the softmax loss of labelled rows, a strip of the vocabulary at a time:
// the weight is read once and packed in cache, no logits reach memory, and backward computes them
// again. Strips and the groups they are summed in are fixed, whatever the threads.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "mlm_cross_entropy";
constexpr int64_t kStripBlocks = 8;
constexpr int64_t kStrip = kStripBlocks * kBlock;  // columns of the vocabulary
constexpr int64_t kGroups = 16;  // of strips, each with a gradient of hidden of its own

// What every strip of one call shares.
struct Problem {
  Source hidden, weight;
  Arithmetic arithmetic;
  Multiply multiply;
  int64_t rows, depth, vocabulary;
  int64_t row_blocks, deep, bytes;
  Workspace left;  // hidden, packed: [rows / 32][depth / 32]

  Problem(const at::Tensor& h, const at::Tensor& w)
      : hidden(source_of(h, kOp)),
        weight(source_of(w, kOp)),
        arithmetic(ordinary_arithmetic({hidden, weight}, arithmetic_for(h.scalar_type()))),
        multiply(multiply_for(arithmetic)),
        rows(h.size(0)),
        depth(h.size(1)),
        vocabulary(w.size(0)),
        row_blocks(blocks_of(rows)),
        deep(blocks_of(depth)),
        bytes(bytes_per_block(arithmetic)),
        left(row_blocks * deep * bytes) {
    pack(hidden, Layout::kA, 0, rows, false, left.as<char>());
  }

  int64_t strips() const { return ceil_div(vocabulary, kStrip); }
  int64_t columns_of(int64_t strip) const { return std::min(kStrip, vocabulary - strip * kStrip); }

  // Blocks of `count` rows from `first`: [row][column], or [column][row].
  void pack(const Source& s, Layout layout, int64_t first, int64_t count, bool by_columns,
            char* out) const {
    const int64_t high = blocks_of(count), wide = blocks_of(s.columns);
    for_each_range(high * wide, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / wide, column = i % wide;
        const int64_t place = by_columns ? column * high + row : i;
        kernels().pack_block(s, arithmetic, layout, first + row * kBlock, column * kBlock,
                             out + place * bytes);
      }
    });
  }

  // Logits of a strip, (rows, kStrip), without their bias.
  void logits(const char* right, int64_t columns, int64_t row_block, float* out) const {
    for (int64_t panel = 0; panel < blocks_of(columns); ++panel) {
      multiply(left.as<char>() + row_block * deep * bytes, right + panel * deep * bytes, deep,
               out + panel * kBlock, kStrip, false);
    }
  }
};

// Labels as the kernels want them: -1 where a row does not count.
std::vector<int64_t> counted_labels(const at::Tensor& labels, int64_t ignore_index,
                                    int64_t vocabulary) {
  const at::Tensor all = labels.contiguous();
  const int64_t* label = all.const_data_ptr<int64_t>();
  std::vector<int64_t> counted(all.numel());
  for (int64_t i = 0; i < all.numel(); ++i) {
    counted[i] = label[i] == ignore_index ? -1 : label[i];
    TORCH_CHECK_INDEX(
        counted[i] >= -1 && counted[i] < vocabulary && (label[i] >= 0 || counted[i] == -1), kOp,
        ": label ", label[i], " at row ", i, " is outside the vocabulary of ", vocabulary);
  }
  return counted;
}

// A strip's exponentials beside another peak. One whose logits are all -inf, as a bias masks words
// that do not exist, has none: beside its own peak they are NaN.
float beside(const LogitSums& strip, float peak) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const bool masked = strip.peak == kNothing && strip.all == kNothing;
  return masked && peak != kNothing ? 0.0f : strip.exponentials * std::exp(strip.peak - peak);
}

// One row's sums over the whole vocabulary, strip after strip.
LogitSums joined(const LogitSums* strips, int64_t count, int64_t step) {
  LogitSums all = strips[0];
  for (int64_t i = 1; i < count; ++i) {
    const LogitSums& next = strips[i * step];
    const float peak = std::max(all.peak, next.peak);
    all.exponentials = beside(all, peak) + beside(next, peak);
    all.peak = peak;
    all.all += next.all;
    all.label += next.label;
  }
  return all;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> mlm_cross_entropy_fwd_cpu(
    const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& labels, int64_t ignore_index, double label_smoothing, double z_loss) {
  const at::Tensor h = with_contiguous_rows(hidden), w = with_contiguous_rows(weight);
  const Problem p(h, w);
  const at::Tensor biases = float_vector(bias, p.vocabulary, kOp, "bias");
  const std::vector<int64_t> label = counted_labels(labels, ignore_index, p.vocabulary);
  at::Tensor loss = at::zeros({p.rows}, h.options().dtype(at::kFloat)), lse = at::zeros_like(loss);
  if (p.rows == 0) return {loss, lse};
  const CrossEntropy a{dtype_of(h, kOp), data_or_null(biases), label.data()};
  const Workspace all(p.strips() * p.rows * sizeof(LogitSums));
  LogitSums* sums = all.as<LogitSums>();
  struct Kept {
    Tiles tiles;
    Workspace right, logits;
  };
  in_turn(
      at::get_num_threads(), p.strips(),
      [&] {
        return Kept{Tiles(p.arithmetic), Workspace(kStripBlocks * p.deep * p.bytes),
                    Workspace(kBlock * kStrip * sizeof(float))};
      },
      [&](const Kept& kept, int64_t strip) {
        const int64_t columns = p.columns_of(strip);
        p.pack(p.weight, Layout::kBTransposed, strip * kStrip, columns, false,
               kept.right.as<char>());
        float* logits = kept.logits.as<float>();
        for (int64_t block = 0; block < p.row_blocks; ++block) {
          const int64_t row = block * kBlock;
          p.logits(kept.right.as<char>(), columns, block, logits);
          kernels().sum_logits(a, row, std::min(kBlock, p.rows - row), strip * kStrip, columns,
                               logits, kStrip, sums + strip * p.rows + row);
        }
      });
  float *losses = loss.mutable_data_ptr<float>(), *lses = lse.mutable_data_ptr<float>();
  const auto smoothing = static_cast<float>(label_smoothing), z = static_cast<float>(z_loss);
  for (int64_t row = 0; row < p.rows; ++row) {
    const LogitSums s = joined(sums + row, p.strips(), p.rows);
    lses[row] = s.peak + std::log(s.exponentials);
    if (label[row] < 0) continue;
    const float mean = s.all / static_cast<float>(p.vocabulary);
    losses[row] = (1.0f - smoothing) * (lses[row] - s.label) + z * lses[row] * lses[row];
    if (smoothing > 0.0f) losses[row] += smoothing * (lses[row] - mean);
  }
  return {loss, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> mlm_cross_entropy_bwd_cpu(
    const at::Tensor& dloss, const at::Tensor& hidden, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, const at::Tensor& labels, const at::Tensor& softmax_lse,
    int64_t ignore_index, double label_smoothing, double z_loss, bool need_dhidden,
    bool need_dweight) {
  const at::Tensor h = with_contiguous_rows(hidden), w = with_contiguous_rows(weight);
  const Problem p(h, w);
  const at::Tensor biases = float_vector(bias, p.vocabulary, kOp, "bias");
  const std::vector<int64_t> label = counted_labels(labels, ignore_index, p.vocabulary);
  const at::Tensor gradient = dloss.to(at::kFloat).contiguous(), lse = softmax_lse.contiguous();
  at::Tensor dhidden =
      need_dhidden ? at::zeros(h.sizes(), h.options()) : at::empty({0}, h.options());
  at::Tensor dweight =
      need_dweight ? empty_from_pool(w.sizes(), w.options()) : at::empty({0}, w.options());
  at::Tensor dbias = at::zeros({bias.has_value() ? p.vocabulary : 0}, at::kFloat);
  if (p.rows == 0) {
    if (need_dweight) dweight.zero_();
    return {dhidden, dweight,
            bias.has_value() ? dbias.to(bias->scalar_type()) : at::empty({0}, h.options())};
  }
  std::vector<float> factor(p.rows), hit(p.rows), every(p.rows);
  for (int64_t row = 0; row < p.rows; ++row) {
    const float d = label[row] < 0 ? 0.0f : gradient.const_data_ptr<float>()[row];
    const auto z = static_cast<float>(z_loss), smoothing = static_cast<float>(label_smoothing);
    factor[row] = d * (1.0f + 2.0f * z * lse.const_data_ptr<float>()[row]);
    hit[row] = -(1.0f - smoothing) * d;
    every[row] = -d * (smoothing / static_cast<float>(p.vocabulary));
  }
  const CrossEntropyGrad a{{dtype_of(h, kOp), data_or_null(biases), label.data()},
                           lse.const_data_ptr<float>(),
                           factor.data(),
                           hit.data(),
                           every.data()};
  const Workspace rows_by_depth(p.row_blocks * p.deep * p.bytes);
  if (need_dweight) p.pack(p.hidden, Layout::kB, 0, p.rows, true, rows_by_depth.as<char>());
  const int64_t strips_per_group = ceil_div(p.strips(), kGroups);
  const int64_t groups = ceil_div(p.strips(), strips_per_group);
  const int64_t tiles = p.row_blocks * p.deep, tile = kBlock * kBlock;
  const Workspace partials(need_dhidden ? groups * tiles * tile * sizeof(float) : 0);
  const Finish finish{need_dweight ? dtype_of(dweight, kOp) : Dtype::kFloat,
                      need_dweight ? dweight.mutable_data_ptr() : nullptr, p.depth};
  float* dbias_data = bias.has_value() ? dbias.mutable_data_ptr<float>() : nullptr;

  struct Kept {
    Tiles tiles;
    Workspace right, columns, logits, gradient_rows, gradient_columns;
  };
  const auto make = [&] {
    const int64_t strip_bytes = kStripBlocks * p.bytes;
    return Kept{Tiles(p.arithmetic),
                Workspace(strip_bytes * p.deep),
                Workspace(strip_bytes * p.deep),
                Workspace(p.row_blocks * kBlock * kStrip * sizeof(float)),
                Workspace(strip_bytes * p.row_blocks),
                Workspace(strip_bytes * p.row_blocks)};
  };
  const auto strip_gradients = [&](const Kept& kept, int64_t strip, float* partial, bool first) {
    const int64_t columns = p.columns_of(strip), begin = strip * kStrip;
    const int64_t panels = blocks_of(columns);
    float* logits = kept.logits.as<float>();
    p.pack(p.weight, Layout::kBTransposed, begin, columns, false, kept.right.as<char>());
    for (int64_t block = 0; block < p.row_blocks; ++block) {
      const int64_t row = block * kBlock;
      p.logits(kept.right.as<char>(), columns, block, logits + row * kStrip);
      kernels().logit_gradients(a, row, std::min(kBlock, p.rows - row), begin, columns,
                                logits + row * kStrip, kStrip,
                                dbias_data == nullptr ? nullptr : dbias_data + begin);
    }
    const Source gradients{Dtype::kFloat, logits, p.rows, columns, kStrip};
    alignas(64) float sums[kBlock * kBlock];
    if (need_dweight) {
      char* left = kept.gradient_columns.as<char>();
      p.pack(gradients, Layout::kATransposed, 0, p.rows, true, left);
      for (int64_t panel = 0; panel < panels; ++panel) {
        for (int64_t d = 0; d < p.deep; ++d) {
          p.multiply(left + panel * p.row_blocks * p.bytes,
                     rows_by_depth.as<char>() + d * p.row_blocks * p.bytes, p.row_blocks, sums,
                     kBlock, false);
          kernels().finish_block(finish, begin + panel * kBlock, d * kBlock,
                                 std::min(kBlock, columns - panel * kBlock),
                                 std::min(kBlock, p.depth - d * kBlock), sums);
        }
      }
    }
    if (!need_dhidden) return;
    char* left = kept.gradient_rows.as<char>();
    p.pack(gradients, Layout::kA, 0, p.rows, false, left);
    p.pack(p.weight, Layout::kB, begin, columns, true, kept.columns.as<char>());
    for (int64_t i = 0; i < tiles; ++i) {
      p.multiply(left + i / p.deep * panels * p.bytes,
                 kept.columns.as<char>() + i % p.deep * panels * p.bytes, panels,
                 partial + i * tile, kBlock, !first);
    }
  };
  in_turn(at::get_num_threads(), groups, make, [&](const Kept& kept, int64_t group) {
    const int64_t begin = group * strips_per_group;
    const int64_t end = std::min(p.strips(), begin + strips_per_group);
    float* partial = partials.as<float>() + (need_dhidden ? group * tiles * tile : 0);
    for (int64_t strip = begin; strip < end; ++strip) {
      strip_gradients(kept, strip, partial, strip == begin);
    }
  });
  if (need_dhidden) {
    const Finish rows{dtype_of(dhidden, kOp), dhidden.mutable_data_ptr(), p.depth};
    for_each_range(tiles, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* total = partials.as<float>() + i * tile;
        for (int64_t group = 1; group < groups; ++group) {
          kernels().add_to(partials.as<float>() + (group * tiles + i) * tile, total, tile);
        }
        const int64_t row = i / p.deep * kBlock, column = i % p.deep * kBlock;
        kernels().finish_block(rows, row, column, std::min(kBlock, p.rows - row),
                               std::min(kBlock, p.depth - column), total);
      }
    });
  }
  return {dhidden, dweight,
          bias.has_value() ? dbias.to(bias->scalar_type()) : at::empty({0}, h.options())};
}

}  // namespace fastbert
