// The dropout stream of docs/dropout.md: Philox4x32-7 (Salmon et al. 2011), sixteen bits an
// element, for host and device. This is the one C++ definition; no kernel computes bits otherwise.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTBERT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTBERT_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fastbert {

constexpr uint32_t kKeepNone = 65536;

// What one launch shares: the key, the two constant counter words and the threshold.
struct DropoutStream {
  uint32_t key_low, key_high;
  uint32_t site, offset;
  uint32_t threshold;  // keep if bits >= threshold
};

struct PhiloxWords {
  uint32_t word[4];
};

FASTBERT_HOST_DEVICE DropoutStream dropout_stream(int64_t seed, int64_t offset, uint32_t site,
                                                  uint32_t threshold) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), site,
          static_cast<uint32_t>(static_cast<uint64_t>(offset)), threshold};
}

FASTBERT_HOST_DEVICE PhiloxWords philox4x32_7(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                              uint32_t k0, uint32_t k1) {
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 7
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t next0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Rows of features: element (row, column) is element column % 8 of call
// row * ceil(columns / 8) + column / 8.
FASTBERT_HOST_DEVICE PhiloxWords row_call(const DropoutStream& s, uint64_t call) {
  return philox4x32_7(static_cast<uint32_t>(call), static_cast<uint32_t>(call >> 32), s.site,
                      s.offset, s.key_low, s.key_high);
}

// Attention scores: the call that holds score (r, c) of one sequence and head, shared by rows
// r and r + 8 of a 16-row tile and by two pairs of columns, as a tensor-core fragment holds them.
FASTBERT_HOST_DEVICE uint32_t score_place(uint32_t r, uint32_t c) {
  return ((r / 16 * 8 + r % 8) << 16) | (c / 16 * 4 + c % 8 / 2);
}

FASTBERT_HOST_DEVICE uint32_t score_word(uint32_t r, uint32_t c) {
  return 2 * (r % 16 / 8) + c % 16 / 8;
}

FASTBERT_HOST_DEVICE PhiloxWords score_call(const DropoutStream& s, uint32_t place,
                                            uint32_t sequence_head) {
  return philox4x32_7(place, sequence_head, s.site, s.offset, s.key_low, s.key_high);
}

// Half 0 is the low sixteen bits.
FASTBERT_HOST_DEVICE bool keeps(const DropoutStream& s, uint32_t word, uint32_t half) {
  return ((word >> (16 * half)) & 0xFFFFu) >= s.threshold;
}

}  // namespace fastbert
