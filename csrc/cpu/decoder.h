// A decoder's product with labelled rows, a strip of the vocabulary at a time: the weight is read
// once and packed in cache, no logits reach memory, and backward computes them again. Strips and
// the groups they are summed in are fixed, whatever the threads. Included by the op files only.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {

constexpr int64_t kStripBlocks = 8;
constexpr int64_t kStrip = kStripBlocks * kBlock;  // columns of the vocabulary
constexpr int64_t kGroups = 16;  // of strips, each with a gradient of hidden of its own

// What every strip of one call shares.
struct Decoder {
  Source hidden, weight;
  Arithmetic arithmetic;
  Multiply multiply;
  int64_t rows, depth, vocabulary;
  int64_t row_blocks, deep, bytes;
  Workspace left;  // hidden, packed: [rows / 32][depth / 32]

  // Of tensors with contiguous rows, which must outlive it.
  Decoder(const at::Tensor& h, const at::Tensor& w, const char* op)
      : hidden(source_of(h, op)),
        weight(source_of(w, op)),
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
  int64_t rows_of(int64_t row_block) const { return std::min(kBlock, rows - row_block * kBlock); }

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
};

// A strip of a decoder's weights, which a thread packs and multiplies with.
class DecoderStrip {
 public:
  explicit DecoderStrip(const Decoder& decoder)
      : decoder_(decoder),
        tiles_(decoder.arithmetic),
        right_(kStripBlocks * decoder.deep * decoder.bytes) {}

  void take(int64_t strip) {
    const Decoder& d = decoder_;
    columns_ = d.columns_of(strip);
    d.pack(d.weight, Layout::kBTransposed, strip * kStrip, columns_, false, right_.as<char>());
  }

  // Logits of 32 rows, (32, kStrip), without their bias.
  void logits(int64_t row_block, float* out) const {
    const Decoder& d = decoder_;
    for (int64_t panel = 0; panel < blocks_of(columns_); ++panel) {
      d.multiply(d.left.as<char>() + row_block * d.deep * d.bytes,
                 right_.as<char>() + panel * d.deep * d.bytes, d.deep, out + panel * kBlock, kStrip,
                 false);
    }
  }

 private:
  const Decoder& decoder_;
  Tiles tiles_;
  Workspace right_;
  int64_t columns_ = 0;
};

// Labels as the kernels want them: -1 where a row does not count.
inline std::vector<int64_t> counted_labels(const at::Tensor& labels, int64_t ignore_index,
                                           int64_t vocabulary, const char* op) {
  const at::Tensor all = labels.contiguous();
  const int64_t* label = all.const_data_ptr<int64_t>();
  std::vector<int64_t> counted(all.numel());
  for (int64_t i = 0; i < all.numel(); ++i) {
    counted[i] = label[i] == ignore_index ? -1 : label[i];
    TORCH_CHECK_INDEX(
        counted[i] >= -1 && counted[i] < vocabulary && (label[i] >= 0 || counted[i] == -1), op,
        ": label ", label[i], " at row ", i, " is outside the vocabulary of ", vocabulary);
  }
  return counted;
}

// What a thread keeps of the gradients of a strip.
struct GradientRoom {
  Workspace columns;                          // of weights, packed for the gradient of hidden
  Workspace logits;                           // (rows, kStrip)
  Workspace gradient_rows, gradient_columns;  // the logits' gradients, packed

  explicit GradientRoom(const Decoder& d)
      : columns(kStripBlocks * d.bytes * d.deep),
        logits(d.row_blocks * kBlock * kStrip * sizeof(float)),
        gradient_rows(kStripBlocks * d.bytes * d.row_blocks),
        gradient_columns(kStripBlocks * d.bytes * d.row_blocks) {}
};

// The gradients of hidden, weight and bias, each empty where it is not wanted. make() gives what a
// thread keeps; gradients(kept, strip, out, dbias) writes those of a strip's logits, (rows,
// kStrip), and adds up their columns in dbias unless that is null.
template <typename Make, typename Gradients>
std::tuple<at::Tensor, at::Tensor, at::Tensor> decoder_bwd(const Decoder& p, const at::Tensor& h,
                                                           const at::Tensor& w,
                                                           const std::optional<at::Tensor>& bias,
                                                           bool need_dhidden, bool need_dweight,
                                                           const char* op, const Make& make,
                                                           const Gradients& gradients) {
  at::Tensor dhidden =
      need_dhidden ? at::zeros(h.sizes(), h.options()) : at::empty({0}, h.options());
  at::Tensor dweight =
      need_dweight ? empty_from_pool(w.sizes(), w.options()) : at::empty({0}, w.options());
  at::Tensor dbias = at::zeros({bias.has_value() ? p.vocabulary : 0}, at::kFloat);
  const auto of_bias = [&] {
    return bias.has_value() ? dbias.to(bias->scalar_type()) : at::empty({0}, h.options());
  };
  if (p.rows == 0) {
    if (need_dweight) dweight.zero_();
    return {dhidden, dweight, of_bias()};
  }
  const Workspace rows_by_depth(p.row_blocks * p.deep * p.bytes);
  if (need_dweight) p.pack(p.hidden, Layout::kB, 0, p.rows, true, rows_by_depth.as<char>());
  const int64_t strips_per_group = ceil_div(p.strips(), kGroups);
  const int64_t groups = ceil_div(p.strips(), strips_per_group);
  const int64_t tiles = p.row_blocks * p.deep, tile = kBlock * kBlock;
  const Workspace partials(need_dhidden ? groups * tiles * tile * sizeof(float) : 0);
  const Finish finish{need_dweight ? dtype_of(dweight, op) : Dtype::kFloat,
                      need_dweight ? dweight.mutable_data_ptr() : nullptr, p.depth};
  float* dbias_data = bias.has_value() ? dbias.mutable_data_ptr<float>() : nullptr;

  struct Kept {
    decltype(make()) made;
    GradientRoom room;
  };
  const auto keep = [&] { return Kept{make(), GradientRoom(p)}; };
  const auto strip_gradients = [&](Kept& kept, int64_t strip, float* partial, bool first) {
    const int64_t columns = p.columns_of(strip), begin = strip * kStrip;
    const int64_t panels = blocks_of(columns);
    const GradientRoom& room = kept.room;
    float* logits = room.logits.as<float>();
    gradients(kept.made, strip, logits, dbias_data == nullptr ? nullptr : dbias_data + begin);
    const Source source{Dtype::kFloat, logits, p.rows, columns, kStrip};
    alignas(64) float sums[kBlock * kBlock];
    if (need_dweight) {
      char* left = room.gradient_columns.as<char>();
      p.pack(source, Layout::kATransposed, 0, p.rows, true, left);
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
    char* left = room.gradient_rows.as<char>();
    p.pack(source, Layout::kA, 0, p.rows, false, left);
    p.pack(p.weight, Layout::kB, begin, columns, true, room.columns.as<char>());
    for (int64_t i = 0; i < tiles; ++i) {
      p.multiply(left + i / p.deep * panels * p.bytes,
                 room.columns.as<char>() + i % p.deep * panels * p.bytes, panels,
                 partial + i * tile, kBlock, !first);
    }
  };
  in_turn(at::get_num_threads(), groups, keep, [&](Kept& kept, int64_t group) {
    const int64_t begin = group * strips_per_group;
    const int64_t end = std::min(p.strips(), begin + strips_per_group);
    float* partial = partials.as<float>() + (need_dhidden ? group * tiles * tile : 0);
    for (int64_t strip = begin; strip < end; ++strip) {
      strip_gradients(kept, strip, partial, strip == begin);
    }
  });
  if (need_dhidden) {
    const Finish rows{dtype_of(dhidden, op), dhidden.mutable_data_ptr(), p.depth};
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
  return {dhidden, dweight, of_bias()};
}

}  // namespace fastbert
