// Everything an instruction set compiles, and its table. Included once by each isa_*.cpp, after
// ISA is defined and its vectors are declared.

namespace fastbert {
namespace ISA {

// body(T{}) with the type behind a dtype.
template <typename Body>
FASTBERT_INLINE void with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat:
      return body(float{});
    case Dtype::kBFloat16:
      return body(bfloat16{});
    case Dtype::kHalf:
      return body(float16{});
  }
}

template <typename T>
constexpr bool is_bfloat16 = false;
template <>
constexpr bool is_bfloat16<bfloat16> = true;

// Each of these needs those before it.
// clang-format off
#include "cpu/math.h"
#include "cpu/philox_kernel.h"
#include "cpu/bias_gelu_kernel.h"
#include "cpu/geglu_kernel.h"
#include "cpu/rotary_kernel.h"
#include "cpu/layer_norm_kernel.h"
// clang-format on

void convert(Dtype from, const void* x, Dtype to, void* y, int64_t n) {
  with_dtype(from, [&](auto from_zero) {
    with_dtype(to, [&](auto to_zero) {
      const auto* in = static_cast<const decltype(from_zero)*>(x);
      auto* out = static_cast<decltype(to_zero)*>(y);
      for_each_pack(n, [&](int64_t i, auto part) { part.store(out + i, part.load(in + i)); });
    });
  });
}

void add_to(const float* x, float* sum, int64_t n) {
  for_each_pack(
      n, [&](int64_t i, auto part) { part.store(sum + i, part.load(sum + i) + part.load(x + i)); });
}

// clang-format off
#include "cpu/gemm_kernel.h"
#include "cpu/int8_kernel.h"
#include "cpu/attention_kernel.h"
#include "cpu/disentangled_attention_kernel.h"
#include "cpu/cross_entropy_kernel.h"
#include "cpu/distillation_kernel.h"
// clang-format on

void exp_array(const float* x, int64_t n, float* y) {
  for_each_pack(n, [&](int64_t i, auto part) { part.store(y + i, exp(part.load(x + i))); });
}

void erf_array(const float* x, int64_t n, float* y) {
  for_each_pack(n, [&](int64_t i, auto part) { part.store(y + i, erf(part.load(x + i))); });
}

void row_keep_bits_of(const DropoutStream& s, int64_t row, int64_t columns, uint32_t* bits) {
  row_keep_bits(s, row, columns, bits);
}

void score_keep_bits_of(const DropoutStream& s, uint32_t sequence_head, int64_t row, int64_t first,
                        int64_t columns, int64_t words_per_row, uint32_t* bits) {
  score_keep_bits(s, sequence_head, row, first, columns, words_per_row, bits);
}

void expand_bits_of(const uint32_t* bits, int64_t n, bool* kept) { expand_bits(bits, n, kept); }

extern const Kernels kTable;
const Kernels kTable = {
    exp_array,
    erf_array,
    convert,
    add_to,
    row_keep_bits_of,
    score_keep_bits_of,
    expand_bits_of,
    bias_gelu_fwd,
    bias_gelu_bwd,
    geglu_fwd,
    geglu_bwd,
    rotary,
    add_layer_norm_fwd,
    add_layer_norm_bwd,
    embed_layer_norm_fwd,
    embed_layer_norm_bwd,
    pack_block,
    multiply_float,
    finish_block,
    ordinary_rows,
    dot,
    add_rows,
    measure_int8_rows,
    pack_int8_rows,
    int8_units,
    pack_int8_columns,
    pack_int8_block,
    expand_int8,
    multiply_int8,
    finish_int8,
    sum_logits,
    logit_gradients,
    sum_distillation,
    distillation_gradients,
    attention_scratch,
    attention_fwd,
    attention_bwd,
    pack_positions,
    disentangled_attention_scratch,
    disentangled_attention_fwd,
    disentangled_attention_bwd,
};

}  // namespace ISA
}  // namespace fastbert
