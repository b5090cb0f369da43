// GELU and its slope, exact or by tanh, for the kernels that apply it.
#pragma once

#include "cuda/common.cuh"

namespace fastbert {

// (1 + tanh z) / 2 and its complement, each accurate where it is small.
struct TanhHalves {
  float value, complement;

  explicit __device__ __forceinline__ TanhHalves(float u) {
    const float z = 0.7978845608028654f * (u + 0.044715f * u * u * u);
    const float e = expf(-2.0f * fabsf(z));
    const float large = 1.0f / (1.0f + e), small = e * large;
    value = z < 0.0f ? small : large;
    complement = z < 0.0f ? large : small;
  }
};

template <bool kErf>
__device__ __forceinline__ float gelu(float u) {
  if constexpr (kErf) return 0.5f * u * (1.0f + erff(u * 0.7071067811865476f));
  return u * TanhHalves(u).value;
}

template <bool kErf>
__device__ __forceinline__ float gelu_gradient(float u) {
  if constexpr (kErf) {
    const float cdf = 0.5f * (1.0f + erff(u * 0.7071067811865476f));
    return cdf + u * 0.3989422804014327f * expf(-0.5f * u * u);
  }
  const TanhHalves s(u);
  const float dz = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * u * u);
  return s.value + u * 2.0f * s.value * s.complement * dz;
}

}  // namespace fastbert
