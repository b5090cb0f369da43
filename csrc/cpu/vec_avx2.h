// Eight floats in a register of AVX2 with FMA and F16C. Included inside a namespace.

struct Mask {
  __m256 lanes;
};

struct Vec {
  static constexpr int kLanes = 8;
  __m256 v;
};

FASTBERT_INLINE __m256i lanes_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

FASTBERT_INLINE Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }

FASTBERT_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
FASTBERT_INLINE Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, lanes_below(n))}; }
FASTBERT_INLINE __m128i load_halves(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
FASTBERT_INLINE __m128i load_halves(const void* p, int n) {
  uint16_t buffer[8] = {};
  __builtin_memcpy(buffer, p, 2 * n);
  return load_halves(buffer);
}
FASTBERT_INLINE Vec from_bf16(__m128i bits) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
FASTBERT_INLINE Vec load(const bfloat16* p) { return from_bf16(load_halves(p)); }
FASTBERT_INLINE Vec load(const bfloat16* p, int n) { return from_bf16(load_halves(p, n)); }
FASTBERT_INLINE Vec load(const float16* p) { return {_mm256_cvtph_ps(load_halves(p))}; }
FASTBERT_INLINE Vec load(const float16* p, int n) { return {_mm256_cvtph_ps(load_halves(p, n))}; }

// To nearest, ties to even; NaN stays NaN.
FASTBERT_INLINE __m128i to_bf16(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}
FASTBERT_INLINE __m128i to_fp16(Vec x) {
  return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FASTBERT_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
FASTBERT_INLINE void store(float* p, Vec x, int n) { _mm256_maskstore_ps(p, lanes_below(n), x.v); }
FASTBERT_INLINE void store_halves(void* p, __m128i halves) {
  _mm_storeu_si128(static_cast<__m128i*>(p), halves);
}
FASTBERT_INLINE void store_halves(void* p, __m128i halves, int n) {
  uint16_t buffer[8];
  store_halves(buffer, halves);
  __builtin_memcpy(p, buffer, 2 * n);
}
FASTBERT_INLINE void store(bfloat16* p, Vec x) { store_halves(p, to_bf16(x)); }
FASTBERT_INLINE void store(bfloat16* p, Vec x, int n) { store_halves(p, to_bf16(x), n); }
FASTBERT_INLINE void store(float16* p, Vec x) { store_halves(p, to_fp16(x)); }
FASTBERT_INLINE void store(float16* p, Vec x, int n) { store_halves(p, to_fp16(x), n); }

// Whole numbers of 32 bits, and of 8.
FASTBERT_INLINE Vec load_whole(const void* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}
FASTBERT_INLINE Vec load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}
// To the nearest, ties to even.
FASTBERT_INLINE void store_int8(int8_t* p, Vec x, int n) {
  const __m256i whole = _mm256_cvtps_epi32(x.v);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  int8_t bytes[8];
  _mm_storel_epi64(reinterpret_cast<__m128i*>(bytes), _mm_packs_epi16(words, words));
  __builtin_memcpy(p, bytes, n);
}
FASTBERT_INLINE void store_int8(int8_t* p, Vec x) { store_int8(p, x, Vec::kLanes); }

FASTBERT_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
FASTBERT_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
// The second where one is NaN.
FASTBERT_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
FASTBERT_INLINE Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
FASTBERT_INLINE Vec round_to_int(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a 2^n for whole n in [-252, 254], in two steps: one exponent cannot hold them all.
FASTBERT_INLINE Vec times_power_of_two(Vec a, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, first), second)};
}
FASTBERT_INLINE Vec with_sign_of(Vec magnitude, Vec sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, magnitude.v), _mm256_and_ps(bit, sign.v))};
}

FASTBERT_INLINE Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
FASTBERT_INLINE bool any(Mask m) { return _mm256_movemask_ps(m.lanes) != 0; }
FASTBERT_INLINE Vec select(Mask m, Vec a, Vec b) { return {_mm256_blendv_ps(b.v, a.v, m.lanes)}; }
FASTBERT_INLINE Vec zero_unless(Mask m, Vec a) { return {_mm256_and_ps(m.lanes, a.v)}; }
FASTBERT_INLINE Vec first_lanes(Vec a, int n) {
  return {_mm256_and_ps(_mm256_castsi256_ps(lanes_below(n)), a.v)};
}
// Of elements [i, i + kLanes), i a multiple of kLanes.
FASTBERT_INLINE Mask mask_of_bits(const uint32_t* bits, int64_t i) {
  const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits[i / 32] >> (i % 32)));
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, lane_bit), lane_bit))};
}

FASTBERT_INLINE float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
FASTBERT_INLINE float largest(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
