// What each instruction set implements: one table of plain functions on raw pointers. The callers
// (the op files beside this one) are compiled for the baseline; the tables are filled by isa_*.cpp,
// each of which compiles every *_kernel.h for its own instruction set in a namespace of its own.
// Kernel headers use no template of the standard library: the linker would merge its copies, and a
// caller on an older machine could get the one compiled for a newer.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/philox.h"
#include "cpu/inline.h"
#include "cpu/normal_tables.h"

namespace fastbert {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// Rows whose gradients of weights are summed together before the sums are added up in order; a
// constant, so that the sums do not depend on the number of threads.
constexpr int64_t kRowsPerPart = 64;

// Dropout over rows of features; stream.threshold is 0 without dropout.
struct RowDropout {
  DropoutStream stream;
  float scale;
};

struct BiasGelu {
  Dtype dtype;
  bool erf;
  int64_t columns;
  const void* x;      // (rows, columns)
  const float* bias;  // (columns,) or null
  const void* dy;     // (rows, columns), backward only
  void* out;          // (rows, columns): y, or dx
};

// out = gelu(u) v, where (u, v) = x + bias, each `columns` wide.
struct Geglu {
  Dtype dtype;
  bool erf;
  int64_t columns;
  const void* x;      // (rows, 2 columns)
  const float* bias;  // (2 columns,) or null
  const void* dy;     // (rows, columns), backward only
  void* out;          // (rows, columns), or dx (rows, 2 columns)
};

// Queries and keys turned by their positions' angles, values copied.
struct Rotary {
  Dtype dtype;
  bool inverse;
  int64_t num_heads, half_dim;
  const void* qkv;         // (rows, 3, num_heads, 2 half_dim)
  const float *cos, *sin;  // (positions, half_dim)
  const int64_t* index;    // (rows,): of each row's position
  void* out;               // like qkv
};

// h = residual + dropout(x + linear_bias); y = (h - mean) rstd weight + bias.
struct AddLayerNorm {
  Dtype x_dtype, residual_dtype;  // y and h are of the wider one
  int64_t columns;
  float eps;
  RowDropout dropout;
  const void* x;             // (rows, columns)
  const float* linear_bias;  // (columns,) or null
  const void* residual;      // (rows, columns) or null
  const float* weight;       // (columns,)
  const float* bias;         // (columns,) or null
  void* y;                   // (rows, columns)
  void* h;                   // (rows, columns) or null
  float* mean;               // (rows,)
  float* rstd;               // (rows,)
};

// Sums over the rows of one part, (columns,) each or null.
struct ColumnSums {
  float *dweight, *dbias, *dlinear_bias;
};

struct AddLayerNormGrad {
  Dtype h_dtype, x_dtype;  // dy is of h_dtype
  int64_t columns;
  RowDropout dropout;
  const void* dy;       // (rows, columns)
  const void* dh;       // (rows, columns), of h_dtype, or null
  const void* h;        // (rows, columns)
  const float* weight;  // (columns,)
  const float* mean;    // (rows,)
  const float* rstd;    // (rows,)
  void* dx;             // (rows, columns) or null where it equals dresidual
  void* dresidual;      // (rows, columns)
};

// h = word + token_type + position; y = dropout(LayerNorm(h)).
struct EmbedLayerNorm {
  Dtype dtype;  // of the tables, h and y
  int64_t columns;
  float eps;
  RowDropout dropout;
  const int64_t* input_ids;       // (rows,) or null: words holds one row per token
  const int64_t* token_type_ids;  // (rows,)
  const int64_t* position_ids;    // (rows,)
  const void* words;              // (vocabulary, columns), or (rows, columns)
  const void* token_types;        // (types, columns)
  const void* positions;          // (positions, columns)
  const float* weight;            // (columns,)
  const float* bias;              // (columns,) or null
  void* y;                        // (rows, columns)
  void* h;                        // (rows, columns)
  float* mean;                    // (rows,)
  float* rstd;                    // (rows,)
};

struct EmbedLayerNormGrad {
  Dtype dtype;  // of dy and h
  int64_t columns;
  RowDropout dropout;
  const void* dy;       // (rows, columns)
  const void* h;        // (rows, columns)
  const float* weight;  // (columns,)
  const float* mean;    // (rows,)
  const float* rstd;    // (rows,)
  float* dh;            // (rows, columns), fp32 whatever the dtype
};

// --- matrix products ---
//
// Operands are packed in blocks of 32 x 32: rows by k on the left (A), k by columns on the right
// (B). In fp32 both are row-major. In bf16 a left block is row-major and a right block holds
// [half][k / 2][column % 16][k % 2], as tile registers and the dot product of AVX512_BF16 read it.
// A split of fp32 is 2 or 3 such blocks one after the other: x rounded to bf16, the rest rounded,
// and so on, whose products of falling weight add up to an fp32 product.
// In int8 a block is twice as deep: a left one is row-major, a right one holds
// [half][k / 4][column % 16][k % 4]. Its numbers are whole ones of a unit that each row of the left
// operand and each column of the right one has for itself. Where the right operand alone is in int8
// a block is [k][column], and each column of it has a unit, in bf16 behind the numbers.

constexpr int64_t kBlock = 32, kInt8Depth = 64;

FASTBERT_INLINE constexpr int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

// kInt8Weights: int8 on the right only, expanded for a left operand in bf16, or fp32 where the
// machine multiplies no bf16.
enum class Arithmetic { kFloat, kBFloat16, kSplit2, kSplit3, kInt8, kInt8Weights };

FASTBERT_INLINE constexpr bool is_int8(Arithmetic a) { return a >= Arithmetic::kInt8; }

FASTBERT_INLINE constexpr int parts_of(Arithmetic a) {
  return a == Arithmetic::kSplit3 ? 3 : a == Arithmetic::kSplit2 ? 2 : 1;
}

FASTBERT_INLINE constexpr int64_t depth_of_block(Arithmetic a) {
  return is_int8(a) ? kInt8Depth : kBlock;
}

FASTBERT_INLINE constexpr int64_t bytes_per_block(Arithmetic a) {
  const int64_t bytes = a == Arithmetic::kFloat ? 4 : is_int8(a) ? 1 : 2 * parts_of(a);
  return kBlock * depth_of_block(a) * bytes + (a == Arithmetic::kInt8Weights ? 2 * kBlock : 0);
}

// Where a block's rows come from: rows or columns of the source.
enum class Layout { kA, kATransposed, kB, kBTransposed };

enum class Gelu { kNone, kErf, kTanh };

// A row-major matrix, read through GELU where that is asked for.
struct Source {
  Dtype dtype;
  const void* data;
  int64_t rows, columns, ld;
  Gelu gelu = Gelu::kNone;
};

// How a row of a left operand is quantised. A few elements of BERT's hidden states are ten times
// the others (Dettmers et al. 2022, "LLM.int8()", section 4), and with them in the scale the others
// would have few digits. So the two largest magnitudes, where no third one is as large, are
// multiplied as they are, and the third is 127 units.
struct Int8Row {
  static constexpr int kOutliers = 2;
  struct Outlier {
    int32_t place;  // of its column among the block's
    float value;
  };
  float peak;
  int32_t count;
  Outlier outliers[kOutliers];
};

struct Int8Rows {
  Int8Row rows[kBlock];
  int32_t count, columns[kBlock * Int8Row::kOutliers];  // those of outliers, each once
};

// What becomes of a product: out = c + bias, or its GELU (the sum kept in preact where not null),
// or c times GELU's slope at slope_at.
struct Finish {
  Dtype dtype;  // of out, preact and slope_at, (rows, columns) with row stride ld
  void* out;
  int64_t ld;
  const float* bias = nullptr;  // (columns,)
  Gelu gelu = Gelu::kNone;
  void* preact = nullptr;
  const void* slope_at = nullptr;
  const void* addend = nullptr;  // like out; added last
};

// c (32 x 32, row stride ldc) = or += the products of `blocks` neighbouring blocks; of int8, in
// 32-bit whole numbers.
using Multiply = void (*)(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                          bool accumulate);

// --- attention ---

// Rows of heads: element (row, head, d) at data + row * ld + head * head_step + d.
struct Heads {
  const void* data;
  int64_t ld, head_step;
};

struct Attention {
  Dtype dtype;
  Arithmetic arithmetic;  // kFloat or kBFloat16
  Multiply multiply;
  int64_t num_heads, head_dim;
  float softmax_scale;
  int64_t left, right;  // keys a query sees before and after its own index
  RowDropout dropout;
  Heads q, k, v;
  Heads out;           // written in forward
  float* softmax_lse;  // (num_heads, rows of q): written in forward, or null; read in backward
  int64_t lse_ld;
  Heads dout, dq, dk, dv;  // backward only; the last three are written
};

// One head of one sequence; forward may be cut into blocks of 32 queries.
struct AttentionTask {
  int64_t sequence, head;
  int64_t first_q, num_q, first_k, num_k;
  int64_t first_block, last_block;
};

// The score of a query and a key is q·k + q·position_key + k·position_query, whose rows go by the
// distance of the two. A table is spread out to a row a distance, in blocks of kBlock distances,
// half_blocks to each side of 0: rising with the key's index for position_key, with the query's for
// position_query. Distances beyond share the row at the end of their side.
struct Positions {
  Heads rows;      // (2 kBlock half_blocks, heads)
  char* panels;    // [heads][2 half_blocks][head_dim / 32] blocks; null without this term
  char* by_depth;  // [heads][head_dim / 32][2 half_blocks] blocks, backward only
};

struct DisentangledAttention {
  Attention content;
  int64_t half_blocks;
  Positions key, query;
};

// Gradients of the tables' rows, transposed: (head_dim rounded up to 32, row stride `ld`), added
// to.
struct PositionSums {
  float *key, *query;
  int64_t ld;
};

// --- masked-LM loss ---

// What a row's logits over some columns come to: the largest, the exponentials' sum beside it, the
// sum of all, and the label's own where it is among them.
struct LogitSums {
  float peak, exponentials, all, label;
};

struct CrossEntropy {
  Dtype dtype;           // of the logits, which are rounded to it
  const float* bias;     // (vocabulary,) or null
  const int64_t* label;  // (rows,), -1 where there is none
};

struct CrossEntropyGrad {
  CrossEntropy of;
  const float* lse;     // (rows,)
  const float* factor;  // (rows,): of the softmax
  const float* hit;     // (rows,): added at the label
  const float* every;   // (rows,): added to every logit
};

// --- losses of a masked-LM student ---

// What a row's logits over some columns come to, the student's z and the teacher's t, at
// temperature T.
struct DistillationSums {
  float peak, exponentials, soft, label;    // the largest z; sums of exp(z - peak) and of
                                            // exp((z - peak) / T); the label's own z
  float teacher_peak, teacher_soft, apart;  // the largest t; sums of p = exp((t - peak) / T) and
                                            // of p (t - z)
};

struct Distillation {
  CrossEntropy student, teacher;  // the teacher without labels
  float cold;                     // 1 / T
};

struct DistillationGrad {
  Distillation of;
  const float *lse, *soft_lse, *teacher_lse;  // (rows,): of z, z / T and t / T
  const float *dloss, *factor;                // (rows,): of the losses, the soft one's times T
};

struct Kernels {
  // y[i] = f(x[i]), for the tests of their bounds.
  void (*exp)(const float* x, int64_t n, float* y);
  void (*erf)(const float* x, int64_t n, float* y);

  void (*convert)(Dtype from, const void* x, Dtype to, void* y, int64_t n);
  void (*add_to)(const float* x, float* sum, int64_t n);

  // Bit i of bits (32 a word) says whether element i is kept; whole words are written.
  void (*row_keep_bits)(const DropoutStream&, int64_t row, int64_t columns, uint32_t* bits);
  // The same for 16 rows of the scores of one sequence and head from row `row`, a multiple of 16,
  // and columns [first, first + columns), `first` a multiple of 16; row r's words start at
  // bits + r * words_per_row.
  void (*score_keep_bits)(const DropoutStream&, uint32_t sequence_head, int64_t row, int64_t first,
                          int64_t columns, int64_t words_per_row, uint32_t* bits);
  void (*expand_bits)(const uint32_t* bits, int64_t n, bool* kept);

  // Rows [begin, end).
  void (*bias_gelu_fwd)(const BiasGelu&, int64_t begin, int64_t end);
  void (*bias_gelu_bwd)(const BiasGelu&, int64_t begin, int64_t end, float* dbias);
  void (*geglu_fwd)(const Geglu&, int64_t begin, int64_t end);
  void (*geglu_bwd)(const Geglu&, int64_t begin, int64_t end, float* dbias);
  void (*rotary)(const Rotary&, int64_t begin, int64_t end);
  void (*add_layer_norm_fwd)(const AddLayerNorm&, int64_t begin, int64_t end);
  void (*add_layer_norm_bwd)(const AddLayerNormGrad&, int64_t begin, int64_t end,
                             const ColumnSums&);
  void (*embed_layer_norm_fwd)(const EmbedLayerNorm&, int64_t begin, int64_t end);
  void (*embed_layer_norm_bwd)(const EmbedLayerNormGrad&, int64_t begin, int64_t end,
                               const ColumnSums&);

  // The block at (row, column) of a source, whose rows and columns beyond the source are 0.
  void (*pack_block)(const Source&, Arithmetic, Layout, int64_t row, int64_t column, void* out);
  Multiply multiply_float;
  void (*finish_block)(const Finish&, int64_t row, int64_t column, int64_t rows, int64_t columns,
                       const float* c);
  void (*ordinary_rows)(const Source&, int64_t begin, int64_t end, uint8_t* ordinary);
  float (*dot)(const float* a, const float* b, int64_t step, int64_t n, float start);
  void (*add_rows)(const Source&, int64_t begin, int64_t end, float* sums);

  void (*measure_int8_rows)(const Source&, int64_t row, Int8Rows* measured);
  // The left block at (row, column), one after the other of a row; notes the outliers.
  void (*pack_int8_rows)(const Source&, int64_t row, int64_t column, Int8Rows* measured, void* out);
  // The units of rows [begin, end), which become columns of a right operand.
  void (*int8_units)(const Source&, int64_t begin, int64_t end, float* units);
  // The right block of rows from (row, column) on, by those units or by units of its own.
  void (*pack_int8_columns)(const Source&, int64_t row, int64_t column, const float* units,
                            void* out);
  void (*pack_int8_block)(const Source&, int64_t row, int64_t column, void* out);
  // Such a block as two in fp32 or bf16.
  void (*expand_int8)(const void* block, Arithmetic, void* out);
  Multiply multiply_int8;
  // From whole numbers to fp32: a block's first rows times a panel, whose columns' units are given.
  void (*finish_int8)(float* c, int64_t rows, const Int8Rows* measured, const void* panel,
                      const float* units);

  // Logits (rows, ld) of columns [column, column + columns); rows count from the tensors' first.
  void (*sum_logits)(const CrossEntropy&, int64_t row, int64_t rows, int64_t column,
                     int64_t columns, float* logits, int64_t ld, LogitSums* sums);
  // Their gradients in their place; adds up columns in dbias.
  void (*logit_gradients)(const CrossEntropyGrad&, int64_t row, int64_t rows, int64_t column,
                          int64_t columns, float* logits, int64_t ld, float* dbias);
  // The same for both losses of a student; the teacher's logits lie as the student's do.
  void (*sum_distillation)(const Distillation&, int64_t row, int64_t rows, int64_t column,
                           int64_t columns, float* logits, float* teacher_logits, int64_t ld,
                           DistillationSums* sums);
  void (*distillation_gradients)(const DistillationGrad&, int64_t row, int64_t rows, int64_t column,
                                 int64_t columns, float* logits, float* teacher_logits, int64_t ld,
                                 float* dbias);

  // Bytes of scratch for a task, and what uses them.
  int64_t (*attention_scratch)(const Attention&, const AttentionTask&, bool backward);
  void (*attention_fwd)(const Attention&, const AttentionTask&, char* scratch);
  void (*attention_bwd)(const Attention&, const AttentionTask&, char* scratch);

  // Fills the blocks of a head's tables, by depth too for backward.
  void (*pack_positions)(const DisentangledAttention&, int64_t head, bool backward);
  int64_t (*disentangled_attention_scratch)(const DisentangledAttention&, const AttentionTask&,
                                            bool backward);
  void (*disentangled_attention_fwd)(const DisentangledAttention&, const AttentionTask&,
                                     char* scratch);
  void (*disentangled_attention_bwd)(const DisentangledAttention&, const AttentionTask&,
                                     const PositionSums&, char* scratch);
};

// The table in force: the best this machine runs, or the one chosen by the op `cpu_isa`.
const Kernels& kernels();

}  // namespace fastbert
