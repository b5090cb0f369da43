// The kernels for AVX2 with FMA and F16C (Haswell, Zen and later).
#include "cpu/inline.h"
#include "cpu/kernels.h"

#if defined(FASTBERT_X86)
#include <immintrin.h>

#pragma GCC target("avx2,fma,f16c")
#define FASTBERT_AVX2 1
#define ISA avx2
namespace fastbert {
namespace ISA {
#include "cpu/vec_avx2.h"
}  // namespace ISA
}  // namespace fastbert
#include "cpu/table.h"
#endif
