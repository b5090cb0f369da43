// Sixteen floats in a register of AVX-512 (F, BW, DQ, VL). Included inside a namespace.

struct Mask {
  __mmask16 lanes;
};

struct Vec {
  static constexpr int kLanes = 16;
  __m512 v;
};

FASTBERT_INLINE __mmask16 lanes_below(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

FASTBERT_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }

FASTBERT_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
FASTBERT_INLINE Vec load(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(lanes_below(n), p)};
}
FASTBERT_INLINE Vec from_bf16(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
FASTBERT_INLINE Vec load(const bfloat16* p) {
  return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FASTBERT_INLINE Vec load(const bfloat16* p, int n) {
  return from_bf16(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
FASTBERT_INLINE Vec load(const float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
FASTBERT_INLINE Vec load(const float16* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n), p))};
}

// To nearest, ties to even; NaN stays NaN.
#if defined(FASTBERT_AVX512_BF16)
// The instruction rounds subnormal numbers to 0, as every bf16 product reads them.
FASTBERT_INLINE __m256i to_bf16(Vec x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
#else
FASTBERT_INLINE __m512i bf16_bits(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000));
}
FASTBERT_INLINE __m256i to_bf16(Vec x) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(x), 16));
}
#endif

FASTBERT_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
FASTBERT_INLINE void store(float* p, Vec x, int n) {
  _mm512_mask_storeu_ps(p, lanes_below(n), x.v);
}
FASTBERT_INLINE void store(bfloat16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x));
}
FASTBERT_INLINE void store(bfloat16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, lanes_below(n), to_bf16(x));
}
FASTBERT_INLINE __m256i to_fp16(Vec x) {
  return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
FASTBERT_INLINE void store(float16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_fp16(x));
}
FASTBERT_INLINE void store(float16* p, Vec x, int n) {
  _mm256_mask_storeu_epi16(p, lanes_below(n), to_fp16(x));
}

// Whole numbers of 32 bits, and of 8.
FASTBERT_INLINE Vec load_whole(const void* p) {
  return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))};
}
FASTBERT_INLINE Vec load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
// To the nearest, ties to even.
FASTBERT_INLINE void store_int8(int8_t* p, Vec x) {
  const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
FASTBERT_INLINE void store_int8(int8_t* p, Vec x, int n) {
  _mm_mask_storeu_epi8(p, lanes_below(n), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

FASTBERT_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
FASTBERT_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// The second where one is NaN.
FASTBERT_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
FASTBERT_INLINE Vec round_to_int(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a - floor(a), 0 of infinities.
FASTBERT_INLINE Vec above_floor(Vec a) {
  return {_mm512_reduce_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
// a 2^n for whole n (the floor of any other), subnormal results and overflow included.
FASTBERT_INLINE Vec times_power_of_two(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
FASTBERT_INLINE Vec with_sign_of(Vec magnitude, Vec sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(bit, magnitude.v), _mm512_and_ps(bit, sign.v))};
}

FASTBERT_INLINE Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
FASTBERT_INLINE bool any(Mask m) { return m.lanes != 0; }
FASTBERT_INLINE Vec select(Mask m, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(m.lanes, b.v, a.v)};
}
FASTBERT_INLINE Vec zero_unless(Mask m, Vec a) { return {_mm512_maskz_mov_ps(m.lanes, a.v)}; }
FASTBERT_INLINE Vec first_lanes(Vec a, int n) { return {_mm512_maskz_mov_ps(lanes_below(n), a.v)}; }
// Of 32 floats, those at the low five bits of each lane.
FASTBERT_INLINE Vec look_up(const float* table, Vec index) {
  return {_mm512_permutex2var_ps(_mm512_loadu_ps(table), _mm512_castps_si512(index.v),
                                 _mm512_loadu_ps(table + 16))};
}
// Of elements [i, i + kLanes), i a multiple of kLanes.
FASTBERT_INLINE Mask mask_of_bits(const uint32_t* bits, int64_t i) {
  return {static_cast<__mmask16>(bits[i / 32] >> (i % 32))};
}

FASTBERT_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
FASTBERT_INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
