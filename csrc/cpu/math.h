// Elementary functions on Vec, and loops over rows of any length. Included inside a namespace.

// body(i, part) for the vectors of [0, n); part loads and stores whole vectors, or those lanes of
// the last one that exist, with zeros in the others.
struct WholeVec {
  template <typename T>
  FASTBERT_INLINE Vec load(const T* p) const {
    return ISA::load(p);
  }
  template <typename T>
  FASTBERT_INLINE void store(T* p, Vec x) const {
    ISA::store(p, x);
  }
  FASTBERT_INLINE void store_int8(int8_t* p, Vec x) const { ISA::store_int8(p, x); }
  FASTBERT_INLINE Vec only(Vec x) const { return x; }
};

struct PartOfVec {
  int count;
  template <typename T>
  FASTBERT_INLINE Vec load(const T* p) const {
    return ISA::load(p, count);
  }
  template <typename T>
  FASTBERT_INLINE void store(T* p, Vec x) const {
    ISA::store(p, x, count);
  }
  FASTBERT_INLINE void store_int8(int8_t* p, Vec x) const { ISA::store_int8(p, x, count); }
  FASTBERT_INLINE Vec only(Vec x) const { return first_lanes(x, count); }
};

// Several vectors side by side. A long chain of operations on one vector leaves the machine waiting
// for each result; on a pack every operation is issued for all its vectors in turn.
struct Pack {
  static constexpr int kVecs = 4, kLanes = kVecs * Vec::kLanes;
  Vec v[kVecs];
};

struct PackMask {
  Mask m[Pack::kVecs];
};

#define FASTBERT_EACH_VEC(result, expression)                               \
  result r;                                                                 \
  _Pragma("GCC unroll 4") for (int i = 0; i < Pack::kVecs; ++i) expression; \
  return r

FASTBERT_INLINE Pack operator+(Pack a, Pack b) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = a.v[i] + b.v[i]);
}
FASTBERT_INLINE Pack operator-(Pack a, Pack b) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = a.v[i] - b.v[i]);
}
FASTBERT_INLINE Pack operator*(Pack a, Pack b) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = a.v[i] * b.v[i]);
}
FASTBERT_INLINE Pack operator/(Pack a, Pack b) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = a.v[i] / b.v[i]);
}
FASTBERT_INLINE Pack fma(Pack a, Pack b, Pack c) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = fma(a.v[i], b.v[i], c.v[i]));
}
FASTBERT_INLINE Pack fnma(Pack a, Pack b, Pack c) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = fnma(a.v[i], b.v[i], c.v[i]));
}
FASTBERT_INLINE Pack max(Pack a, Pack b) { FASTBERT_EACH_VEC(Pack, r.v[i] = max(a.v[i], b.v[i])); }
FASTBERT_INLINE Pack min(Pack a, Pack b) { FASTBERT_EACH_VEC(Pack, r.v[i] = min(a.v[i], b.v[i])); }
FASTBERT_INLINE Pack abs(Pack a) { FASTBERT_EACH_VEC(Pack, r.v[i] = abs(a.v[i])); }
FASTBERT_INLINE Pack round_to_int(Pack a) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = round_to_int(a.v[i]));
}
FASTBERT_INLINE Pack times_power_of_two(Pack a, Pack n) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = times_power_of_two(a.v[i], n.v[i]));
}
FASTBERT_INLINE Pack with_sign_of(Pack a, Pack b) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = with_sign_of(a.v[i], b.v[i]));
}
FASTBERT_INLINE PackMask less(Pack a, Pack b) {
  FASTBERT_EACH_VEC(PackMask, r.m[i] = less(a.v[i], b.v[i]));
}
FASTBERT_INLINE Pack select(PackMask m, Pack a, Pack b) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = select(m.m[i], a.v[i], b.v[i]));
}

#if defined(FASTBERT_AVX512)
FASTBERT_INLINE Pack above_floor(Pack a) { FASTBERT_EACH_VEC(Pack, r.v[i] = above_floor(a.v[i])); }
FASTBERT_INLINE Pack look_up(const float* table, Pack index) {
  FASTBERT_EACH_VEC(Pack, r.v[i] = look_up(table, index.v[i]));
}
#endif

#undef FASTBERT_EACH_VEC

FASTBERT_INLINE Vec total(Vec v) { return v; }
FASTBERT_INLINE Vec total(Pack p) { return (p.v[0] + p.v[1]) + (p.v[2] + p.v[3]); }

template <typename V>
FASTBERT_INLINE V constant(float x) {
  if constexpr (V::kLanes == Vec::kLanes) {
    return broadcast(x);
  } else {
    return {broadcast(x), broadcast(x), broadcast(x), broadcast(x)};
  }
}

struct WholePack {
  FASTBERT_INLINE Pack only(Pack x) const { return x; }
  template <typename T>
  FASTBERT_INLINE Pack load(const T* p) const {
    Pack r;
#pragma GCC unroll 4
    for (int i = 0; i < Pack::kVecs; ++i) r.v[i] = ISA::load(p + i * Vec::kLanes);
    return r;
  }
  template <typename T>
  FASTBERT_INLINE void store(T* p, Pack x) const {
#pragma GCC unroll 4
    for (int i = 0; i < Pack::kVecs; ++i) ISA::store(p + i * Vec::kLanes, x.v[i]);
  }
};

template <typename Body>
FASTBERT_INLINE void for_each_vec(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) body(i, WholeVec{});
  if (i < n) body(i, PartOfVec{static_cast<int>(n - i)});
}

// The same in packs, then in vectors.
template <typename Body>
FASTBERT_INLINE void for_each_pack(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + Pack::kLanes <= n; i += Pack::kLanes) body(i, WholePack{});
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) body(i, WholeVec{});
  if (i < n) body(i, PartOfVec{static_cast<int>(n - i)});
}

FASTBERT_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FASTBERT_INLINE int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

template <typename V>
FASTBERT_INLINE V polynomial(V, V p) {
  return p;
}
template <typename V, typename... Rest>
FASTBERT_INLINE V polynomial(V x, V p, float next, Rest... rest) {
  return polynomial(x, fma(p, x, constant<V>(next)), rest...);
}

// exp(x) to 1 ulp, subnormal results included: x = n ln2 + r with |r| <= ln2/2 and ln2 in two
// parts, the first exact in the product; exp(r) = 1 + r + r^2 Q(r), Q fitted to 3.1e-9 of exp(r).
template <typename V>
FASTBERT_INLINE V exp(V x) {
  // Beyond these all is 0 or infinity; NaN, the first argument, passes the second test only.
  const V bounded = max(constant<V>(-105.0f), min(constant<V>(89.5f), x));
  const V n = round_to_int(bounded * constant<V>(1.44269504f));
  V r = fnma(n, constant<V>(0.693145752f), bounded);
  r = fnma(n, constant<V>(1.42860677e-6f), r);
  const V q = polynomial(r, constant<V>(0.0013950478751212358f), 0.008368884213268757f,
                         0.04166620597243309f, 0.166665181517601f, 0.5f);
  return times_power_of_two(fma(r * r, q, r) + constant<V>(1.0f), n);
}

// erf(z) for |z| <= 1.02, an odd polynomial to 1.6e-9: z and the smaller rest of it, so that the
// rounding of the rest does not show.
template <typename V>
FASTBERT_INLINE V erf_near_zero(V z) {
  const V s = z * z;
  const V rest = polynomial(s, constant<V>(7.758136052871123e-05f), -0.0007984188850969076f,
                            0.0051857223734259605f, -0.02685263566672802f, 0.11283561587333679f,
                            -0.376126229763031f, 0.12837916637f);
  return fma(z, rest, z);
}

// erfc(z) for z >= 0.98 with exp(-z^2) given: exp(z^2) erfc(z) is fitted on [0.98, 4] to 3.2e-8 of
// itself and held beyond, where erfc is under 1.6e-8. No division, which would cost as much as the
// rest.
template <typename V>
FASTBERT_INLINE V erfc_above(V z, V exp_of_minus_square) {
  const V s = fma(min(constant<V>(4.0f), z), constant<V>(0.66225166f), constant<V>(-1.64900662f));
  const V r = polynomial(s, constant<V>(-3.8310572563204914e-05f), 0.00010624588321661577f,
                         -0.00016399429296143353f, 0.0003966715303249657f, -0.001081758295185864f,
                         0.0025747674517333508f, -0.005858836229890585f, 0.013012475334107876f,
                         -0.027891196310520172f, 0.05741233006119728f, -0.11302126944065094f,
                         0.21155233681201935f);
  return exp_of_minus_square * r;
}

// erf(x) to 2 ulp.
template <typename V>
FASTBERT_INLINE V erf(V x) {
  const V z = abs(x);
  const V far = constant<V>(1.0f) - erfc_above(z, exp(constant<V>(0.0f) - z * z));
  return select(less(z, constant<V>(1.0f)), erf_near_zero(x), with_sign_of(far, x));
}

// The distribution function of the normal law, (1 + erf(x / sqrt 2)) / 2, with exp(-x^2 / 2) given;
// its small values are those of erfc, so they keep their digits down to 1e-8.
template <typename V>
FASTBERT_INLINE V normal_cdf(V x, V exp_of_minus_half_square) {
  const V z = abs(x) * constant<V>(0.70710678f);
  const V half = constant<V>(0.5f), tail = half * erfc_above(z, exp_of_minus_half_square);
  const V far = select(less(x, constant<V>(0.0f)), tail, constant<V>(1.0f) - tail);
  const V near = fma(half, erf_near_zero(x * constant<V>(0.70710678f)), half);
  return select(less(z, constant<V>(1.0f)), near, far);
}

// The same two to 6e-6 of exp(x), x <= 0, and 5e-7 in x Phi(x): for results that are rounded to
// bf16, at two thirds of the operations.
template <typename V>
FASTBERT_INLINE V brief_exp(V x) {
  const V bounded = max(constant<V>(-105.0f), x);
  const V n = round_to_int(bounded * constant<V>(1.44269504f));
  const V r = fnma(n, constant<V>(0.69314718f), bounded);
  const V q =
      polynomial(r, constant<V>(0.041921161115169525f), 0.1675388664007187f, 0.49998950958251953f);
  return times_power_of_two(fma(r * r, q, r) + constant<V>(1.0f), n);
}

#if defined(FASTBERT_AVX512)
// 2^x to 3e-6 of itself: 2^floor(x) times a polynomial of the rest, 1 where that is 0.
template <typename V>
FASTBERT_INLINE V brief_exp2(V x) {
  const V power = polynomial(above_floor(x), constant<V>(0.013426685531009272f),
                             0.05224247220066702f, 0.24128020569777747f, 0.6930448447834588f, 1.0f);
  return times_power_of_two(power, x);
}
#endif

template <typename V>
FASTBERT_INLINE V brief_normal_cdf(V x, V exp_of_minus_half_square) {
  const V s = fma(min(constant<V>(4.5f), abs(x)), constant<V>(0.44444444f), constant<V>(-1.0f));
  const V r = polynomial(s, constant<V>(-0.009826168417930603f), -0.0023641164880245924f,
                         0.0003833560913335532f, 0.020275453105568886f, -0.021870212629437447f,
                         0.03372563049197197f, -0.05773882567882538f, 0.08593103289604187f,
                         -0.11972803622484207f, 0.15365168452262878f);
  const V tail = exp_of_minus_half_square * r;
  return select(less(x, constant<V>(0.0f)), tail, constant<V>(1.0f) - tail);
}
