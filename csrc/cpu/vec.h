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

// erf(x), with exp(-x^2) given: x P(x^2) below 1, 1 - exp(-x^2) R(x) above, where R is fitted on
// [1, 4.2] and erf is 1 beyond. Both fits are closer than 5e-10; neither divides, a division
// costs as much as the rest.
FASTBERT_INLINE float erf_float(float x, float exp_minus_square) {
  const float a = std::fabs(x);
  const float t = x * x;
  float p = -9.641568794904742e-06f;
  p = p * t + 0.00011256967991357669f;
  p = p * t - 0.0008482831763103604f;
  p = p * t + 0.005220945458859205f;
  p = p * t - 0.0268654003739357f;
  p = p * t + 0.11283782124519348f;
  p = p * t - 0.37612637877464294f;
  const float near = a * 1.128379225730896f + a * t * p;
  const float s = a * 0.625f - 1.625f;
  float r = -0.0019237654050812125f;
  r = r * s - 0.0035637477412819862f;
  r = r * s - 0.005167651455849409f;
  r = r * s + 0.0018421021522954106f;
  r = r * s - 0.005737311206758022f;
  r = r * s + 0.01457828376442194f;
  r = r * s - 0.028888531029224396f;
  r = r * s + 0.05804680287837982f;
  r = r * s - 0.11134994029998779f;
  r = r * s + 0.20361293852329254f;
  float y = 1.0f - exp_minus_square * r;
  y = a < 4.2f ? y : 1.0f;
  y = a < 1.0f ? near : y;
  y = x != x ? x : y;
  return std::copysign(y, x);
}

}  // namespace fastbert
