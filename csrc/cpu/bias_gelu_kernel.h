// GELU(x + bias) and its gradient, in fp32 around the dtype's loads and stores. Included inside a
// namespace.

constexpr float kInvSqrtTwoPi = 0.39894228040143268f;
constexpr float kTanhScale = 0.79788456080286536f;  // sqrt(2 / pi)
constexpr float kTanhCubic = 0.044715f;

#if defined(FASTBERT_AVX512)

// f(|u|) from its table; the low bits of a float near 1.5 2^23 are those of the piece's number.
template <int kDegree, typename V>
FASTBERT_INLINE V in_pieces(const NormalTable<kDegree>& f, V u) {
  const V place = min(constant<V>(31.0f), abs(u) * constant<V>(kNormalPieces));
  const V bits = place + constant<V>(12582912.0f);
  const V t = place - (bits - constant<V>(12582912.0f));
  V value = look_up(f.terms[kDegree], bits);
#pragma GCC unroll 6
  for (int d = kDegree - 1; d >= 0; --d) value = fma(value, t, look_up(f.terms[d], bits));
  return value;
}

template <typename T>
FASTBERT_INLINE const auto& normal_tables() {
  if constexpr (is_bfloat16<T>) {
    return kBriefNormal;
  } else {
    return kNormal;
  }
}

// f(u) where f(-|u|) is given and f(u) + f(-u) = 1.
template <typename V>
FASTBERT_INLINE V with_other_half(V u, V lower) {
  return select(less(u, constant<V>(0.0f)), lower, constant<V>(1.0f) - lower);
}

template <typename T, typename V>
FASTBERT_INLINE V gelu_erf(V u) {
  return u * with_other_half(u, in_pieces(normal_tables<T>().tail, u));
}

template <typename T, typename V>
FASTBERT_INLINE V gelu_erf_slope(V u) {
  const V slope = with_other_half(u, in_pieces(normal_tables<T>().slope, u));
  // NaN at infinities, as u phi(u) is.
  return fma(constant<V>(0.0f), u, slope);
}

#else

// Phi(u), and exp(-u^2 / 2) on the way, as exactly as T can hold.
template <typename V>
struct Normal {
  V cdf, exp_of_minus_half_square;
};

template <typename T, typename V>
FASTBERT_INLINE Normal<V> normal_of(V u) {
  const V minus_half_square = constant<V>(-0.5f) * u * u;
  if constexpr (is_bfloat16<T>) {
    const V e = brief_exp(minus_half_square);
    return {brief_normal_cdf(u, e), e};
  } else {
    const V e = exp(minus_half_square);
    return {normal_cdf(u, e), e};
  }
}

template <typename T, typename V>
FASTBERT_INLINE V gelu_erf(V u) {
  return u * normal_of<T>(u).cdf;
}

// Phi(u) + u phi(u)
template <typename T, typename V>
FASTBERT_INLINE V gelu_erf_slope(V u) {
  const Normal<V> n = normal_of<T>(u);
  return fma(u * constant<V>(kInvSqrtTwoPi), n.exp_of_minus_half_square, n.cdf);
}

#endif

// (1 + tanh z) / 2 and its complement, each accurate where it is small.
template <typename V>
struct Halves {
  V of_tanh, complement;
};

template <typename V>
FASTBERT_INLINE Halves<V> tanh_halves(V z) {
  const V e = exp(constant<V>(-2.0f) * abs(z));
  const V large = constant<V>(1.0f) / (constant<V>(1.0f) + e), small = e * large;
  const auto negative = less(z, constant<V>(0.0f));
  return {select(negative, small, large), select(negative, large, small)};
}

template <typename V>
FASTBERT_INLINE V tanh_argument(V u) {
  return constant<V>(kTanhScale) * fma(constant<V>(kTanhCubic) * u * u, u, u);
}

template <typename V>
FASTBERT_INLINE V gelu_tanh(V u) {
  return u * tanh_halves(tanh_argument(u)).of_tanh;
}

template <typename V>
FASTBERT_INLINE V gelu_tanh_slope(V u) {
  const Halves<V> s = tanh_halves(tanh_argument(u));
  const V slope =
      constant<V>(kTanhScale) * fma(constant<V>(3.0f * kTanhCubic) * u, u, constant<V>(1.0f));
  return fma(u * constant<V>(2.0f) * s.of_tanh * s.complement, slope, s.of_tanh);
}

template <typename T, bool kErf, typename V>
FASTBERT_INLINE V gelu(V u) {
  return kErf ? gelu_erf<T>(u) : gelu_tanh(u);
}
template <typename T, bool kErf, typename V>
FASTBERT_INLINE V gelu_slope(V u) {
  return kErf ? gelu_erf_slope<T>(u) : gelu_tanh_slope(u);
}

template <typename T, bool kErf>
void bias_gelu_fwd_rows(const BiasGelu& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.columns;
    T* y = static_cast<T*>(a.out) + row * a.columns;
    for_each_pack(a.columns, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      auto u = part.load(x + i);
      if (a.bias != nullptr) u = u + part.load(a.bias + i);
      part.store(y + i, gelu<T, kErf>(u));
    });
  }
}

template <typename T, bool kErf>
void bias_gelu_bwd_rows(const BiasGelu& a, int64_t begin, int64_t end, float* dbias) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * a.columns;
    const T *x = static_cast<const T*>(a.x) + offset, *dy = static_cast<const T*>(a.dy) + offset;
    T* dx = static_cast<T*>(a.out) + offset;
    for_each_pack(a.columns, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      auto u = part.load(x + i);
      if (a.bias != nullptr) u = u + part.load(a.bias + i);
      const auto d = part.load(dy + i) * gelu_slope<T, kErf>(u);
      part.store(dx + i, d);
      if (dbias != nullptr) part.store(dbias + i, part.load(dbias + i) + d);
    });
  }
}

void bias_gelu_fwd(const BiasGelu& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    (a.erf ? bias_gelu_fwd_rows<T, true> : bias_gelu_fwd_rows<T, false>)(a, begin, end);
  });
}

void bias_gelu_bwd(const BiasGelu& a, int64_t begin, int64_t end, float* dbias) {
  with_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    (a.erf ? bias_gelu_bwd_rows<T, true> : bias_gelu_bwd_rows<T, false>)(a, begin, end, dbias);
  });
}
