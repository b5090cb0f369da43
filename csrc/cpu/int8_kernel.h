// Products of int8: rows in whole numbers of a unit of their own, their blocks, and sums of whole
// numbers. Included inside a namespace. The layouts are described in kernels.h.

constexpr float kMostInt8 = 127.0f;

// 1 / unit, 0 where that is not finite: all numbers are 0 then.
FASTBERT_INLINE float per_unit(float unit) { return unit > 0x1p-100f ? 1.0f / unit : 0.0f; }

// --- left operands ---

// An element's magnitude as its bits without the sign, which are in order.
template <typename T>
struct Magnitude {
  using Bits = uint16_t;
  static constexpr Bits kMask = 0x7FFF, kInfinity = is_bfloat16<T> ? 0x7F80 : 0x7C00;
};
template <>
struct Magnitude<float> {
  using Bits = uint32_t;
  static constexpr Bits kMask = 0x7FFFFFFF, kInfinity = 0x7F800000;
};

// Moves v into the three largest so far, in order; of vectors in each lane.
template <typename Bits>
FASTBERT_INLINE void take(Bits v, Bits& first, Bits& second, Bits& third) {
  const Bits after_first = first < v ? first : v;
  first = first < v ? v : first;
  const Bits after_second = second < after_first ? second : after_first;
  second = second < after_first ? after_first : second;
  third = third < after_second ? after_second : third;
}

template <typename Bits>
struct LargestThree {
  Bits first, second, third;
};

template <typename T>
FASTBERT_INLINE LargestThree<typename Magnitude<T>::Bits> largest_three(const T* x, int64_t n) {
  using Bits = typename Magnitude<T>::Bits;
  constexpr int kLanes = 64 / sizeof(Bits);
  typedef Bits Lanes __attribute__((vector_size(64)));
  Lanes first = {}, second = {}, third = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    Lanes v = {};
    __builtin_memcpy(&v, x + i, i + kLanes <= n ? sizeof(v) : (n - i) * sizeof(T));
    v &= Magnitude<T>::kMask;
    take(v, first, second, third);
  }
  LargestThree<Bits> all = {};
  Lanes ranks[3] = {first, second, third};
  for (const Lanes& lanes : ranks) {
    for (int i = 0; i < kLanes; ++i) {
      if (lanes[i] > all.third) take<Bits>(lanes[i], all.first, all.second, all.third);
    }
  }
  return all;
}

// The third largest magnitude of a row; NaN where one is infinite or NaN.
template <typename T>
FASTBERT_INLINE float third_magnitude(const T* x, int64_t n) {
  const auto all = largest_three(x, n);
  if (all.first >= Magnitude<T>::kInfinity) return __builtin_nanf("");
  T third;
  __builtin_memcpy(&third, &all.third, sizeof(third));
  float lanes[Vec::kLanes];
  store(lanes, load(&third, 1));
  return lanes[0];
}

// What the rows of a block from `row` on are quantised by.
void measure_int8_rows(const Source& s, int64_t row, Int8Rows* measured) {
  *measured = {};
  with_dtype(s.dtype, [&](auto zero) {
    for (int64_t r = 0; r < smaller(kBlock, s.rows - row); ++r) {
      const auto* x = static_cast<const decltype(zero)*>(s.data) + (row + r) * s.ld;
      measured->rows[r].peak = third_magnitude(x, s.columns);
    }
  });
}

// Notes the elements of 64 that are above the row's peak; `first` is the column of the first.
template <typename T>
FASTBERT_INLINE void find_outliers(const T* x, int64_t n, int64_t first, Int8Row& row,
                                   Int8Rows* measured) {
  float values[kInt8Depth];
  for_each_vec(n, [&](int64_t i, auto part) { part.store(values + i, part.load(x + i)); });
  for (int64_t i = 0; i < n; ++i) {
    if (!(__builtin_fabsf(values[i]) > row.peak)) continue;
    const auto k = static_cast<int32_t>(first + i);
    int32_t place = 0;
    while (place < measured->count && measured->columns[place] != k) ++place;
    measured->columns[place] = k;
    measured->count = static_cast<int32_t>(larger(measured->count, place + 1));
    row.outliers[row.count++] = {place, values[i]};
  }
}

// The block at (row, column) of a source, whose rows and columns beyond the source are 0. The
// blocks of its rows come one after the other.
void pack_int8_rows(const Source& s, int64_t row, int64_t column, Int8Rows* measured, void* out) {
  const int64_t rows = smaller(kBlock, s.rows - row);
  const int64_t columns = larger(0, smaller(kInt8Depth, s.columns - column));
  auto* to = static_cast<int8_t*>(out);
  if (rows < kBlock || columns < kInt8Depth) __builtin_memset(to, 0, kBlock * kInt8Depth);
  with_dtype(s.dtype, [&](auto zero_of_dtype) {
    const auto* x = static_cast<const decltype(zero_of_dtype)*>(s.data) + row * s.ld + column;
    const Vec zero = broadcast(0.0f);
    for (int64_t r = 0; r < rows; ++r, x += s.ld, to += kInt8Depth) {
      Int8Row& of_row = measured->rows[r];
      const bool is_number = of_row.peak == of_row.peak;
      const Vec factor = broadcast(is_number ? per_unit(of_row.peak / kMostInt8) : 0.0f);
      const Vec most = broadcast(of_row.peak);
      bool has_outliers = false;
      for_each_vec(columns, [&](int64_t i, auto part) {
        const Vec v = part.load(x + i);
        const Mask beyond = less(most, abs(v));
        has_outliers |= any(beyond);
        part.store_int8(to + i, is_number ? select(beyond, zero, v * factor) : zero);
      });
      if (has_outliers) find_outliers(x, columns, column, of_row, measured);
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

// Numbers of 32 columns, 64 of each, by the units of the columns.
template <typename T>
FASTBERT_INLINE void quantize_columns(const T* x, int64_t ld, int64_t rows, int64_t columns,
                                      const float* units, int8_t (*block)[kInt8Depth]) {
  for (int64_t r = 0; r < rows; ++r) {
    const Vec factor = broadcast(per_unit(units[r]));
    for_each_vec(columns, [&](int64_t i, auto part) {
      part.store_int8(block[r] + i, part.load(x + r * ld + i) * factor);
    });
  }
}

// The block whose columns are rows of a source, from (row, column) on, by the units of those rows.
void pack_int8_columns(const Source& s, int64_t row, int64_t column, const float* units,
                       void* out) {
  const int64_t rows = smaller(kBlock, s.rows - row);
  const int64_t columns = smaller(kInt8Depth, s.columns - column);
  alignas(64) int8_t block[kBlock][kInt8Depth] = {};
  with_dtype(s.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(s.data) + row * s.ld + column;
    quantize_columns(x, s.ld, rows, columns, units, block);
  });
  columns_of_quads(block, out);
}

// The same by units of the block's own, which follow its numbers: [k][column].
void pack_int8_block(const Source& s, int64_t row, int64_t column, void* out) {
  const int64_t rows = smaller(kBlock, s.rows - row);
  const int64_t columns = smaller(kInt8Depth, s.columns - column);
  alignas(64) int8_t block[kBlock][kInt8Depth] = {};
  uint16_t halves[kBlock] = {};
  with_dtype(s.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(s.data) + row * s.ld + column;
    float units[kBlock];
    for (int64_t r = 0; r < rows; ++r) {
      halves[r] = bf16_unit(largest_magnitude(x + r * s.ld, columns));
      units[r] = float_of_bf16(halves[r]);
    }
    quantize_columns(x, s.ld, rows, columns, units, block);
  });
  auto* to = static_cast<int8_t*>(out);
  for (int64_t k = 0; k < kInt8Depth; ++k) {
    for (int64_t r = 0; r < kBlock; ++r) to[k * kBlock + r] = block[r][k];
  }
  __builtin_memcpy(to + sizeof(block), halves, sizeof(halves));
}

// A right block with units of its own as two in fp32 or bf16, each of half its depth.
void expand_int8(const void* block, Arithmetic arithmetic, void* out) {
  const auto* in = static_cast<const int8_t*>(block);
  const auto* halves = reinterpret_cast<const bfloat16*>(in + kBlock * kInt8Depth);
#if defined(FASTBERT_AVX512_BF16)
  if (arithmetic == Arithmetic::kBFloat16) {
    auto* to = static_cast<bfloat16*>(out);
    for (int half = 0; half < 2; ++half) {
      const Vec units = load(halves + 16 * half);
      for (int k = 0; k < kInt8Depth; k += 2) {
        const Vec first = load_int8(in + k * kBlock + 16 * half) * units;
        const Vec second = load_int8(in + (k + 1) * kBlock + 16 * half) * units;
        store_pairs(to + k / kBlock * 1024 + half * 512 + k % kBlock * 16, first, second);
      }
    }
    return;
  }
#endif
  auto* to = static_cast<float*>(out);
  for (int64_t i = 0; i < kBlock; i += Vec::kLanes) {
    const Vec units = load(halves + i);
    for (int64_t at = i; at < kBlock * kInt8Depth; at += kBlock) {
      store(to + at, load_int8(in + at) * units);
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

// The first rows of a block's sums of whole numbers c (32 x 32) in fp32, in place, with the
// products of its rows' outliers. Whichever rows are together, each gets the same terms in the same
// order.
void finish_int8(float* c, int64_t rows, const Int8Rows* measured, const void* panel,
                 const float* units) {
  // A row without outliers reads the first column, times 0.
  alignas(64) float columns[kBlock * Int8Row::kOutliers][kBlock];
  __builtin_memset(columns[0], 0, sizeof(columns[0]));
  for (int32_t i = 0; i < measured->count; ++i) {
    read_column(static_cast<const char*>(panel), measured->columns[i], units, columns[i]);
  }
  for (int64_t r = 0; r < rows; ++r, c += kBlock) {
    const Int8Row& row = measured->rows[r];
    const auto [first, second] = row.outliers;
    const Vec unit = broadcast(row.peak / kMostInt8);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBlock; i += Vec::kLanes) {
      // Products and sums are rounded apart: some instruction sets have no other way.
      Vec v = load_whole(c + i) * (unit * load(units + i));
      v = v + broadcast(first.value) * load(columns[first.place] + i);
      store(c + i, v + broadcast(second.value) * load(columns[second.place] + i));
    }
  }
}
