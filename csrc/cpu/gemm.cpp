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
// The product of blocks of which all 32 rows are wanted, or the upper 16.
Multiply multiply_of(Arithmetic, bool tall);
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
  if (packed.scalar_type() == at::kByte && packed.is_contiguous() &&
      packed.numel() >= kHeaderBytes) {
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

int64_t depth_blocks(Arithmetic a, int64_t depth) { return ceil_div(depth, depth_of_block(a)); }

int64_t size_of_units(Arithmetic a, int64_t columns) {
  return a == Arithmetic::kInt8 ? blocks_of(columns) * kBlock * sizeof(float) : 0;
}

int64_t size_of_blocks(Arithmetic a, int64_t depth, int64_t columns) {
  return depth_blocks(a, depth) * blocks_of(columns) * bytes_per_block(a);
}

int64_t size_of_packed(Arithmetic a, int64_t depth, int64_t columns) {
  return kHeaderBytes + size_of_units(a, columns) + size_of_blocks(a, depth, columns);
}

// The header, of which the products believe every number.
Header checked_header(const at::Tensor& packed, const char* op) {
  constexpr int64_t kMost = int64_t{1} << 30;  // sizes in bytes stay within 64 bits
  const Header h = header_of(packed);
  if (h.magic != kMagic) return h;
  const bool is_known = h.wanted >= Arithmetic::kFloat && h.wanted <= Arithmetic::kInt8Weights &&
                        (h.used == h.wanted || h.used == Arithmetic::kFloat);
  TORCH_CHECK_VALUE(
      is_known && h.depth >= 0 && h.columns >= 0 && h.depth <= kMost && h.columns <= kMost &&
          packed.numel() == size_of_packed(h.used, h.depth, h.columns),
      op, ": packed weights of ", h.columns, " x ", h.depth, " elements in ", packed.numel(),
      " bytes are cut short or damaged; pack the weights again (where they were dropped, load the "
      "model again)");
  return h;
}

// How a right operand is multiplied on this machine: by a left one packed for `left`. Where that is
// not its own arithmetic its blocks are expanded first, each to kExpanded of the left one's depth.
struct Products {
  Arithmetic left;
  Multiply whole, upper;  // of blocks with 32 rows, and with 16 or fewer
  bool expands;
};

constexpr int64_t kExpanded = kInt8Depth / kBlock;

Products products_with(Arithmetic right) {
  const bool expands = right == Arithmetic::kInt8Weights;
  const Arithmetic left = expands ? arithmetic_for(at::kBFloat16) : right;
  return {left, multiply_for(left), multiply_for(left, false), expands};
}

// A left operand's rows while all columns pass.
struct LeftRows {
  const Source& source;
  bool transposed;
  Arithmetic arithmetic;
  int64_t deep;        // blocks of k
  char* blocks;        // [row / 32][k / 32], k / 64 in int8
  Int8Rows* measured;  // of each row block

  // Takes the row blocks [begin, end).
  void pack(int64_t begin, int64_t end) const {
    const int64_t depth = depth_of_block(arithmetic), bytes = bytes_per_block(arithmetic);
    for (int64_t block = begin; block < end; ++block) {
      Int8Rows* of_block = measured + (block - begin);
      if (arithmetic == Arithmetic::kInt8) {
        kernels().measure_int8_rows(source, block * kBlock, of_block);
      }
      for (int64_t k = 0; k < deep; ++k) {
        pack_block(block * kBlock, k * depth, of_block,
                   blocks + ((block - begin) * deep + k) * bytes);
      }
    }
  }

 private:
  void pack_block(int64_t row, int64_t k, Int8Rows* of_block, char* to) const {
    if (arithmetic == Arithmetic::kInt8) {
      kernels().pack_int8_rows(source, row, k, of_block, to);
    } else if (transposed) {
      kernels().pack_block(source, arithmetic, Layout::kATransposed, k, row, to);
    } else {
      kernels().pack_block(source, arithmetic, Layout::kA, row, k, to);
    }
  }
};

// How rows and columns are cut into tasks: every thread gets some, and packs as little as it can.
struct Cut {
  int64_t row_blocks, column_blocks;  // of one task
  int64_t row_tasks, column_tasks;
};

Cut cut(int64_t rows, int64_t columns, int64_t depth, Arithmetic a) {
  const int64_t threads = at::get_num_threads();
  const int64_t row_blocks = blocks_of(rows), column_blocks = blocks_of(columns);
  const int64_t bytes = depth_blocks(a, depth) * bytes_per_block(a);
  const int64_t most =
      std::clamp<int64_t>(kLeftBytes / std::max<int64_t>(1, bytes), 1, kMostRowBlocks);
  // Every task reads its columns of the right operand from end to end, so rows are shared by
  // threads only where one cannot hold them anyway.
  const int64_t least_tasks = ceil_div(row_blocks, most);
  const int64_t row_tasks =
      least_tasks < threads ? least_tasks : ceil_div(least_tasks, threads) * threads;
  Cut c;
  c.row_blocks = ceil_div(row_blocks, row_tasks);
  c.row_tasks = ceil_div(row_blocks, c.row_blocks);
  // Fewer rows than that: the columns are shared.
  const int64_t wanted = c.row_tasks % threads == 0 ? 1 : ceil_div(4 * threads, c.row_tasks);
  c.column_blocks = ceil_div(column_blocks, std::min(wanted, column_blocks));
  c.column_tasks = ceil_div(column_blocks, c.column_blocks);
  return c;
}

// Blocks of depth that are multiplied at a time. The error of a sum grows with its length, so where
// it shows (fp32) a piece starts from 0 and is added up, and is short; where it does not (bf16, and
// whole numbers) the tiles take the sums up again, and a piece is what the L2 cache holds beside
// the other operand. Expanded, a piece is what the L1 cache holds, and added up.
bool takes_up_sums(const Products& p) {
  return (p.left == Arithmetic::kBFloat16 || p.left == Arithmetic::kInt8) && !p.expands;
}

int64_t blocks_per_piece(const Products& p) {
  return takes_up_sums(p) ? 96 : p.left == Arithmetic::kFloat ? 8 : 12;
}

// The same where several panels meet one block of rows: what the L1 cache holds of all of them.
// Pieces are of like length. Of panels deeper than kDeepest the sums' way to memory and back after
// each piece costs more than is gained.
constexpr int64_t kPanels = 2, kBlocksInL1 = 8, kDeepest = 64;

int64_t blocks_per_shared_piece(int64_t deep) {
  const int64_t pieces = std::max<int64_t>(1, ceil_div(deep, kBlocksInL1));
  return std::max<int64_t>(1, ceil_div(deep, pieces));
}

// The next piece of a product, of `count` blocks; the first starts the sums of a block's `rows`.
void multiply_piece(const Products& p, const char* left, const char* right, int64_t count,
                    bool first, int64_t rows, float* sums) {
  const bool upper = rows <= kBlock / 2;
  const Multiply product = upper ? p.upper : p.whole;
  if (first || takes_up_sums(p)) return product(left, right, count, sums, kBlock, !first);
  alignas(64) float piece[kBlock * kBlock];
  product(left, right, count, piece, kBlock, false);
  kernels().add_to(piece, sums, (upper ? kBlock / 2 : kBlock) * kBlock);
}

// `count` blocks of a panel from block k of the left operand's on, as they are multiplied.
const char* right_piece(const Products& p, const char* panel, int64_t k, int64_t count,
                        char* expanded) {
  const int64_t bytes = bytes_per_block(p.left);
  if (!p.expands) return panel + k * bytes;
  const int64_t bytes_of_int8 = bytes_per_block(Arithmetic::kInt8Weights);
  for (int64_t i = 0; i < count; i += kExpanded) {
    kernels().expand_int8(panel + (k + i) / kExpanded * bytes_of_int8, p.left,
                          expanded + i * bytes);
  }
  return expanded;
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

Multiply multiply_for(Arithmetic arithmetic, bool tall) {
  if (arithmetic == Arithmetic::kFloat) return kernels().multiply_float;
#if defined(FASTBERT_X86)
  if (current_isa() >= Isa::kAmx) return amx::multiply_of(arithmetic, tall);
  if (arithmetic == Arithmetic::kBFloat16) return avx512_bf16::multiply_bf16;
#endif
  return kernels().multiply_int8;
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
      blocks_(empty_from_pool({size_of_packed(arithmetic_, depth_, columns_)},
                              at::TensorOptions().dtype(at::kByte))) {
  char* bytes = reinterpret_cast<char*>(blocks_.mutable_data_ptr<uint8_t>());
  const Header header{kMagic, arithmetic, arithmetic_, depth_, columns_};
  std::memcpy(bytes, &header, sizeof(header));
  if (arithmetic_ == Arithmetic::kInt8) measure(reinterpret_cast<float*>(bytes + kHeaderBytes));
  pack(bytes + kHeaderBytes + size_of_units(arithmetic_, columns_));
}

PackedRight::PackedRight(Stack stack, bool transposed, const at::Tensor& packed)
    : held_(std::move(stack.held)),
      sources_(std::move(stack.sources)),
      transposed_(transposed),
      depth_(transposed ? sources_[0].columns : total_rows(sources_)),
      columns_(transposed ? total_rows(sources_) : sources_[0].columns),
      arithmetic_(header_of(packed).used),
      blocks_(packed) {}

PackedRight::PackedRight(const at::Tensor& packed)
    : transposed_(true),
      depth_(header_of(packed).depth),
      columns_(header_of(packed).columns),
      arithmetic_(header_of(packed).used),
      blocks_(packed) {}

const char* PackedRight::data() const {
  return reinterpret_cast<const char*>(blocks_.const_data_ptr<uint8_t>()) + kHeaderBytes;
}

// The units of int8 columns, which are rows of the sources.
void PackedRight::measure(float* units) const {
  float* next = units;
  for (const Source& s : sources_) {
    for_each_row_range(s.rows, s.columns, [&](int64_t begin, int64_t end) {
      kernels().int8_units(s, begin, end, next + begin);
    });
    next += s.rows;
  }
  std::fill(next, units + blocks_of(columns_) * kBlock, 0.0f);
}

void PackedRight::pack_block(int64_t k, int64_t column, char* block) const {
  int64_t row = transposed_ ? column : k;
  const Source& s = source_at(sources_, row);
  if (arithmetic_ == Arithmetic::kInt8) {
    return kernels().pack_int8_columns(s, row, k, units(column), block);
  }
  if (arithmetic_ == Arithmetic::kInt8Weights) {
    return kernels().pack_int8_block(s, row, k, block);
  }
  kernels().pack_block(s, arithmetic_, transposed_ ? Layout::kBTransposed : Layout::kB, row,
                       transposed_ ? k : column, block);
}

void PackedRight::pack(char* blocks) const {
  const int64_t panels = blocks_of(columns_), deep = depth_blocks(arithmetic_, depth_);
  const int64_t bytes = bytes_per_block(arithmetic_), depth = depth_of_block(arithmetic_);
  for_each_range(panels, std::max<int64_t>(1, 16 / std::max<int64_t>(1, deep)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin * deep; i < end * deep; ++i) {
                     pack_block(i % deep * depth, i / deep * kBlock, blocks + i * bytes);
                   }
                 });
}

const char* PackedRight::panel(int64_t column) const {
  return data() + size_of_units(arithmetic_, columns_) +
         column / kBlock * depth_blocks(arithmetic_, depth_) * bytes_per_block(arithmetic_);
}

const float* PackedRight::units(int64_t column) const {
  return arithmetic_ == Arithmetic::kInt8 ? reinterpret_cast<const float*>(data()) + column
                                          : nullptr;
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

namespace {

// The rows of one task, and what they meet.
struct Task {
  const Source& left;
  const PackedRight& right;
  const Finish& finish;
  const Products& products;
  const LeftRows& packed;
  const uint8_t* ordinary;  // null where every row is
  char* expanded;
  int64_t first, last, rows;  // blocks; rows of all tasks

  // Takes the panels [begin, end). One block of rows reads each panel once and at a stretch, as
  // memory delivers it fastest; several read it from the L2 cache.
  void run(int64_t begin, int64_t end) const {
    const bool shared = takes_up_sums(products) && last - first > 1 && packed.deep <= kDeepest;
    for (int64_t i = begin; i < end; i += shared ? kPanels : 1) {
      shared ? run_panels(i, std::min(i + kPanels, end)) : run_panel(i);
    }
  }

 private:
  int64_t height(int64_t block) const { return std::min(kBlock, rows - block * kBlock); }

  const char* left_piece(int64_t block, int64_t k) const {
    return packed.blocks + ((block - first) * packed.deep + k) * bytes_per_block(products.left);
  }

  // Each piece of a panel meets all blocks of rows.
  void run_panel(int64_t panel) const {
    alignas(64) float sums[kMostRowBlocks][kBlock * kBlock];
    const int64_t column = panel * kBlock, piece = blocks_per_piece(products);
    for (int64_t k = 0; k < std::max<int64_t>(1, packed.deep); k += piece) {
      const int64_t count = std::min(piece, packed.deep - k);
      const char* blocks = right_piece(products, right.panel(column), k, count, expanded);
      for (int64_t block = first; block < last; ++block) {
        multiply_piece(products, left_piece(block, k), blocks, count, k == 0, height(block),
                       sums[block - first]);
      }
    }
    for (int64_t block = first; block < last; ++block) {
      finish_block(block, column, sums[block - first]);
    }
  }

  // Each piece of a block of rows meets all of these panels.
  void run_panels(int64_t begin, int64_t end) const {
    alignas(64) float sums[kPanels][kBlock * kBlock];
    const int64_t piece = blocks_per_shared_piece(packed.deep);
    for (int64_t block = first; block < last; ++block) {
      for (int64_t k = 0; k < std::max<int64_t>(1, packed.deep); k += piece) {
        const int64_t count = std::min(piece, packed.deep - k);
        for (int64_t i = begin; i < end; ++i) {
          multiply_piece(products, left_piece(block, k),
                         right.panel(i * kBlock) + k * bytes_per_block(products.left), count,
                         k == 0, height(block), sums[i - begin]);
        }
      }
      for (int64_t i = begin; i < end; ++i) finish_block(block, i * kBlock, sums[i - begin]);
    }
  }

  void finish_block(int64_t block, int64_t column, float* c) const {
    const int64_t row = block * kBlock, height = this->height(block);
    const int64_t width = std::min(kBlock, right.columns() - column);
    if (products.left == Arithmetic::kInt8) {
      kernels().finish_int8(c, height, packed.measured + (block - first), right.panel(column),
                            right.units(column));
    }
    for (int64_t r = 0; ordinary != nullptr && r < height; ++r) {
      if (ordinary[row - first * kBlock + r]) continue;
      const float* x = static_cast<const float*>(left.data) + (row + r) * left.ld;
      for (int64_t i = 0; i < width; ++i) c[r * kBlock + i] = right.plain_product(x, column + i);
    }
    kernels().finish_block(finish, row, column, height, width, c);
  }
};

}  // namespace

void multiply(const Source& left, bool transposed, const PackedRight& right, const Finish& finish,
              const FinishRows& finish_rows) {
  const int64_t rows = transposed ? left.columns : left.rows;
  const int64_t columns = right.columns(), depth = right.depth();
  if (rows == 0 || columns == 0) return;
  const Products p = products_with(right.arithmetic());
  const Cut c = cut(rows, columns, depth, p.left);
  const int64_t bytes = bytes_per_block(p.left);
  const int64_t deep =
      p.expands ? kExpanded * depth_blocks(right.arithmetic(), depth) : depth_blocks(p.left, depth);
  const bool may_be_plain = parts_of(p.left) > 1 && left.dtype == Dtype::kFloat && !transposed;
  const bool whole_rows = c.column_tasks == 1;
  for_each_range(c.row_tasks * c.column_tasks, 1, [&](int64_t begin, int64_t end) {
    const Tiles tiles(p.left);
    const Workspace packed(c.row_blocks * deep * bytes);
    const Workspace expanded(p.expands ? blocks_per_piece(p) * bytes : 0);
    uint8_t ordinary[kMostRowBlocks * kBlock];
    Int8Rows measured[kMostRowBlocks];
    const LeftRows rows_of_task{left, transposed, p.left, deep, packed.as<char>(), measured};
    int64_t held = -1;  // the first of the row blocks that are packed
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / c.column_tasks * c.row_blocks;
      const int64_t last = std::min(first + c.row_blocks, blocks_of(rows));
      const int64_t first_panel = task % c.column_tasks * c.column_blocks;
      const int64_t last_panel = std::min(first_panel + c.column_blocks, blocks_of(columns));
      const int64_t first_row = first * kBlock, last_row = std::min(rows, last * kBlock);
      if (first != held) {
        rows_of_task.pack(first, last);
        if (may_be_plain) kernels().ordinary_rows(left, first_row, last_row, ordinary);
        held = first;
      }
      const Task work{left,
                      right,
                      finish,
                      p,
                      rows_of_task,
                      may_be_plain ? ordinary : nullptr,
                      expanded.as<char>(),
                      first,
                      last,
                      rows};
      work.run(first_panel, last_panel);
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
  const Header header = packed.has_value() ? checked_header(*packed, op) : Header{};
  const bool is_packed = header.magic == kMagic;
  if (weights.empty()) {
    TORCH_CHECK_VALUE(is_packed, op, ": got neither weights nor packed ones");
    TORCH_CHECK_VALUE(header.wanted == a || is_int8(header.wanted), op,
                      ": the weights were packed for another instruction set, dtype or float32 "
                      "matmul precision than is in force, and the originals were dropped");
    return PackedRight(*packed);
  }
  Stack stack = stack_of(weights, op);
  if (is_packed && header.wanted == a && header.depth == stack.sources[0].columns &&
      header.columns == total_rows(stack.sources)) {
    return PackedRight(std::move(stack), true, *packed);
  }
  return PackedRight(std::move(stack), true, a);
}

PackedRight quantized_weights(at::TensorList weights, bool dynamic, const char* op) {
  // Sums of more products of two numbers up to 127 can leave 32 bits.
  constexpr int64_t kMostDepth = 133144;
  for (const at::Tensor& w : weights) {
    TORCH_CHECK_VALUE(w.dim() == 2 && w.size(1) == weights[0].size(1), op,
                      ": weights must be matrices with as many columns as the first, got ",
                      w.sizes());
    TORCH_CHECK_VALUE(w.size(1) <= kMostDepth, op, ": int8 takes at most ", kMostDepth,
                      " inputs, got ", w.size(1));
  }
  return PackedRight(stack_of(weights, op), true,
                     dynamic ? Arithmetic::kInt8 : Arithmetic::kInt8Weights);
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
