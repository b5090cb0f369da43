// Keep bits of both dropout maps (docs/dropout.md), 32 elements a word. Included inside a
// namespace.

#if defined(FASTBERT_AVX512)

// Eight calls at once, one in each 64-bit lane: a 32-bit multiplication reads the low half of a
// lane and leaves its product in both, so a round is two products, two shifts and two xors.
struct Calls {
  __m512i word[4];  // the low halves hold the words
};

FASTBERT_INLINE Calls philox_calls(const DropoutStream& s, __m512i c0, __m512i c1) {
  const __m512i m0 = _mm512_set1_epi64(0xD2511F53u), m1 = _mm512_set1_epi64(0xCD9E8D57u);
  __m512i c2 = _mm512_set1_epi64(s.site), c3 = _mm512_set1_epi64(s.offset);
  uint32_t k0 = s.key_low, k1 = s.key_high;
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
    const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
    constexpr int kXor3 = 0x96;
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, _mm512_set1_epi64(k0), kXor3);
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, _mm512_set1_epi64(k1), kXor3);
    c1 = p1;
    c3 = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

FASTBERT_INLINE uint32_t kept(__m512i halves, __m512i threshold) {
  return _mm512_cmpge_epu16_mask(halves, threshold);
}

FASTBERT_INLINE void some_row_keep_bits(const DropoutStream& s, int64_t row, int64_t columns,
                                        uint32_t* bits) {
  const uint64_t calls = static_cast<uint64_t>((columns + 7) / 8), first = row * calls;
  const __m512i threshold = _mm512_set1_epi16(static_cast<short>(s.threshold));
  // So that unpacking the low and the high 64-bit lanes gives calls 0 to 3 and 4 to 7 in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i low_half = _mm512_set1_epi64(0xFFFFFFFFu);
  for (uint64_t call = 0; call < calls; call += 8) {
    const __m512i counter =
        _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first + call)), order);
    const Calls c = philox_calls(s, counter, _mm512_srli_epi64(counter, 32));
    __m512i quads[2];
    for (int i = 0; i < 2; ++i) {
      quads[i] = _mm512_or_si512(_mm512_and_si512(c.word[2 * i], low_half),
                                 _mm512_slli_epi64(c.word[2 * i + 1], 32));
    }
    *bits++ = kept(_mm512_unpacklo_epi64(quads[0], quads[1]), threshold);
    if (8 * call + 32 < static_cast<uint64_t>(columns)) {
      *bits++ = kept(_mm512_unpackhi_epi64(quads[0], quads[1]), threshold);
    }
  }
}

FASTBERT_INLINE void some_score_keep_bits(const DropoutStream& s, uint32_t sequence_head,
                                          int64_t row, int64_t first, int64_t columns,
                                          int64_t words_per_row, uint32_t* bits) {
  const __m512i threshold = _mm512_set1_epi16(static_cast<short>(s.threshold));
  const __m512i head = _mm512_set1_epi64(sequence_head);
  // Lane i: pair i % 4 of columns 8 (i / 4) within each half of a 16-column tile.
  const __m512i pair = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  // Four dwords of the left half, four of the right, of the first tile; the same of the second.
  const __m512i gather =
      _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 8, 10, 12, 14, 24, 26, 28, 30);
  for (int64_t r = 0; r < 8; ++r) {
    uint32_t* upper = bits + r * words_per_row;
    uint32_t* lower = bits + (r + 8) * words_per_row;
    for (int64_t column = 0; column < columns; column += 32) {
      const uint32_t place =
          score_place(static_cast<uint32_t>(row + r), static_cast<uint32_t>(first + column));
      const Calls c = philox_calls(s, _mm512_add_epi64(_mm512_set1_epi64(place), pair), head);
      upper[column / 32] = kept(_mm512_permutex2var_epi32(c.word[0], gather, c.word[1]), threshold);
      lower[column / 32] = kept(_mm512_permutex2var_epi32(c.word[2], gather, c.word[3]), threshold);
    }
  }
}

#else

constexpr int kCalls = 16;

// words[k][i]: word k of call i; plain loops, which compilers vectorise.
FASTBERT_INLINE void philox_calls(const DropoutStream& s, const uint32_t* c0, const uint32_t* c1,
                                  uint32_t (*words)[kCalls]) {
  for (int i = 0; i < kCalls; ++i) {
    const PhiloxWords w = philox4x32_7(c0[i], c1[i], s.site, s.offset, s.key_low, s.key_high);
    for (int k = 0; k < 4; ++k) words[k][i] = w.word[k];
  }
}

FASTBERT_INLINE void some_row_keep_bits(const DropoutStream& s, int64_t row, int64_t columns,
                                        uint32_t* bits) {
  const uint64_t calls = static_cast<uint64_t>((columns + 7) / 8), first = row * calls;
  uint32_t low[kCalls], high[kCalls], words[4][kCalls];
  for (uint64_t call = 0; call < calls; call += kCalls) {
    for (int i = 0; i < kCalls; ++i) {
      const uint64_t counter = first + call + i;
      low[i] = static_cast<uint32_t>(counter);
      high[i] = static_cast<uint32_t>(counter >> 32);
    }
    philox_calls(s, low, high, words);
    for (int word = 0; word < 4 && 8 * call + 32 * word < static_cast<uint64_t>(columns); ++word) {
      uint32_t result = 0;
      for (uint32_t e = 0; e < 32; ++e) {
        result |= static_cast<uint32_t>(keeps(s, words[e % 8 / 2][4 * word + e / 8], e % 2)) << e;
      }
      *bits++ = result;
    }
  }
}

FASTBERT_INLINE void some_score_keep_bits(const DropoutStream& s, uint32_t sequence_head,
                                          int64_t row, int64_t first, int64_t columns,
                                          int64_t words_per_row, uint32_t* bits) {
  uint32_t place[kCalls], head[kCalls], words[4][kCalls];
  for (int i = 0; i < kCalls; ++i) head[i] = sequence_head;
  for (int64_t r = 0; r < 8; ++r) {
    for (int64_t column = 0; column < columns; column += 4 * kCalls) {
      const uint32_t start =
          score_place(static_cast<uint32_t>(row + r), static_cast<uint32_t>(first + column));
      for (int i = 0; i < kCalls; ++i) place[i] = start + i;
      philox_calls(s, place, head, words);
      for (int word = 0; word < kCalls / 8 && column + 32 * word < columns; ++word) {
        uint32_t upper = 0, lower = 0;
        for (uint32_t e = 0; e < 32; ++e) {
          const uint32_t call = 8 * word + e / 16 * 4 + e % 8 / 2, right = e % 16 / 8;
          upper |= static_cast<uint32_t>(keeps(s, words[right][call], e % 2)) << e;
          lower |= static_cast<uint32_t>(keeps(s, words[2 + right][call], e % 2)) << e;
        }
        bits[r * words_per_row + column / 32 + word] = upper;
        bits[(r + 8) * words_per_row + column / 32 + word] = lower;
      }
    }
  }
}

#endif

// The highest threshold has no sixteen bits: nothing is kept, and nothing computed.
FASTBERT_INLINE void row_keep_bits(const DropoutStream& s, int64_t row, int64_t columns,
                                   uint32_t* bits) {
  if (s.threshold < kKeepNone) return some_row_keep_bits(s, row, columns, bits);
  for (int64_t word = 0; 32 * word < columns; ++word) bits[word] = 0;
}

FASTBERT_INLINE void score_keep_bits(const DropoutStream& s, uint32_t sequence_head, int64_t row,
                                     int64_t first, int64_t columns, int64_t words_per_row,
                                     uint32_t* bits) {
  if (s.threshold < kKeepNone) {
    return some_score_keep_bits(s, sequence_head, row, first, columns, words_per_row, bits);
  }
  for (int64_t word = 0; word < 16 * words_per_row; ++word) bits[word] = 0;
}

FASTBERT_INLINE void expand_bits(const uint32_t* bits, int64_t n, bool* kept) {
  for (int64_t i = 0; i < n; ++i) kept[i] = (bits[i / 32] >> (i % 32)) & 1u;
}

// The elements that bits from element i on keep, 0 for the others: selected, not multiplied by
// zero, which would keep infinities.
FASTBERT_INLINE Vec kept_only(const uint32_t* bits, int64_t i, Vec v) {
  return zero_unless(mask_of_bits(bits, i), v);
}
FASTBERT_INLINE Pack kept_only(const uint32_t* bits, int64_t i, Pack p) {
#pragma GCC unroll 4
  for (int n = 0; n < Pack::kVecs; ++n) p.v[n] = kept_only(bits, i + n * Vec::kLanes, p.v[n]);
  return p;
}
