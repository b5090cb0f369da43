// Elementary functions as plain inline code that compilers vectorise, and the choice of the
// instruction set at run time.
//
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// One copy of the function per instruction set, chosen by the loader. Only on free functions that
// are no templates: the resolver needs one symbol.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTBERT_EACH_ISA \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FASTBERT_EACH_ISA
#endif
#define FASTBERT_INLINE inline __attribute__((always_inline))

namespace fastbert {

// Elements converted, computed and stored in one go; a block of three float buffers stays in L1.
constexpr int64_t kBlock = 512;

FASTBERT_INLINE float power_of_two(int32_t n) {
  const int32_t bits = (n + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// exp(x) for x <= 0: x = n ln2 + r with |r| <= ln2/2, a polynomial in r, then 2^n. 0 below -87.3,
// where floats stop being normal. NaN in, NaN out.
FASTBERT_INLINE float exp_negative(float x) {
  const float low = -87.33654f;
  const float clamped = x < low ? low : x;
  const float n = std::nearbyintf(clamped * 1.44269504f);
  float r = clamped - n * 0.693145752f;  // ln2 in two parts, the first exact for |n| < 2^9
  r -= n * 1.42860677e-6f;
  float p = 0.0013836845755577087f;
  p = p * r + 0.008374815806746483f;
  p = p * r + 0.04166822507977486f;
  p = p * r + 0.16666419804096222f;
  p = p * r + 0.49999991059303284f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float y = p * power_of_two(static_cast<int32_t>(n));
  return x < low ? 0.0f : y;
}

// The distribution function of the normal law, with density_part = exp(-x^2/2) given: one half
// exp(-z^2) R(z) at -|x|, z = |x|/sqrt(2), and its complement above 0. R = exp(z^2) erfc(z) is
// fitted on [0, 4] to 1.4e-8 of its weight there and held beyond, where the product is under 1e-8.
// No division, which would cost as much as the rest.
FASTBERT_INLINE float normal_cdf(float x, float density_part) {
  const float z = std::fabs(x) * 0.70710678118654752f;
  const float s = (z > 4.0f ? 4.0f : z) * 0.5f - 1.0f;
  float r = -0.005513420794159174f;
  r = r * s + 0.0003581135824788362f;
  r = r * s + 0.009083813987672329f;
  r = r * s + 0.010840378701686859f;
  r = r * s - 0.01914057694375515f;
  r = r * s + 0.006530424579977989f;
  r = r * s - 0.01965305209159851f;
  r = r * s + 0.041872814297676086f;
  r = r * s - 0.058913446962833405f;
  r = r * s + 0.08624401688575745f;
  r = r * s - 0.12378139048814774f;
  r = r * s + 0.1672559678554535f;
  r = r * s - 0.21358445286750793f;
  r = r * s + 0.2553957402706146f;
  const float below = 0.5f * density_part * r;
  return x > 0.0f ? 1.0f - below : below;
}

}  // namespace fastbert
