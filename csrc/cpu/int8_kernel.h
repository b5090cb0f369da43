// Products of int8: rows in whole numbers of a unit of their own, their blocks, and sums of whole
// numbers. Included inside a namespace. The layouts are described in kernels.h.

constexpr float kMostInt8 = 127.0f;

// A row's next `n` elements (at most 64) in whole numbers of a unit whose reciprocal is given,
// zeros behind them and in the place of magnitudes above `most`.
template <typename T>
FASTBERT_INLINE void quantize_row(const T* x, int64_t n, float per_unit, float most, int8_t* out) {
  alignas(64) float whole[kInt8Depth] = {};
  const Vec zero = broadcast(0.0f), limit = broadcast(kMostInt8);
  for_each_vec(n, [&](int64_t i, auto part) {
    const Vec v = part.load(x + i), rounded = round_to_int(v * broadcast(per_unit));
    const Vec bounded = min(limit, max(zero - limit, rounded));
    part.store(whole + i, select(less(broadcast(most), abs(v)), zero, bounded));
  });
  for (int64_t i = 0; i < kInt8Depth; ++i) {
    out[i] = static_cast<int8_t>(static_cast<int32_t>(whole[i]));
  }
}

// 1 / unit, 0 where that is not finite: all numbers are 0 then.
FASTBERT_INLINE float per_unit(float unit) { return unit > 0x1p-100f ? 1.0f / unit : 0.0f; }

// --- left operands ---

// The three largest magnitudes of each lane.
struct LargestThree {
  Vec first, second, third;

  FASTBERT_INLINE void take(Vec v) {
    const Vec after_first = min(first, v);
    first = max(first, v);
    const Vec after_second = min(second, after_first);
    second = max(second, after_first);
    third = max(third, after_second);
  }

  // The third largest of all lanes.
  FASTBERT_INLINE float third_of_all() const {
    float values[3 * Vec::kLanes], most[3] = {};
    store(values, first);
    store(values + Vec::kLanes, second);
    store(values + 2 * Vec::kLanes, third);
    for (float v : values) {
      for (float& m : most) {
        const float larger_one = v > m ? v : m;
        v = v > m ? m : v;
        m = larger_one;
      }
    }
    return most[2];
  }
};

template <typename T>
FASTBERT_INLINE void find_outliers(const T* x, int64_t n, Int8Row& row) {
  int found = 0;
  for_each_vec(n, [&](int64_t i, auto part) {
    const Vec v = part.load(x + i);
    if (!any(less(broadcast(row.peak), abs(v)))) return;
    float lanes[Vec::kLanes];
    store(lanes, v);
    for (int lane = 0; lane < Vec::kLanes; ++lane) {
      if (!(__builtin_fabsf(lanes[lane]) > row.peak)) continue;
      row.outliers[found++] = {static_cast<int32_t>(i + lane), lanes[lane]};
    }
  });
}

// What rows [begin, end) are quantised by; a peak of NaN where an element is no number.
void measure_int8_rows(const Source& s, int64_t begin, int64_t end, Int8Row* rows) {
  with_dtype(s.dtype, [&](auto zero) {
    for (int64_t i = begin; i < end; ++i) {
      const auto* x = static_cast<const decltype(zero)*>(s.data) + i * s.ld;
      const Vec nothing = broadcast(0.0f);
      LargestThree largest_of_lanes{nothing, nothing, nothing};
      Vec poison = nothing;
      for_each_vec(s.columns, [&](int64_t at, auto part) {
        const Vec v = part.load(x + at);
        largest_of_lanes.take(abs(v));
        // Stays 0 but for infinities and NaN, which `max` may pass over.
        poison = poison + (v - v);
      });
      Int8Row& row = rows[i - begin];
      row = {};
      row.peak = largest_of_lanes.third_of_all() + sum(poison);
      if (row.peak == row.peak) find_outliers(x, s.columns, row);
    }
  });
}

// The block at (row, column) of a source, whose rows and columns beyond the source are 0.
void pack_int8_rows(const Source& s, int64_t row, int64_t column, const Int8Row* measured,
                    void* out) {
  const int64_t rows = smaller(kBlock, s.rows - row);
  const int64_t columns = larger(0, smaller(kInt8Depth, s.columns - column));
  auto* to = static_cast<int8_t*>(out);
  __builtin_memset(to, 0, kBlock * kInt8Depth);
  with_dtype(s.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(s.data) + row * s.ld + column;
    for (int64_t r = 0; r < rows; ++r) {
      const float peak = measured[r].peak;
      if (peak != peak) continue;
      quantize_row(x + r * s.ld, columns, per_unit(peak / kMostInt8), peak, to + r * kInt8Depth);
    }
  });
}

// --- right operands ---

template <typename T>
FASTBERT_INLINE float largest_magnitude(const T* x, int64_t n) {
  Vec most = broadcast(0.0f);
  for_each_vec(n, [&](int64_t i, auto part) { most = max(most, abs(part.load(x + i))); });
  return largest(most);
}

// Largest magnitude / 127 of rows [begin, end).
void int8_units(const Source& s, int64_t begin, int64_t end, float* units) {
  with_dtype(s.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(s.data);
    for (int64_t row = begin; row < end; ++row) {
      units[row - begin] = largest_magnitude(x + row * s.ld, s.columns) / kMostInt8;
    }
  });
}

// The unit of a part of a row in bf16, rounded up so that its numbers reach as far as the part.
FASTBERT_INLINE uint16_t bf16_unit(float peak) {
  uint32_t bits;
  const float unit = peak / kMostInt8;
  __builtin_memcpy(&bits, &unit, sizeof(bits));
  return static_cast<uint16_t>((bits + 0xFFFFu) >> 16);
}

FASTBERT_INLINE float float_of_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rows as columns: [half][k / 4][column % 16][k % 4].
FASTBERT_INLINE void columns_of_quads(const int8_t (*rows)[kInt8Depth], void* out) {
  auto* to = static_cast<uint32_t*>(out);
  for (int64_t column = 0; column < kBlock; ++column) {
    uint32_t quads[kInt8Depth / 4];
    __builtin_memcpy(quads, rows[column], sizeof(quads));
    for (int64_t quad = 0; quad < kInt8Depth / 4; ++quad) {
      to[(column / 16 * (kInt8Depth / 4) + quad) * 16 + column % 16] = quads[quad];
    }
  }
}

// The block whose columns are rows of a source, from (row, column) on. By the units of those rows,
// or where there are none by units of the block's own, which follow its numbers.
void pack_int8_columns(const Source& s, int64_t row, int64_t column, const float* units,
                       void* out) {
  const int64_t rows = smaller(kBlock, s.rows - row);
  const int64_t columns = smaller(kInt8Depth, s.columns - column);
  alignas(64) int8_t block[kBlock][kInt8Depth] = {};
  uint16_t own_units[kBlock] = {};
  with_dtype(s.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(s.data) + row * s.ld + column;
    for (int64_t r = 0; r < rows; ++r, x += s.ld) {
      if (units == nullptr) own_units[r] = bf16_unit(largest_magnitude(x, columns));
      const float unit = units == nullptr ? float_of_bf16(own_units[r]) : units[r];
      quantize_row(x, columns, per_unit(unit), __builtin_inff(), block[r]);
    }
  });
  columns_of_quads(block, out);
  if (units != nullptr) return;
  __builtin_memcpy(static_cast<char*>(out) + sizeof(block), own_units, sizeof(own_units));
}

// A right block with units of its own as two in fp32 or bf16, each of half its depth.
void expand_int8(const void* block, Arithmetic arithmetic, void* out) {
  const auto* in = static_cast<const char*>(block);
  alignas(64) float units[kBlock];
  uint16_t halves[kBlock];
  __builtin_memcpy(halves, in + kBlock * kInt8Depth, sizeof(halves));
  for (int64_t i = 0; i < kBlock; ++i) units[i] = float_of_bf16(halves[i]);
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t quad = 0; quad < kInt8Depth / 4; ++quad) {
      uint32_t words[16];
      __builtin_memcpy(words, in + (half * (kInt8Depth / 4) + quad) * 64, sizeof(words));
      for (int64_t pair = 0; pair < 2; ++pair) {
        uint32_t values[2][16];
        for (int64_t which = 0; which < 2; ++which) {
          const int shift = static_cast<int>(24 - 8 * (2 * pair + which));
          for (int64_t i = 0; i < 16; ++i) {
            const int32_t whole = static_cast<int32_t>(words[i] << shift) >> 24;
            const float value = static_cast<float>(whole) * units[half * 16 + i];
            __builtin_memcpy(&values[which][i], &value, sizeof(value));
          }
        }
        const int64_t k = 2 * quad + pair;  // of pairs of the block's depth
        if (arithmetic == Arithmetic::kBFloat16) {
          uint32_t* to = static_cast<uint32_t*>(out) + k / 16 * 512 + half * 256 + k % 16 * 16;
          for (int64_t i = 0; i < 16; ++i) {
            to[i] = ((values[0][i] + 0x8000u) >> 16) | ((values[1][i] + 0x8000u) & 0xFFFF0000u);
          }
        } else {
          auto* to = static_cast<uint32_t*>(out) + 2 * k * kBlock + half * 16;
          __builtin_memcpy(to, values[0], sizeof(values[0]));
          __builtin_memcpy(to + kBlock, values[1], sizeof(values[1]));
        }
      }
    }
  }
}

// --- products ---

#if defined(FASTBERT_AVX512_BF16)

// c (32 x 32 whole numbers, row stride ldc) = or += the products of `blocks` blocks, by the dot
// products of AVX512_VNNI. Those take unsigned numbers on one side: the left ones are moved up by
// 128, and 128 times the right ones taken off again.
void multiply_int8(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                   bool accumulate) {
  constexpr int kRows = 8, kQuads = kInt8Depth / 4;
  const __m512i moved = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int row = 0; row < kBlock; row += kRows) {
    __m512i sums[kRows][2], extra[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int r = 0; r < kRows; ++r) {
      const float* from = c + (row + r) * ldc;
      sums[r][0] = accumulate ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
      sums[r][1] = accumulate ? _mm512_loadu_si512(from + 16) : _mm512_setzero_si512();
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const auto* x = static_cast<const uint32_t*>(a) + (block * kBlock + row) * kQuads;
      const auto* w = static_cast<const uint32_t*>(b) + block * kBlock * kQuads;
      for (int quad = 0; quad < kQuads; ++quad) {
        const __m512i left = _mm512_loadu_si512(w + quad * 16);
        const __m512i right = _mm512_loadu_si512(w + (kQuads + quad) * 16);
        extra[0] = _mm512_dpbusd_epi32(extra[0], moved, left);
        extra[1] = _mm512_dpbusd_epi32(extra[1], moved, right);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512i four = _mm512_set1_epi32(static_cast<int>(x[r * kQuads + quad]));
          const __m512i factor = _mm512_xor_si512(four, moved);
          sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], factor, left);
          sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], factor, right);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_si512(c + (row + r) * ldc, _mm512_sub_epi32(sums[r][0], extra[0]));
      _mm512_storeu_si512(c + (row + r) * ldc + 16, _mm512_sub_epi32(sums[r][1], extra[1]));
    }
  }
}

#else

// Four of k of some columns, widened, and the two sums of pairs that a column has of them.
#if defined(FASTBERT_AVX512)
using Quads = __m512i;
using PairSums = __m512i;
FASTBERT_INLINE Quads widened(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FASTBERT_INLINE Quads repeated(int32_t quad) {
  return _mm512_cvtepi8_epi16(_mm256_set1_epi32(quad));
}
FASTBERT_INLINE PairSums add_products(PairSums sums, Quads a, Quads b) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
#elif defined(FASTBERT_AVX2)
using Quads = __m256i;
using PairSums = __m256i;
FASTBERT_INLINE Quads widened(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FASTBERT_INLINE Quads repeated(int32_t quad) { return _mm256_cvtepi8_epi16(_mm_set1_epi32(quad)); }
FASTBERT_INLINE PairSums add_products(PairSums sums, Quads a, Quads b) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
#else
struct Quads {
  int16_t k[4];
};
struct PairSums {
  int32_t of_pair[2];
};
FASTBERT_INLINE Quads widened(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
FASTBERT_INLINE Quads repeated(int32_t quad) {
  int8_t bytes[4];
  __builtin_memcpy(bytes, &quad, sizeof(bytes));
  return widened(bytes);
}
FASTBERT_INLINE PairSums add_products(PairSums sums, Quads a, Quads b) {
  sums.of_pair[0] += a.k[0] * b.k[0] + a.k[1] * b.k[1];
  sums.of_pair[1] += a.k[2] * b.k[2] + a.k[3] * b.k[3];
  return sums;
}
#endif

// Rows [row, row + kRows) and 16 columns from `half` on of the product below.
template <int kRows>
FASTBERT_INLINE void multiply_int8_rows(const int8_t* left, const int8_t* right, int64_t blocks,
                                        int row, int half, float* c, int64_t ldc, bool accumulate) {
  constexpr int kColumns = sizeof(PairSums) / 8, kVecs = 16 / kColumns;
  PairSums sums[kRows][kVecs] = {};
  for (int64_t block = 0; block < blocks; ++block) {
    const int8_t* x = left + (block * kBlock + row) * kInt8Depth;
    const int8_t* w = right + (block * 2 + half) * 16 * kInt8Depth;
    for (int quad = 0; quad < kInt8Depth / 4; ++quad, w += 64) {
      Quads columns[kVecs];
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) columns[v] = widened(w + v * kColumns * 4);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + r * kInt8Depth + quad * 4, sizeof(four));
        const Quads factor = repeated(four);
#pragma GCC unroll 16
        for (int v = 0; v < kVecs; ++v) {
          sums[r][v] = add_products(sums[r][v], factor, columns[v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    int32_t pairs[16][2], total[16];
    __builtin_memcpy(pairs, sums[r], sizeof(pairs));
    float* to = c + (row + r) * ldc + half * 16;
    __builtin_memcpy(total, to, sizeof(total));
    for (int i = 0; i < 16; ++i) {
      total[i] = (accumulate ? total[i] : 0) + pairs[i][0] + pairs[i][1];
    }
    __builtin_memcpy(to, total, sizeof(total));
  }
}

// c (32 x 32 whole numbers, row stride ldc) = or += the products of `blocks` blocks.
void multiply_int8(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                   bool accumulate) {
  constexpr int kRows = sizeof(PairSums) == 64 ? 8 : sizeof(PairSums) == 32 ? 2 : 1;
  const auto *left = static_cast<const int8_t*>(a), *right = static_cast<const int8_t*>(b);
  for (int half = 0; half < 2; ++half) {
    for (int row = 0; row < kBlock; row += kRows) {
      multiply_int8_rows<kRows>(left, right, blocks, row, half, c, ldc, accumulate);
    }
  }
}

#endif

// Column k of a panel's numbers times the columns' units.
FASTBERT_INLINE void read_column(const char* panel, int64_t k, const float* units, float* values) {
  const int shift = static_cast<int>(24 - 8 * (k % 4));
  const char* block = panel + k / kInt8Depth * (kBlock * kInt8Depth);
  for (int64_t half = 0; half < 2; ++half) {
    uint32_t words[16];
    __builtin_memcpy(words, block + (half * kInt8Depth + k % kInt8Depth / 4 * 4) * 16,
                     sizeof(words));
    for (int64_t i = 0; i < 16; ++i) {
      const int32_t whole = static_cast<int32_t>(words[i] << shift) >> 24;
      values[half * 16 + i] = static_cast<float>(whole) * units[half * 16 + i];
    }
  }
}

// A block's sums of whole numbers c (32 x 32) in fp32, in place, with the products of its rows'
// outliers. Whichever rows are together, each gets the same terms in the same order.
void finish_int8(float* c, const Int8Row* rows, const void* panel, const float* units) {
  alignas(64) float columns[kBlock * Int8Row::kOutliers][kBlock];
  int32_t known[kBlock * Int8Row::kOutliers];
  int count = 0;
  const auto place_of = [&](int32_t k) {
    for (int i = 0; i < count; ++i) {
      if (known[i] == k) return i;
    }
    read_column(static_cast<const char*>(panel), k, units, columns[count]);
    known[count] = k;
    return count++;
  };
  for (int64_t r = 0; r < kBlock; ++r, c += kBlock) {
    int32_t whole[kBlock];
    __builtin_memcpy(whole, c, sizeof(whole));
    const float unit = rows[r].peak / kMostInt8;
    for (int64_t i = 0; i < kBlock; ++i) c[i] = static_cast<float>(whole[i]) * (unit * units[i]);
    for (const Int8Row::Outlier& outlier : rows[r].outliers) {
      if (outlier.value == 0.0f) continue;
      const float* weights = columns[place_of(outlier.k)];
      for (int64_t i = 0; i < kBlock; ++i) c[i] += outlier.value * weights[i];
    }
  }
}
