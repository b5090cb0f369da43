// The bf16, split fp32 and int8 microkernels in AMX tiles (Sapphire Rapids and later): a block is
// two tiles of each operand and four of sums, all eight tile registers.
#include "cpu/inline.h"
#include "cpu/kernels.h"

#if defined(FASTBERT_X86)
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,amx-tile,amx-bf16,amx-int8")

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

// Of blocks with kTall all 32 rows are wanted, else the upper 16: half of the products.
template <bool kTall>
FASTBERT_INLINE void load_sums(const float* c, int64_t ldc, bool accumulate) {
  if (accumulate) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16, ldc * 4);
    if constexpr (kTall) {
      _tile_loadd(2, c + 16 * ldc, ldc * 4);
      _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTall) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
}

template <bool kTall>
FASTBERT_INLINE void store_sums(float* c, int64_t ldc) {
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16, ldc * 4);
  if constexpr (kTall) {
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
  }
}

template <bool kTall>
FASTBERT_INLINE void load_left(const char* a) {
  _tile_loadd(4, a, 64);
  if constexpr (kTall) _tile_loadd(5, a + 1024, 64);
}

FASTBERT_INLINE void load_right(const char* b) {
  _tile_loadd(6, b, 64);
  _tile_loadd(7, b + 1024, 64);
}

// Asks for lines of the next block while this one's tiles are multiplied. Where the core's other
// thread uses the tiles too, tile loads wait for the products before them and cannot hide the L2
// cache's latency themselves. Beyond an operand's end this asks for what is never read.
FASTBERT_INLINE void prefetch_tile(const char* next) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; ++line) _mm_prefetch(next + line * 64, _MM_HINT_T0);
}

// The products of the loaded tiles, with `kTiles` tiles of the next block prefetched.
template <bool kTall, int kTiles>
FASTBERT_INLINE void add_products(const char* next) {
  if constexpr (kTiles > 0) prefetch_tile(next);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kTiles > 1) prefetch_tile(next + 1024);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTiles > 2) prefetch_tile(next + 2048);
  if constexpr (kTall) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// The same in int8.
template <bool kTall>
FASTBERT_INLINE void add_int8_products(const char* next) {
  prefetch_tile(next);
  _tile_dpbssd(0, 4, 6);
  prefetch_tile(next + 1024);
  _tile_dpbssd(1, 4, 7);
  if constexpr (kTall) {
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

constexpr int kPart = 2048;  // bytes of a block in bf16, and of one in int8

// Blocks whose products are one tile product for each pair of tiles.
template <bool kTall, typename AddProducts>
FASTBERT_INLINE void multiply_single(const void* a, const void* b, int64_t blocks, float* c,
                                     int64_t ldc, bool accumulate,
                                     const AddProducts& add_products) {
  load_sums<kTall>(c, ldc, accumulate);
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  for (int64_t block = 0; block < blocks; ++block, left += kPart, right += kPart) {
    load_left<kTall>(left);
    load_right(right);
    prefetch_tile(left + kPart);
    if constexpr (kTall) prefetch_tile(left + kPart + 1024);
    add_products(right + kPart);
  }
  store_sums<kTall>(c, ldc);
}

template <bool kTall>
void multiply_bf16(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                   bool accumulate) {
  multiply_single<kTall>(a, b, blocks, c, ldc, accumulate, add_products<kTall, 2>);
}

template <bool kTall>
void multiply_int8(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                   bool accumulate) {
  multiply_single<kTall>(a, b, blocks, c, ldc, accumulate, add_int8_products<kTall>);
}

// high·low + low·high + high·high
template <bool kTall>
void multiply_split2(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                     bool accumulate) {
  load_sums<kTall>(c, ldc, accumulate);
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  constexpr int kBytes = 2 * kPart;
  for (int64_t block = 0; block < blocks; ++block, left += kBytes, right += kBytes) {
    const char *next_left = left + kBytes, *next_right = right + kBytes;
    load_left<kTall>(left);
    load_right(right + kPart);
    add_products<kTall, 3>(next_left);
    load_right(right);
    add_products<kTall, 3>(next_right);
    load_left<kTall>(left + kPart);
    prefetch_tile(next_left + 3072);
    add_products<kTall, 1>(next_right + 3072);
  }
  store_sums<kTall>(c, ldc);
}

// The six products above 2^-24 of the largest, in an order that loads one operand at a time.
template <bool kTall>
void multiply_split3(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                     bool accumulate) {
  load_sums<kTall>(c, ldc, accumulate);
  const char *left = static_cast<const char*>(a), *right = static_cast<const char*>(b);
  constexpr int kBytes = 3 * kPart;
  for (int64_t block = 0; block < blocks; ++block, left += kBytes, right += kBytes) {
    const char *next_left = left + kBytes, *next_right = right + kBytes;
    load_left<kTall>(left);
    load_right(right + 2 * kPart);
    add_products<kTall, 2>(next_left);
    load_right(right + kPart);
    add_products<kTall, 2>(next_left + kPart);
    load_left<kTall>(left + kPart);
    add_products<kTall, 2>(next_left + 2 * kPart);
    load_right(right);
    add_products<kTall, 2>(next_right);
    load_left<kTall>(left + 2 * kPart);
    add_products<kTall, 2>(next_right + kPart);
    load_left<kTall>(left);
    add_products<kTall, 2>(next_right + 2 * kPart);
  }
  store_sums<kTall>(c, ldc);
}

Multiply multiply_of(Arithmetic arithmetic, bool tall) {
  switch (arithmetic) {
    case Arithmetic::kSplit2:
      return tall ? multiply_split2<true> : multiply_split2<false>;
    case Arithmetic::kSplit3:
      return tall ? multiply_split3<true> : multiply_split3<false>;
    case Arithmetic::kInt8:
      return tall ? multiply_int8<true> : multiply_int8<false>;
    default:
      return tall ? multiply_bf16<true> : multiply_bf16<false>;
  }
}

}  // namespace amx
}  // namespace fastbert
#endif
