// The vector of whatever at::vec was compiled for: NEON and SVE on ARM, plain loops on a baseline
// x86. Included inside a namespace.

using Native = at::vec::Vectorized<float>;

struct Vec {
  static constexpr int kLanes = Native::size();
  Native v;
};

struct Mask {
  Native lanes;  // all bits set, or none
};

FASTBERT_INLINE Vec broadcast(float x) { return {Native(x)}; }

FASTBERT_INLINE float to_float(float x) { return x; }
FASTBERT_INLINE float to_float(bfloat16 x) { return c10::detail::f32_from_bits(x.bits); }
FASTBERT_INLINE float to_float(float16 x) { return c10::detail::fp16_ieee_to_fp32_value(x.bits); }
FASTBERT_INLINE void assign(float* p, float x) { *p = x; }
FASTBERT_INLINE void assign(bfloat16* p, float x) {
  p->bits = c10::detail::round_to_nearest_even(x);
}
FASTBERT_INLINE void assign(float16* p, float x) {
  p->bits = c10::detail::fp16_ieee_from_fp32_value(x);
}

template <typename T>
FASTBERT_INLINE Vec load(const T* p, int n) {
  float buffer[Vec::kLanes] = {};
  for (int i = 0; i < n; ++i) buffer[i] = to_float(p[i]);
  return {Native::loadu(buffer)};
}
template <typename T>
FASTBERT_INLINE Vec load(const T* p) {
  return load(p, Vec::kLanes);
}
template <typename T>
FASTBERT_INLINE void store(T* p, Vec x, int n) {
  float buffer[Vec::kLanes];
  x.v.store(buffer);
  for (int i = 0; i < n; ++i) assign(p + i, buffer[i]);
}
template <typename T>
FASTBERT_INLINE void store(T* p, Vec x) {
  store(p, x, Vec::kLanes);
}

// Whole numbers of 32 bits, and of 8.
FASTBERT_INLINE Vec load_whole(const void* p) {
  int32_t whole[Vec::kLanes];
  float lanes[Vec::kLanes];
  __builtin_memcpy(whole, p, sizeof(whole));
  for (int i = 0; i < Vec::kLanes; ++i) lanes[i] = static_cast<float>(whole[i]);
  return {Native::loadu(lanes)};
}
FASTBERT_INLINE Vec load_int8(const int8_t* p) {
  float lanes[Vec::kLanes];
  for (int i = 0; i < Vec::kLanes; ++i) lanes[i] = static_cast<float>(p[i]);
  return {Native::loadu(lanes)};
}
// To the nearest, ties to even.
FASTBERT_INLINE void store_int8(int8_t* p, Vec x, int n) {
  float lanes[Vec::kLanes];
  x.v.round().store(lanes);
  for (int i = 0; i < n; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
FASTBERT_INLINE void store_int8(int8_t* p, Vec x) { store_int8(p, x, Vec::kLanes); }

FASTBERT_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
FASTBERT_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
FASTBERT_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
FASTBERT_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
FASTBERT_INLINE Vec fma(Vec a, Vec b, Vec c) { return {at::vec::fmadd(a.v, b.v, c.v)}; }
FASTBERT_INLINE Vec fnma(Vec a, Vec b, Vec c) { return {c.v - a.v * b.v}; }
FASTBERT_INLINE Vec max(Vec a, Vec b) { return {at::vec::maximum(a.v, b.v)}; }
FASTBERT_INLINE Vec min(Vec a, Vec b) { return {at::vec::minimum(a.v, b.v)}; }
FASTBERT_INLINE Vec abs(Vec a) { return {a.v.abs()}; }
FASTBERT_INLINE Vec round_to_int(Vec a) { return {a.v.round()}; }

template <typename F>
FASTBERT_INLINE Vec each_lane(Vec a, Vec b, const F& f) {
  float x[Vec::kLanes], y[Vec::kLanes];
  a.v.store(x);
  b.v.store(y);
  for (int i = 0; i < Vec::kLanes; ++i) x[i] = f(x[i], y[i]);
  return {Native::loadu(x)};
}
FASTBERT_INLINE float power_of_two(int n) {
  const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
// a 2^n for whole n in [-252, 254], in two steps: one exponent cannot hold them all.
FASTBERT_INLINE Vec times_power_of_two(Vec a, Vec n) {
  return each_lane(a, n, [](float x, float whole) {
    // NaN has no whole part to convert.
    const int exponent = whole == whole ? static_cast<int>(whole) : 0;
    const int half = exponent >> 1;
    return x * power_of_two(half) * power_of_two(exponent - half);
  });
}
FASTBERT_INLINE Vec with_sign_of(Vec magnitude, Vec sign) {
  return each_lane(magnitude, sign, [](float m, float s) { return __builtin_copysignf(m, s); });
}

FASTBERT_INLINE Mask less(Vec a, Vec b) { return {a.v < b.v}; }
FASTBERT_INLINE bool any(Mask m) {
  uint32_t lanes[Vec::kLanes], found = 0;
  m.lanes.store(lanes);
  for (uint32_t lane : lanes) found |= lane;
  return found != 0;
}
FASTBERT_INLINE Vec select(Mask m, Vec a, Vec b) { return {Native::blendv(b.v, a.v, m.lanes)}; }
FASTBERT_INLINE Vec zero_unless(Mask m, Vec a) { return select(m, a, broadcast(0.0f)); }
FASTBERT_INLINE Vec first_lanes(Vec a, int n) { return {Native::set(Native(0.0f), a.v, n)}; }
// Of elements [i, i + kLanes), i a multiple of kLanes.
FASTBERT_INLINE Mask mask_of_bits(const uint32_t* bits, int64_t i) {
  float lanes[Vec::kLanes];
  for (int lane = 0; lane < Vec::kLanes; ++lane) {
    lanes[lane] = static_cast<float>((bits[(i + lane) / 32] >> ((i + lane) % 32)) & 1u);
  }
  return {Native::loadu(lanes) > Native(0.5f)};
}

FASTBERT_INLINE float sum(Vec a) {
  float lanes[Vec::kLanes], total = 0.0f;
  a.v.store(lanes);
  for (float lane : lanes) total += lane;
  return total;
}
FASTBERT_INLINE float largest(Vec a) {
  float lanes[Vec::kLanes];
  a.v.store(lanes);
  float best = lanes[0];
  for (float lane : lanes) best = lane > best ? lane : best;
  return best;
}
