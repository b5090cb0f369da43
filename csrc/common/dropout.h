// A probability as docs/dropout.md has it: the threshold of the bits, and the scale of what stays.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/philox.h"

namespace fastbert {

inline uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(std::floor(p * 65536.0 + 0.5));
}

inline float dropout_scale(uint32_t threshold) {
  return threshold >= kKeepNone ? 0.0f : static_cast<float>(65536.0 / (65536.0 - threshold));
}

}  // namespace fastbert
