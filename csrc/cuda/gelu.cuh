// GELU and its slope, exact or by tanh, and the shape of the kernels that apply it: a thread keeps
// to some columns and goes down the rows, so that their bias is read once.
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

constexpr int kLanes = 32, kSlices = 8;
constexpr int kBlockColumns = kLanes * kChunk;
constexpr int64_t kMostBlocksDown = 65535;

__device__ __forceinline__ int64_t thread_column() {
  return (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * kChunk;
}

// Calls f with a number of the type, and the two switches as std::bool_constant.
template <typename Arguments, typename F>
void with_variant(const Arguments& a, F f) {
  const auto with_type = [&](auto number) {
    const auto with_form = [&](auto erf) {
      if (a.wide) return f(number, erf, std::true_type());
      f(number, erf, std::false_type());
    };
    if (a.erf) return with_form(std::true_type());
    with_form(std::false_type());
  };
  if (a.dtype == Dtype::kFloat) return with_type(float());
  if (a.dtype == Dtype::kBFloat16) return with_type(bf16());
  with_type(fp16());
}

template <typename Arguments>
dim3 grid_of(const Arguments& a, int64_t down) {
  return dim3(static_cast<unsigned>(ceil_div(a.columns, kBlockColumns)),
              static_cast<unsigned>(down < kMostBlocksDown ? down : kMostBlocksDown));
}

}  // namespace fastbert
