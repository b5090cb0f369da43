// The bf16 microkernel and the split fp32 ones in AMX tiles (Sapphire Rapids and later): a block is
// two tiles of each operand and four of sums, all eight tile registers.
#include "cpu/inline.h"
#include "cpu/kernels.h"

#if defined(FASTBERT_X86)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16")

namespace fastbert {
namespace amx {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void configure_tiles() {
  static const TileConfig config;
  _tile_loadconfig(&config);
}

void release_tiles() { _tile_release(); }

FASTBERT_INLINE void load_sums(const float* c, int64_t ldc, bool accumulate) {
  if (accumulate) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16, ldc * 4);
    _tile_loadd(2, c + 16 * ldc, ldc * 4);
    _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}

FASTBERT_INLINE void store_sums(float* c, int64_t ldc) {
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16, ldc * 4);
  _tile_stored(2, c + 16 * ldc, ldc * 4);
  _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
}

FASTBERT_INLINE void load_left(const char* a) {
  _tile_loadd(4, a, 64);
  _tile_loadd(5, a + 1024, 64);
}

FASTBERT_INLINE void load_right(const char* b) {
  _tile_loadd(6, b, 64);
  _tile_loadd(7, b + 1024, 64);
}

FASTBERT_INLINE void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

void multiply_bf16(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                   bool accumulate) {
  load_sums(c, ldc, accumulate);
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  for (int64_t block = 0; block < blocks; ++block) {
    load_left(left + block * 2048);
    load_right(right + block * 2048);
    add_products();
  }
  store_sums(c, ldc);
}

// high·low + low·high + high·high
void multiply_split2(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                     bool accumulate) {
  load_sums(c, ldc, accumulate);
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  for (int64_t block = 0; block < blocks; ++block, left += 4096, right += 4096) {
    load_left(left);
    load_right(right + 2048);
    add_products();
    load_right(right);
    add_products();
    load_left(left + 2048);
    add_products();
  }
  store_sums(c, ldc);
}

// The six products above 2^-24 of the largest, in an order that loads one operand at a time.
void multiply_split3(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                     bool accumulate) {
  load_sums(c, ldc, accumulate);
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  for (int64_t block = 0; block < blocks; ++block, left += 6144, right += 6144) {
    load_left(left);
    load_right(right + 4096);
    add_products();
    load_right(right + 2048);
    add_products();
    load_left(left + 2048);
    add_products();
    load_right(right);
    add_products();
    load_left(left + 4096);
    add_products();
    load_left(left);
    add_products();
  }
  store_sums(c, ldc);
}

}  // namespace amx
}  // namespace fastbert
#endif
