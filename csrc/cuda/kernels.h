// The interface of the CUDA kernels: one launcher for each, raw pointers and a stream in. Compiled
// by nvcc and by C++ compilers; the emulated build has the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

#if defined(FASTBERT_CUDA_ON_CPU)
namespace fastbert {
using Stream = void*;
}
#else
#include <cuda_runtime_api.h>
namespace fastbert {
using Stream = cudaStream_t;
}
#endif

namespace fastbert {

struct ConstVector {
  const void* data;  // (columns,), null where there is none
  Dtype dtype;
};

struct Vector {
  void* data;  // (columns,), null where none is wanted
  Dtype dtype;
};

// The dropout of rows (docs/dropout.md); nothing is dropped, or read, with a threshold of 0.
struct Dropout {
  const int64_t* rng_state;  // (2,), on the device
  uint32_t site;
  uint32_t threshold;
  float scale;
};

// Gradients of vectors are sums over rows, in two stages and in one order for every run and every
// GPU: parts of consecutive rows, in fp32 (parts, columns), then the parts. No atomics.
struct Parts {
  int64_t rows;   // of one part
  int64_t count;  // the last may have fewer rows
};

inline Parts parts_of(int64_t rows, int64_t step, int64_t most) {
  const auto ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t part_rows = step * ceil(rows > 0 ? rows : 1, step * most);
  return {part_rows, ceil(rows, part_rows)};
}

// Vector v of `vectors` is the sum over the parts of partial[v], (parts, columns); 0 without parts.
struct SumParts {
  const float* partial;  // (vectors, parts, columns)
  int64_t parts, columns;
  int vectors;
  Vector out[3];
};
void launch_sum_parts(const SumParts& a, Stream stream);

// --- bias_gelu: letters R rows, F columns ---

struct BiasGelu {
  Dtype dtype;  // of x, dy and what is written
  bool erf;     // exact, else by tanh
  bool wide;    // rows are whole chunks of eight columns on 16-byte boundaries
  int64_t rows, columns;
  const void* x;     // (R, F)
  ConstVector bias;  // (F,)
  void* out;         // (R, F): y, or dx
  const void* dy;    // (R, F), in backward
  float* partial;    // (parts, F), in backward; null where no bias gradient is wanted
  Parts parts;       // in backward
};
constexpr int64_t kBiasGeluMostParts = 512;
void launch_bias_gelu_fwd(const BiasGelu& a, Stream stream);
void launch_bias_gelu_bwd(const BiasGelu& a, Stream stream);

// --- geglu: letters T rows, F columns of y ---

struct Geglu {
  Dtype dtype;  // of x, dy and what is written
  bool erf;     // exact, else by tanh
  bool wide;    // rows are whole chunks of eight columns on 16-byte boundaries
  int64_t rows, columns;
  const void* x;     // (T, 2 F)
  ConstVector bias;  // (2 F,)
  void* out;         // (T, F): y, or dx (T, 2 F)
  const void* dy;    // (T, F), in backward
  float* partial;    // (2, parts, F), in backward; null where no bias gradient is wanted
  Parts parts;       // in backward
};
constexpr int64_t kGegluMostParts = 512;
void launch_geglu_fwd(const Geglu& a, Stream stream);
void launch_geglu_bwd(const Geglu& a, Stream stream);

// --- rotary: letters T rows, N heads, D head dim, P rows of the tables ---

struct Rotary {
  Dtype dtype;
  bool wide;  // half heads are whole chunks of eight on 16-byte boundaries
  bool inverse;
  int64_t rows, positions;
  int num_heads, half_dim;
  const void* qkv;         // (T, 3, N, D)
  const float *cos, *sin;  // (P, D / 2)
  const int64_t* index;    // (T,): outside of [0, P) a row becomes NaN
  void* out;               // (T, 3, N, D)
};
void launch_rotary(const Rotary& a, Stream stream);

// --- add_layer_norm: letters T rows, C columns ---

constexpr int64_t kMaxColumns = 8192;  // of a row that a block's threads hold
constexpr int64_t kLayerNormMostParts = 512;
constexpr int64_t kLayerNormPartStep = 4;  // rows a block has in hand

struct AddLayerNorm {
  Dtype x_dtype, sum_dtype, y_dtype;
  bool wide;
  int64_t rows, columns;
  float eps;
  Dropout dropout;
  const void* x;            // x_dtype (T, C)
  ConstVector linear_bias;  // (C,)
  const void* residual;     // sum_dtype (T, C), or null
  ConstVector weight, bias;
  void* y;             // y_dtype (T, C)
  void* h;             // sum_dtype (T, C), or null
  float *mean, *rstd;  // (T,)
};
void launch_add_layer_norm_fwd(const AddLayerNorm& a, Stream stream);

struct AddLayerNormGrad {
  Dtype x_dtype, sum_dtype, y_dtype;
  bool wide;
  int64_t rows, columns;
  Dropout dropout;
  const void* dy;  // y_dtype (T, C)
  const void* dh;  // sum_dtype (T, C), or null
  const void* h;   // sum_dtype (T, C)
  ConstVector weight;
  const float *mean, *rstd;  // (T,)
  void* dx;                  // x_dtype (T, C), or null
  void* dresidual;           // sum_dtype (T, C)
  float* partial;            // (3, parts, C): of weight, bias and, where wanted, linear_bias
  bool has_linear_bias;
  Parts parts;
};
void launch_add_layer_norm_bwd(const AddLayerNormGrad& a, Stream stream);

// --- embed_layer_norm: letters T rows, C columns, V rows of a table ---

struct Ids {
  const void* data;  // (T,), int64 or int32
  bool is_int64;
};

struct Table {
  const void* data;  // (V, C)
  int64_t rows;
};

struct EmbedLayerNorm {
  Dtype dtype, y_dtype;  // of the tables and h; of y
  bool wide;
  int64_t rows, columns;
  float eps;
  Dropout dropout;
  Ids ids[3];       // words, token types, positions; no data for words that are given as rows
  Table tables[3];  // words may be (T, C), a row of their own each
  ConstVector weight, bias;
  int64_t* flag;       // set where an id lies outside its table; null where they have been checked
  void *y, *h;         // (T, C)
  float *mean, *rstd;  // (T,)
};
void launch_embed_layer_norm_fwd(const EmbedLayerNorm& a, Stream stream);

struct EmbedLayerNormGrad {
  Dtype dtype, y_dtype;
  bool wide;
  int64_t rows, columns;
  Dropout dropout;
  const void *dy, *h;  // (T, C)
  ConstVector weight;
  const float *mean, *rstd;  // (T,)
  void* dh;                  // dtype (T, C)
  float* wide_dh;            // (T, C), the same unrounded; null where dh itself is fp32
  float* partial;            // (2, parts, C): of weight and bias
  Parts parts;
};
void launch_embed_layer_norm_bwd(const EmbedLayerNormGrad& a, Stream stream);

// The gradient of a table: rows of dh summed by id, in the order of the rows.
struct TableGradient {
  bool wide;
  int64_t rows, columns;
  const float* dh;            // (T, C)
  const int64_t* sorted_ids;  // (T,), rising
  const int64_t* order;       // (T,), the rows they come from
  int64_t skipped;            // id without a gradient, or -1
  Vector table;               // (V, C), zeros
};
void launch_table_gradient(const TableGradient& a, Stream stream);

// The same of a table of a few rows, as parts to be summed.
constexpr int64_t kFewRows = 8;
struct SmallTableGradient {
  bool wide;
  int64_t rows, columns, table_rows;
  const float* dh;  // (T, C)
  Ids ids;
  int64_t skipped;
  float* partial;  // (parts, V, C)
  Parts parts;
};
void launch_small_table_gradient(const SmallTableGradient& a, Stream stream);

// --- mlm_cross_entropy: letters P rows, V vocabulary ---

constexpr int64_t kLogitsMostParts = 64;
struct CrossEntropy {
  Dtype dtype;
  int64_t rows, vocabulary;
  int64_t stride;         // elements from row to row, a multiple of eight
  void* logits;           // (P, V), on 16-byte boundaries; backward puts their gradient there
  const int64_t* labels;  // (P,)
  int64_t ignore_index;
  float label_smoothing, z_loss;
  float *loss, *lse;         // (P,), written by forward
  const float* forward_lse;  // (P,), in backward
  int64_t* flag;             // in forward: set where a label lies outside the vocabulary, or null
  const float* dloss;        // (P,), in backward
  float* partial;            // (parts, V), in backward: sums of the gradient over rows, or null
  Parts parts;               // in backward
};
void launch_cross_entropy_fwd(const CrossEntropy& a, Stream stream);
void launch_cross_entropy_bwd(const CrossEntropy& a, Stream stream);

struct Distillation {
  Dtype dtype;  // of both models' logits
  int64_t rows, vocabulary;
  int64_t stride;              // elements from row to row, a multiple of eight
  void* logits;                // (P, V), on 16-byte boundaries; backward puts their gradient there
  const void* teacher_logits;  // the same of the teacher
  const int64_t* labels;       // (P,)
  int64_t ignore_index;
  float temperature;
  float *loss, *soft_loss;              // (P,), written by forward
  float *lse, *soft_lse, *teacher_lse;  // (P,), written by forward and read by backward
  int64_t* flag;                        // in forward: as above
  const float *dloss, *dsoft_loss;      // (P,), in backward
  float* partial;                       // (parts, V), in backward: as above
  Parts parts;                          // in backward
};
void launch_distillation_fwd(const Distillation& a, Stream stream);
void launch_distillation_bwd(const Distillation& a, Stream stream);

// --- attention: letters Tq query rows, Tk key rows, N heads, D head dim, B sequences ---

constexpr int kMaxHeadDim = 128;
constexpr int kNoBound = 1 << 30;  // of a window

// One of the (rows, N, D) tensors, whose last dim is contiguous.
struct Heads {
  void* data;
  int64_t row_step, head_step;  // in elements
};

struct Attention {
  Dtype dtype;
  bool wide;  // rows of all tensors are whole 16-byte pieces on 16-byte boundaries
  int64_t rows_q, rows_k;
  int heads, head_dim, sequences;
  float softmax_scale;
  int left, right;  // how far a query sees, kNoBound for everything
  Dropout dropout;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // (B + 1,)
  Heads q, k, v;                               // read
  Heads out;                                   // (Tq, N, D), written by forward, read by backward
  float* lse;                                  // (N, Tq), written by forward, read by backward
  Heads dout;                                  // read by backward
  Heads dq, dk, dv;                            // written by backward
  float* delta;  // (N, Tq), between the kernels of backward: row sums of out * dout
};
void launch_attention_fwd(const Attention& a, Stream stream);
void launch_attention_bwd(const Attention& a, Stream stream);

// --- disentangled_attention: letters as attention's, T rows of queries and of keys, R rows of a
// position table, M half the width of the bucket table ---

struct DisentangledAttention {
  Attention content;                   // queries and keys share their rows; no window
  Heads position_key, position_query;  // (R, N, D); no data without that term
  const int32_t* buckets;  // (2 M + 1,), rising: rows of the tables for distances from -M to M
  int reach;               // M
};
void launch_disentangled_attention_fwd(const DisentangledAttention& p, Stream stream);
void launch_disentangled_attention_bwd(const DisentangledAttention& p, Stream stream);

// The gradient of one of the tables, after backward has left delta: sums over the pairs of rows at
// each distance, for pieces of sixteen rows on each diagonal and some of the sequences, then over
// the distances of each bucket.
struct PositionSums {
  bool of_position_key;
  int64_t parts, diagonals;  // 2 ceil(longest sequence / 16) - 1
  float* sums;               // (parts, diagonals, 32, N, D)
  int64_t table_rows;
  void* gradient;  // (R, N, D)
};
void launch_position_gradient(const DisentangledAttention& p, const PositionSums& sums,
                              Stream stream);

// --- unpad: letters R rows of the longer tensor, T rows ---

struct MoveRows {
  bool scatter;  // from T rows to R, else from R to T
  int64_t rows, longer_rows;
  int64_t row_bytes;
  int word_bytes;          // 1, 2, 4, 8 or 16; row_bytes and the addresses are multiples of it
  const int64_t* indices;  // (T,), unique, rows of the longer tensor
  const void* from;
  void* to;
};
void launch_move_rows(const MoveRows& a, Stream stream);

// --- philox: letters T rows, C columns; b sequences, N heads, Sq queries, Sk keys ---

struct RowKeepMask {
  Dropout dropout;
  bool wide;  // rows are whole runs of sixteen
  int64_t rows, columns;
  bool* mask;  // (T, C)
};
void launch_row_keep_mask(const RowKeepMask& a, Stream stream);

struct ScoreKeepMask {
  Dropout dropout;
  bool wide;
  int64_t count, heads, queries, keys;
  const int64_t* sequences;  // (b,), places in cu_seqlens
  bool* mask;                // (b, N, Sq, Sk)
};
void launch_score_keep_mask(const ScoreKeepMask& a, Stream stream);

}  // namespace fastbert
