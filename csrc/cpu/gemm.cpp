#include "cpu/gemm.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "cpu/inline.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/tensors.h"

namespace fastbert {

#if defined(FASTBERT_X86)
namespace avx512_bf16 {
void multiply_bf16(const void*, const void*, int64_t, float*, int64_t, bool);
}
namespace amx {
void configure_tiles();
void release_tiles();
void multiply_bf16(const void*, const void*, int64_t, float*, int64_t, bool);
void multiply_split2(const void*, const void*, int64_t, float*, int64_t, bool);
void multiply_split3(const void*, const void*, int64_t, float*, int64_t, bool);
}  // namespace amx
#endif

namespace {

constexpr int64_t kHeaderBytes = 64;
constexpr int64_t kMagic = 0x6266617374303162;
// The left rows a thread holds packed while all columns pass: they should stay in its L2 cache.
constexpr int64_t kLeftBytes = 768 << 10;
constexpr int64_t kMostRowBlocks = 8;

struct Header {
  int64_t magic;
  Arithmetic wanted, used;  // they differ where a weight is not ordinary
  int64_t depth, columns;
};

Header header_of(const at::Tensor& packed) {
  Header header{};
  if (packed.scalar_type() == at::kByte && packed.numel() >= kHeaderBytes) {
    std::memcpy(&header, packed.const_data_ptr<uint8_t>(), sizeof(header));
  }
  return header;
}

int64_t total_rows(const std::vector<Source>& sources) {
  int64_t rows = 0;
  for (const Source& s : sources) rows += s.rows;
  return rows;
}

// The source that holds `row` of all of them, which becomes the row within it.
const Source& source_at(const std::vector<Source>& sources, int64_t& row) {
  size_t i = 0;
  for (; i + 1 < sources.size() && row >= sources[i].rows; ++i) row -= sources[i].rows;
  return sources[i];
}

bool splits_fp32() {
  static const bool on = [] {
    const char* setting = std::getenv("FASTBERT_SPLIT_FP32");
    const std::string_view value = setting == nullptr ? "" : setting;
    TORCH_CHECK_VALUE(value.empty() || value == "0" || value == "1",
                      "FASTBERT_SPLIT_FP32: must be 0 or 1, got '", value, "'");
    return value != "0";
  }();
  return on;
}

// Fp32 in splits only where every weight is fp32 and ordinary.
Arithmetic arithmetic_of_source(const Source& s, Arithmetic wanted) {
  if (parts_of(wanted) == 1) return wanted;
  if (s.dtype != Dtype::kFloat) return Arithmetic::kFloat;
  const Workspace flags(s.rows);
  uint8_t* ordinary = flags.as<uint8_t>();
  for_each_row_range(s.rows, s.columns, [&](int64_t begin, int64_t end) {
    kernels().ordinary_rows(s, begin, end, ordinary + begin);
  });
  const bool all = std::all_of(ordinary, ordinary + s.rows, [](uint8_t o) { return o != 0; });
  return all ? wanted : Arithmetic::kFloat;
}

int64_t size_of_blocks(Arithmetic a, int64_t depth, int64_t columns) {
  return blocks_of(depth) * blocks_of(columns) * bytes_per_block(a);
}

// Row blocks [begin, end) of a left operand: [row / 32][k / 32] blocks.
void pack_left(const Source& s, bool transposed, Arithmetic a, int64_t begin, int64_t end,
               int64_t depth, char* out) {
  const int64_t deep = blocks_of(depth), bytes = bytes_per_block(a);
  for (int64_t block = begin; block < end; ++block) {
    for (int64_t k = 0; k < deep; ++k) {
      char* to = out + ((block - begin) * deep + k) * bytes;
      transposed ? kernels().pack_block(s, a, Layout::kATransposed, k * kBlock, block * kBlock, to)
                 : kernels().pack_block(s, a, Layout::kA, block * kBlock, k * kBlock, to);
    }
  }
}

// How rows and columns are cut into tasks: every thread gets some, and packs as little as it can.
struct Cut {
  int64_t row_blocks, column_blocks;  // of one task
  int64_t row_tasks, column_tasks;
};

Cut cut(int64_t rows, int64_t columns, int64_t depth, Arithmetic a) {
  const int64_t threads = at::get_num_threads();
  const int64_t row_blocks = blocks_of(rows), column_blocks = blocks_of(columns);
  const int64_t bytes = blocks_of(depth) * bytes_per_block(a);
  const int64_t most =
      std::clamp<int64_t>(kLeftBytes / std::max<int64_t>(1, bytes), 1, kMostRowBlocks);
  const int64_t rounds = ceil_div(row_blocks, most * threads);
  Cut c;
  c.row_blocks = std::max<int64_t>(1, std::min(most, ceil_div(row_blocks, rounds * threads)));
  c.row_tasks = ceil_div(row_blocks, c.row_blocks);
  // Few rows: the columns are shared too.
  const int64_t wanted = c.row_tasks % threads == 0 ? 1 : ceil_div(4 * threads, c.row_tasks);
  c.column_blocks = ceil_div(column_blocks, std::min(wanted, column_blocks));
  c.column_tasks = ceil_div(column_blocks, c.column_blocks);
  return c;
}

// Blocks of depth that are multiplied at a time. The error of a sum grows with its length, so where
// it shows (fp32) a piece starts from 0 and is added up, and is short; where it does not (bf16) the
// tiles take the sums up again, and a piece is what the L2 cache holds beside the other operand.
constexpr int64_t blocks_per_piece(Arithmetic a) {
  return a == Arithmetic::kFloat ? 8 : a == Arithmetic::kBFloat16 ? 96 : 12;
}

// The next piece of a product, from depth k on.
void multiply_piece(Arithmetic a, Multiply product, const char* left, const char* right, int64_t k,
                    int64_t count, float* sums) {
  const int64_t bytes = bytes_per_block(a);
  if (k == 0 || a == Arithmetic::kBFloat16) {
    return product(left + k * bytes, right + k * bytes, count, sums, kBlock, k > 0);
  }
  alignas(64) float piece[kBlock * kBlock];
  product(left + k * bytes, right + k * bytes, count, piece, kBlock, false);
  kernels().add_to(piece, sums, kBlock * kBlock);
}

}  // namespace

Arithmetic arithmetic_for(at::ScalarType dtype) {
  const Isa isa = current_isa();
  if (dtype == at::kBFloat16 && isa >= Isa::kAvx512Bf16) return Arithmetic::kBFloat16;
  if (dtype != at::kFloat || isa < Isa::kAmx || !splits_fp32()) return Arithmetic::kFloat;
  const bool highest =
      at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
  return highest ? Arithmetic::kSplit3 : Arithmetic::kSplit2;
}

Arithmetic ordinary_arithmetic(const std::vector<Source>& sources, Arithmetic wanted) {
  for (const Source& s : sources) wanted = arithmetic_of_source(s, wanted);
  return wanted;
}

Multiply multiply_for(Arithmetic arithmetic) {
#if defined(FASTBERT_X86)
  const bool tiles = current_isa() >= Isa::kAmx;
  switch (arithmetic) {
    case Arithmetic::kFloat:
      break;
    case Arithmetic::kBFloat16:
      return tiles ? amx::multiply_bf16 : avx512_bf16::multiply_bf16;
    case Arithmetic::kSplit2:
      return amx::multiply_split2;
    case Arithmetic::kSplit3:
      return amx::multiply_split3;
  }
#endif
  return kernels().multiply_float;
}

Tiles::Tiles(Arithmetic arithmetic) : configured_(false) {
#if defined(FASTBERT_X86)
  configured_ = arithmetic != Arithmetic::kFloat && current_isa() >= Isa::kAmx;
  if (configured_) amx::configure_tiles();
#endif
}

Tiles::~Tiles() {
#if defined(FASTBERT_X86)
  if (configured_) amx::release_tiles();
#endif
}

Source source_of(const at::Tensor& matrix, const char* op) {
  TORCH_INTERNAL_ASSERT(matrix.dim() == 2 &&
                        (matrix.numel() == 0 || matrix.size(1) == 1 || matrix.stride(1) == 1));
  return {dtype_of(matrix, op), matrix.const_data_ptr(), matrix.size(0), matrix.size(1),
          matrix.size(0) <= 1 ? matrix.size(1) : matrix.stride(0)};
}

PackedRight::PackedRight(Stack stack, bool transposed, Arithmetic arithmetic)
    : held_(std::move(stack.held)),
      sources_(std::move(stack.sources)),
      transposed_(transposed),
      depth_(transposed ? sources_[0].columns : total_rows(sources_)),
      columns_(transposed ? total_rows(sources_) : sources_[0].columns),
      arithmetic_(ordinary_arithmetic(sources_, arithmetic)),
      blocks_(empty_from_pool({kHeaderBytes + size_of_blocks(arithmetic_, depth_, columns_)},
                              at::TensorOptions().dtype(at::kByte))) {
  char* bytes = reinterpret_cast<char*>(blocks_.mutable_data_ptr<uint8_t>());
  const Header header{kMagic, arithmetic, arithmetic_, depth_, columns_};
  std::memcpy(bytes, &header, sizeof(header));
  data_ = bytes + kHeaderBytes;
  pack(bytes + kHeaderBytes);
}

PackedRight::PackedRight(Stack stack, bool transposed, const at::Tensor& packed)
    : held_(std::move(stack.held)),
      sources_(std::move(stack.sources)),
      transposed_(transposed),
      depth_(transposed ? sources_[0].columns : total_rows(sources_)),
      columns_(transposed ? total_rows(sources_) : sources_[0].columns),
      arithmetic_(header_of(packed).used),
      blocks_(packed),
      data_(reinterpret_cast<const char*>(packed.const_data_ptr<uint8_t>()) + kHeaderBytes) {}

PackedRight::PackedRight(const at::Tensor& packed)
    : transposed_(true),
      depth_(header_of(packed).depth),
      columns_(header_of(packed).columns),
      arithmetic_(header_of(packed).used),
      blocks_(packed),
      data_(reinterpret_cast<const char*>(packed.const_data_ptr<uint8_t>()) + kHeaderBytes) {}

void PackedRight::pack(char* blocks) const {
  const int64_t panels = blocks_of(columns_), deep = blocks_of(depth_);
  const int64_t bytes = bytes_per_block(arithmetic_);
  for_each_range(panels, std::max<int64_t>(1, 16 / std::max<int64_t>(1, deep)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin * deep; i < end * deep; ++i) {
                     const int64_t column = i / deep * kBlock, k = i % deep * kBlock;
                     int64_t row = transposed_ ? column : k;
                     const Source& s = source_at(sources_, row);
                     kernels().pack_block(s, arithmetic_,
                                          transposed_ ? Layout::kBTransposed : Layout::kB, row,
                                          transposed_ ? k : column, blocks + i * bytes);
                   }
                 });
}

const char* PackedRight::panel(int64_t column) const {
  return data_ + column / kBlock * blocks_of(depth_) * bytes_per_block(arithmetic_);
}

// The sum of an element's parts, the smallest first: of three parts the very value that was split.
float PackedRight::value_at(int64_t k, int64_t column) const {
  const int64_t half = column % kBlock / 16, pair = k % kBlock / 2;
  const int64_t place = (half * (kBlock / 2) + pair) * kBlock + column % 16 * 2 + k % 2;
  const char* block = panel(column) + k / kBlock * bytes_per_block(arithmetic_);
  float value = 0.0f;
  for (int part = parts_of(arithmetic_) - 1; part >= 0; --part) {
    uint16_t bits;
    std::memcpy(&bits, block + (part * kBlock * kBlock + place) * sizeof(bits), sizeof(bits));
    const uint32_t widened = static_cast<uint32_t>(bits) << 16;
    float summand;
    std::memcpy(&summand, &widened, sizeof(summand));
    value += summand;
  }
  return value;
}

float PackedRight::plain_product(const float* row, int64_t column) const {
  if (sources_.empty()) {
    float total = 0.0f;
    for (int64_t k = 0; k < depth_; ++k) total = std::fma(row[k], value_at(k, column), total);
    return total;
  }
  if (transposed_) {
    const Source& s = source_at(sources_, column);
    return kernels().dot(row, static_cast<const float*>(s.data) + column * s.ld, 1, depth_, 0.0f);
  }
  float total = 0.0f;
  for (const Source& s : sources_) {
    total = kernels().dot(row, static_cast<const float*>(s.data) + column, s.ld, s.rows, total);
    row += s.rows;
  }
  return total;
}

void multiply(const Source& left, bool transposed, const PackedRight& right, const Finish& finish,
              const FinishRows& finish_rows) {
  const int64_t rows = transposed ? left.columns : left.rows;
  const int64_t columns = right.columns(), depth = right.depth(), deep = blocks_of(depth);
  if (rows == 0 || columns == 0) return;
  const Arithmetic a = right.arithmetic();
  const Multiply product = multiply_for(a);
  const Cut c = cut(rows, columns, depth, a);
  const int64_t bytes = bytes_per_block(a), piece = blocks_per_piece(a);
  const bool may_be_plain = parts_of(a) > 1 && left.dtype == Dtype::kFloat && !transposed;
  const bool whole_rows = c.column_tasks == 1;
  for_each_range(c.row_tasks * c.column_tasks, 1, [&](int64_t begin, int64_t end) {
    const Tiles tiles(a);
    const Workspace packed(c.row_blocks * deep * bytes);
    alignas(64) float sums[kMostRowBlocks][kBlock * kBlock];
    uint8_t ordinary[kMostRowBlocks * kBlock];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / c.column_tasks * c.row_blocks;
      const int64_t last = std::min(first + c.row_blocks, blocks_of(rows));
      const int64_t first_panel = task % c.column_tasks * c.column_blocks;
      const int64_t last_panel = std::min(first_panel + c.column_blocks, blocks_of(columns));
      pack_left(left, transposed, a, first, last, depth, packed.as<char>());
      const int64_t first_row = first * kBlock, last_row = std::min(rows, last * kBlock);
      if (may_be_plain) kernels().ordinary_rows(left, first_row, last_row, ordinary);
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const int64_t column = panel * kBlock, width = std::min(kBlock, columns - column);
        for (int64_t k = 0; k < std::max<int64_t>(1, deep); k += piece) {
          for (int64_t block = first; block < last; ++block) {
            multiply_piece(a, product, packed.as<char>() + (block - first) * deep * bytes,
                           right.panel(column), k, std::min(piece, deep - k), sums[block - first]);
          }
        }
        for (int64_t block = first; block < last; ++block) {
          const int64_t row = block * kBlock, height = std::min(kBlock, rows - row);
          float* c = sums[block - first];
          for (int64_t r = 0; may_be_plain && r < height; ++r) {
            if (ordinary[row - first_row + r]) continue;
            const float* x = static_cast<const float*>(left.data) + (row + r) * left.ld;
            for (int64_t i = 0; i < width; ++i) {
              c[r * kBlock + i] = right.plain_product(x, column + i);
            }
          }
          kernels().finish_block(finish, row, column, height, width, c);
        }
      }
      if (finish_rows && whole_rows) finish_rows(first_row, last_row);
    }
  });
  if (finish_rows && !whole_rows) for_each_row_range(rows, columns, finish_rows);
}

at::Tensor with_contiguous_rows(const at::Tensor& matrix) {
  TORCH_CHECK_VALUE(matrix.dim() == 2, "expected a matrix, got ", matrix.sizes());
  const bool rows_lie_apart = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  return rows_lie_apart ? matrix : matrix.contiguous();
}

namespace {

// Blocks may not straddle two matrices: odd heights are joined first.
Stack stack_of(at::TensorList matrices, const char* op) {
  bool whole_blocks = true;
  for (size_t i = 0; i + 1 < matrices.size(); ++i) {
    whole_blocks = whole_blocks && matrices[i].size(0) % kBlock == 0;
  }
  Stack stack;
  if (whole_blocks) {
    for (const at::Tensor& m : matrices) stack.held.push_back(with_contiguous_rows(m));
  } else {
    stack.held.push_back(at::cat(matrices));
  }
  for (const at::Tensor& m : stack.held) stack.sources.push_back(source_of(m, op));
  return stack;
}

}  // namespace

PackedRight packed_weights(at::TensorList weights, at::ScalarType dtype,
                           const std::optional<at::Tensor>& packed, const char* op) {
  const Arithmetic a = arithmetic_for(dtype);
  if (weights.empty()) {
    TORCH_CHECK_VALUE(
        packed.has_value() && header_of(*packed).magic == kMagic && header_of(*packed).wanted == a,
        op,
        ": the weights were packed for another instruction set, dtype or float32 "
        "matmul precision than is in force, and the originals were dropped");
    return PackedRight(*packed);
  }
  Stack stack = stack_of(weights, op);
  if (packed.has_value()) {
    const Header header = header_of(*packed);
    if (header.magic == kMagic && header.wanted == a && header.depth == stack.sources[0].columns &&
        header.columns == total_rows(stack.sources)) {
      return PackedRight(std::move(stack), true, *packed);
    }
  }
  return PackedRight(std::move(stack), true, a);
}

void input_gradient(const Source& dy, at::TensorList weights, at::ScalarType dtype,
                    const Finish& finish, const char* op) {
  multiply(dy, false, PackedRight(stack_of(weights, op), false, arithmetic_for(dtype)), finish);
}

at::Tensor input_gradient(const Source& dy, const at::Tensor& x, at::TensorList weights,
                          const char* op, const std::optional<at::Tensor>& dresidual) {
  const at::Tensor addend = dresidual.has_value() ? dresidual->contiguous() : at::Tensor();
  at::Tensor dx = empty_from_pool(x.sizes(), addend.defined() ? addend.options() : x.options());
  Finish finish{dtype_of(dx, op), dx.mutable_data_ptr(), dx.size(1)};
  finish.addend = addend.defined() ? addend.const_data_ptr() : nullptr;
  input_gradient(dy, weights, x.scalar_type(), finish, op);
  return dx;
}

at::Tensor weight_gradient(const Source& dy, const at::Tensor& x, Gelu gelu,
                           const at::Tensor& weight, const char* op) {
  const at::Tensor input = with_contiguous_rows(x);
  Source right = source_of(input, op);
  right.gelu = gelu;
  at::Tensor dweight = empty_from_pool(weight.sizes(), weight.options());
  // A transposed left operand has no rows of its own to be served one by one.
  const Arithmetic a = ordinary_arithmetic({dy}, arithmetic_for(x.scalar_type()));
  multiply(dy, true, PackedRight({{input}, {right}}, false, a),
           {dtype_of(dweight, op), dweight.mutable_data_ptr(), dweight.size(1)});
  return dweight;
}

at::Tensor sum_columns(const Source& source) {
  return column_sums(source.rows, source.columns, 1,
                     [&](int64_t begin, int64_t end, float* sums) {
                       kernels().add_rows(source, begin, end, sums);
                     })
      .view({source.columns});
}

}  // namespace fastbert
