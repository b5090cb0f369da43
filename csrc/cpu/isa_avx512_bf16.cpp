// The kernels for AVX-512 with the bf16 and int8 instructions (Cooper Lake, Zen 4 and later).
#include "cpu/inline.h"
#include "cpu/kernels.h"

#if defined(FASTBERT_X86)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
#define FASTBERT_AVX512 1
#define FASTBERT_AVX512_BF16 1
#define ISA avx512_bf16
namespace fastbert {
namespace ISA {
#include "cpu/vec_avx512.h"
}  // namespace ISA
}  // namespace fastbert
#include "cpu/table.h"
#endif
