// Matrix products in blocks of 32 x 32: packing, the microkernel in fp32, and what happens to a
// finished block. Included inside a namespace. The layouts are described in kernels.h.

FASTBERT_INLINE void copy_block(const float (*tile)[kBlock], float* out) {
  __builtin_memcpy(out, tile, kBlock * kBlock * sizeof(float));
}

#if defined(FASTBERT_AVX512)

FASTBERT_INLINE void transpose_16x16(const __m512i* in, __m512i* out) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xDD);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xDD);
    out[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xDD);
  }
}

// 32-bit elements: out[c][r] = in[r][c] of a 16 x 16 piece.
FASTBERT_INLINE void transpose_piece(const uint32_t* in, int64_t in_step, uint32_t* out,
                                     int64_t out_step) {
  __m512i rows[16], columns[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(in + i * in_step);
  transpose_16x16(rows, columns);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * out_step, columns[i]);
}

FASTBERT_INLINE void transpose_block(const float (*tile)[kBlock], float* out) {
  const auto* in = reinterpret_cast<const uint32_t*>(tile);
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int r = 0; r < kBlock; r += 16) {
    for (int c = 0; c < kBlock; c += 16) {
      transpose_piece(in + r * kBlock + c, kBlock, to + c * kBlock + r, kBlock);
    }
  }
}

#else

FASTBERT_INLINE void transpose_block(const float (*tile)[kBlock], float* out) {
  for (int c = 0; c < kBlock; ++c) {
    for (int r = 0; r < kBlock; ++r) out[c * kBlock + r] = tile[r][c];
  }
}

#endif

#if defined(FASTBERT_AVX512_BF16)

// Two vectors rounded to bf16, one behind the other.
FASTBERT_INLINE __m512i to_bf16(Vec first, Vec second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
}

// Elements of `first` and `second` by turns.
FASTBERT_INLINE void store_pairs(bfloat16* p, Vec first, Vec second) {
  // 0, 16, 1, 17, ...
  const __m512i turns = _mm512_or_si512(
      _mm512_cvtepu16_epi32(
          _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_setr_epi16(16, 17, 18, 19, 20, 21, 22, 23, 24,
                                                                25, 26, 27, 28, 29, 30, 31)),
                        16));
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(turns, to_bf16(first, second)));
}

using Halves32 = uint16_t[kBlock][kBlock];

// The block at x in bf16 parts: each is what rounding to the ones before it left over, exactly.
template <int kParts>
FASTBERT_INLINE void split_block(const float* x, int64_t ld, Halves32* parts) {
  for (int r = 0; r < kBlock; ++r) {
    Vec left = load(x + r * ld), right = load(x + r * ld + 16);
#pragma GCC unroll 3
    for (int part = 0; part < kParts; ++part) {
      const __m512i halves = to_bf16(left, right);
      _mm512_store_si512(parts[part][r], halves);
      if (part + 1 == kParts) break;
      left = left - from_bf16(_mm512_castsi512_si256(halves));
      right = right - from_bf16(_mm512_extracti64x4_epi64(halves, 1));
    }
  }
}

// Pairs of rows side by side: out[half][r / 2][c][r % 2] of columns 16 half + c.
FASTBERT_INLINE void interleave_rows(const Halves32& halves, uint32_t* out) {
  for (int r = 0; r < kBlock; r += 2) {
    for (int half = 0; half < 2; ++half) {
      const auto* upper = reinterpret_cast<const __m256i*>(halves[r] + 16 * half);
      const auto* lower = reinterpret_cast<const __m256i*>(halves[r + 1] + 16 * half);
      const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(upper));
      const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(lower));
      _mm512_storeu_si512(out + half * 256 + r * 8,
                          _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    }
  }
}

FASTBERT_INLINE void emit_halves(const Halves32& halves, Layout layout, void* out) {
  auto* to = static_cast<uint32_t*>(out);
  const auto* in = reinterpret_cast<const uint32_t*>(halves);
  alignas(64) uint32_t pairs[2 * 256];
  switch (layout) {
    case Layout::kA:
      for (int r = 0; r < kBlock; ++r) {
        _mm512_storeu_si512(to + r * 16, _mm512_load_si512(halves[r]));
      }
      return;
    case Layout::kATransposed:
      interleave_rows(halves, pairs);
      transpose_piece(pairs, 16, to, 16);
      transpose_piece(pairs + 256, 16, to + 256, 16);
      return;
    case Layout::kB:
      interleave_rows(halves, to);
      return;
    case Layout::kBTransposed:
      transpose_piece(in, 16, to, 16);
      transpose_piece(in + 256, 16, to + 256, 16);
      return;
  }
}

template <int kParts>
FASTBERT_INLINE void emit_parts(const float* x, int64_t ld, Layout layout, void* out) {
  alignas(64) Halves32 parts[kParts];
  split_block<kParts>(x, ld, parts);
  for (int part = 0; part < kParts; ++part) {
    emit_halves(parts[part], layout, static_cast<char*>(out) + part * sizeof(Halves32));
  }
}

FASTBERT_INLINE void emit_parts(Arithmetic arithmetic, const float* x, int64_t ld, Layout layout,
                                void* out) {
  switch (parts_of(arithmetic)) {
    case 1:
      return emit_parts<1>(x, ld, layout, out);
    case 2:
      return emit_parts<2>(x, ld, layout, out);
    default:
      return emit_parts<3>(x, ld, layout, out);
  }
}

FASTBERT_INLINE void emit_bf16(const uint16_t* x, int64_t ld, Layout layout, void* out) {
  alignas(64) Halves32 halves;
  for (int r = 0; r < kBlock; ++r) {
    _mm512_store_si512(halves[r], _mm512_loadu_si512(x + r * ld));
  }
  emit_halves(halves, layout, out);
}

// A block that is packed as it lies in memory; false where it has to be converted first.
FASTBERT_INLINE bool emit_whole_block(const Source& s, Arithmetic arithmetic, Layout layout,
                                      int64_t at, void* out) {
  if (s.dtype == Dtype::kFloat) {
    emit_parts(arithmetic, static_cast<const float*>(s.data) + at, s.ld, layout, out);
    return true;
  }
  if (s.dtype == Dtype::kBFloat16 && parts_of(arithmetic) == 1) {
    emit_bf16(static_cast<const uint16_t*>(s.data) + at, s.ld, layout, out);
    return true;
  }
  return false;
}

#endif

template <typename T>
FASTBERT_INLINE void read_block(const T* x, int64_t ld, int64_t rows, int64_t columns,
                                float (*tile)[kBlock]) {
  const Vec zero = broadcast(0.0f);
  for (int64_t r = 0; r < kBlock; ++r) {
    for (int64_t c = 0; c < kBlock; c += Vec::kLanes) {
      const int64_t left = r < rows ? columns - c : 0;
      Vec v = zero;
      if (left >= Vec::kLanes) {
        v = load(x + r * ld + c);
      } else if (left > 0) {
        v = load(x + r * ld + c, static_cast<int>(left));
      }
      store(tile[r] + c, v);
    }
  }
}

FASTBERT_INLINE void read_any(const Source& s, int64_t row, int64_t column, int64_t rows,
                              int64_t columns, float (*tile)[kBlock]) {
  with_dtype(s.dtype, [&](auto zero) {
    const auto* x = static_cast<const decltype(zero)*>(s.data) + row * s.ld + column;
    read_block(x, s.ld, rows, columns, tile);
  });
}

template <bool kErf>
FASTBERT_INLINE void gelu_of_block(Dtype dtype, float (*tile)[kBlock]) {
  for (int64_t i = 0; i < kBlock * kBlock; i += Pack::kLanes) {
    WholePack part;
    const Pack u = part.load(tile[0] + i);
    part.store(tile[0] + i,
               dtype == Dtype::kBFloat16 ? gelu<bfloat16, kErf>(u) : gelu<float, kErf>(u));
  }
}

// GELU of the stored pre-activation, rounded to its dtype as forward rounded it.
FASTBERT_INLINE void activate_block(const Source& s, float (*tile)[kBlock]) {
  s.gelu == Gelu::kErf ? gelu_of_block<true>(s.dtype, tile) : gelu_of_block<false>(s.dtype, tile);
  if (s.dtype == Dtype::kFloat) return;
  uint16_t rounded[kBlock * kBlock];
  convert(Dtype::kFloat, tile[0], s.dtype, rounded, kBlock * kBlock);
  convert(s.dtype, rounded, Dtype::kFloat, tile[0], kBlock * kBlock);
}

void pack_block(const Source& s, Arithmetic arithmetic, Layout layout, int64_t row, int64_t column,
                void* out) {
  const int64_t rows = smaller(kBlock, s.rows - row), columns = smaller(kBlock, s.columns - column);
  alignas(64) float tile[kBlock][kBlock];
#if defined(FASTBERT_AVX512_BF16)
  if (arithmetic != Arithmetic::kFloat) {
    const bool whole = rows == kBlock && columns == kBlock && s.gelu == Gelu::kNone;
    if (whole && emit_whole_block(s, arithmetic, layout, row * s.ld + column, out)) return;
    read_any(s, row, column, rows, columns, tile);
    if (s.gelu != Gelu::kNone) activate_block(s, tile);
    return emit_parts(arithmetic, tile[0], kBlock, layout, out);
  }
#endif
  read_any(s, row, column, rows, columns, tile);
  if (s.gelu != Gelu::kNone) activate_block(s, tile);
  const bool transposed = layout == Layout::kATransposed || layout == Layout::kBTransposed;
  transposed ? transpose_block(tile, static_cast<float*>(out))
             : copy_block(tile, static_cast<float*>(out));
}

// Rows [row, row + kRows) of the product below, their sums in registers.
template <int kRows>
FASTBERT_INLINE void multiply_rows(const float* left, const float* right, int64_t blocks, int row,
                                   float* c, int64_t ldc, bool accumulate) {
  constexpr int kVecs = kBlock / Vec::kLanes;
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      const float* from = c + (row + r) * ldc + v * Vec::kLanes;
      sums[r][v] = accumulate ? load(from) : broadcast(0.0f);
    }
  }
  for (int64_t block = 0; block < blocks; ++block) {
    const float* x = left + block * kBlock * kBlock + row * kBlock;
    const float* w = right + block * kBlock * kBlock;
    for (int k = 0; k < kBlock; ++k) {
      Vec columns[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) columns[v] = load(w + k * kBlock + v * Vec::kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Vec factor = broadcast(x[r * kBlock + k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sums[r][v] = fma(factor, columns[v], sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) store(c + (row + r) * ldc + v * Vec::kLanes, sums[r][v]);
  }
}

// c (32 x 32, row stride ldc) = or += the products of `blocks` blocks, each element's terms in
// rising k. As many rows at a time as there are registers for.
void multiply_float(const void* a, const void* b, int64_t blocks, float* c, int64_t ldc,
                    bool accumulate) {
  const auto *left = static_cast<const float*>(a), *right = static_cast<const float*>(b);
  if constexpr (Vec::kLanes == 16) {
    multiply_rows<12>(left, right, blocks, 0, c, ldc, accumulate);
    multiply_rows<12>(left, right, blocks, 12, c, ldc, accumulate);
    multiply_rows<8>(left, right, blocks, 24, c, ldc, accumulate);
  } else {
    for (int row = 0; row < kBlock; row += 2) {
      multiply_rows<2>(left, right, blocks, row, c, ldc, accumulate);
    }
  }
}

// Vectors of neighbouring rows of 32 columns, with a row stride for memory that is not a block.
struct RowsOfBlock {
  template <typename T>
  FASTBERT_INLINE Pack load(const T* p, int64_t ld) const {
    Pack r;
#pragma GCC unroll 4
    for (int i = 0; i < Pack::kVecs; ++i) r.v[i] = ISA::load(at(p, i, ld));
    return r;
  }
  template <typename T>
  FASTBERT_INLINE void store(T* p, int64_t ld, Pack x) const {
#pragma GCC unroll 4
    for (int i = 0; i < Pack::kVecs; ++i) ISA::store(at(p, i, ld), x.v[i]);
  }

 private:
  template <typename T>
  static FASTBERT_INLINE T* at(T* p, int i, int64_t ld) {
    return p + i * Vec::kLanes / kBlock * ld + i * Vec::kLanes % kBlock;
  }
};

// Columns of one row.
template <typename Part>
struct ColumnsOfRow {
  Part part;
  template <typename T>
  FASTBERT_INLINE auto load(const T* p, int64_t) const {
    return part.load(p);
  }
  template <typename T, typename V>
  FASTBERT_INLINE void store(T* p, int64_t, V x) const {
    part.store(p, x);
  }
};

// body(row, column, part) over a block's rows: all lanes of several rows where it is whole.
template <typename Body>
FASTBERT_INLINE void for_each_of_block(int64_t rows, int64_t columns, const Body& body) {
  constexpr int64_t kRows = Pack::kLanes / kBlock > 0 ? Pack::kLanes / kBlock : 1;
  int64_t r = 0;
  if constexpr (Pack::kLanes >= kBlock) {
    for (; columns == kBlock && r + kRows <= rows; r += kRows) body(r, 0, RowsOfBlock{});
  }
  for (; r < rows; ++r) {
    for_each_vec(columns,
                 [&](int64_t i, auto part) { body(r, i, ColumnsOfRow<decltype(part)>{part}); });
  }
}

template <typename T, typename V>
FASTBERT_INLINE V rounded_to(V v) {
  if constexpr (V::kLanes == Vec::kLanes) {
    T lanes[Vec::kLanes];
    store(lanes, v);
    return load(lanes);
  } else {
    for (int i = 0; i < V::kVecs; ++i) v.v[i] = rounded_to<T>(v.v[i]);
    return v;
  }
}

template <typename T, bool kErf>
void finish_rows(const Finish& f, int64_t row, int64_t column, int64_t rows, int64_t columns,
                 const float* c) {
  for_each_of_block(rows, columns, [&](int64_t r, int64_t i, auto part) FASTBERT_INLINE_BODY {
    const int64_t at = (row + r) * f.ld + column + i;
    auto v = part.load(c + r * kBlock + i, kBlock);
    if (f.bias != nullptr) v = v + part.load(f.bias + column + i, 0);
    if (f.slope_at != nullptr) {
      v = v * gelu_slope<T, kErf>(part.load(static_cast<const T*>(f.slope_at) + at, f.ld));
    } else if (f.gelu != Gelu::kNone) {
      // The pre-activation has the dtype's precision for backward, so for forward too.
      v = rounded_to<T>(v);
      if (f.preact != nullptr) part.store(static_cast<T*>(f.preact) + at, f.ld, v);
      v = gelu<T, kErf>(v);
    }
    if (f.addend != nullptr) v = v + part.load(static_cast<const T*>(f.addend) + at, f.ld);
    part.store(static_cast<T*>(f.out) + at, f.ld, v);
  });
}

void finish_block(const Finish& f, int64_t row, int64_t column, int64_t rows, int64_t columns,
                  const float* c) {
  with_dtype(f.dtype, [&](auto zero) {
    using T = decltype(zero);
    f.gelu == Gelu::kTanh ? finish_rows<T, false>(f, row, column, rows, columns, c)
                          : finish_rows<T, true>(f, row, column, rows, columns, c);
  });
}

// Whether every element of rows [begin, end) lies where three bf16 parts hold it: ordinary[row -
// begin] is 0 for rows with an infinity, a NaN, or magnitudes far from 1.
void ordinary_rows(const Source& s, int64_t begin, int64_t end, uint8_t* ordinary) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = static_cast<const float*>(s.data) + row * s.ld;
    Vec most = broadcast(0.0f), nan = broadcast(0.0f);
    for_each_vec(s.columns, [&](int64_t i, auto part) {
      const Vec v = part.load(x + i);
      most = max(most, abs(v));
      // Stays 0 but for infinities and NaN, which `max` may pass over.
      nan = nan + (v - v);
    });
    const float peak = largest(most), poison = sum(nan);
    ordinary[row - begin] = poison == 0.0f && (peak == 0.0f || (peak > 0x1p-60f && peak < 0x1p60f));
  }
}

// One element in plain fp32, for the rows that are not ordinary.
float dot(const float* a, const float* b, int64_t step, int64_t n, float start) {
  float total = start;
  for (int64_t i = 0; i < n; ++i) total = __builtin_fmaf(a[i], b[i * step], total);
  return total;
}

template <typename T>
void add_row_range(const T* x, int64_t ld, int64_t begin, int64_t end, int64_t columns,
                   float* sums) {
  for (int64_t row = begin; row < end; ++row) {
    for_each_vec(columns, [&](int64_t i, auto part) {
      part.store(sums + i, part.load(sums + i) + part.load(x + row * ld + i));
    });
  }
}

void add_rows(const Source& s, int64_t begin, int64_t end, float* sums) {
  with_dtype(s.dtype, [&](auto zero) {
    add_row_range(static_cast<const decltype(zero)*>(s.data), s.ld, begin, end, s.columns, sums);
  });
}
