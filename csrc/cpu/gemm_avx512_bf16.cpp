// The bf16 microkernel by the dot products of AVX512_BF16 (Cooper Lake, Zen 4 and later).
#include "cpu/inline.h"
#include "cpu/kernels.h"

#if defined(FASTBERT_X86)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")

namespace fastbert {
namespace avx512_bf16 {

constexpr int kRows = 8;

void multiply_bf16(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                   bool accumulate) {
  for (int row = 0; row < kBlock; row += kRows) {
    __m512 sums[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      const float* from = c + (row + r) * ldc;
      sums[r][0] = accumulate ? _mm512_loadu_ps(from) : _mm512_setzero_ps();
      sums[r][1] = accumulate ? _mm512_loadu_ps(from + 16) : _mm512_setzero_ps();
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const auto* x = static_cast<const uint32_t*>(a) + block * 512 + row * 16;
      const auto* w = static_cast<const uint32_t*>(b) + block * 512;
      for (int pair = 0; pair < 16; ++pair) {
        const auto left = (__m512bh)_mm512_loadu_si512(w + pair * 16);
        const auto right = (__m512bh)_mm512_loadu_si512(w + 256 + pair * 16);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const auto factor = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r * 16 + pair]));
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], factor, left);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], factor, right);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(c + (row + r) * ldc, sums[r][0]);
      _mm512_storeu_ps(c + (row + r) * ldc + 16, sums[r][1]);
    }
  }
}

}  // namespace avx512_bf16
}  // namespace fastbert
#endif
