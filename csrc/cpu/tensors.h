// From tensors to what the kernels take. Included by the op files only.
#pragma once

#include <ATen/ATen.h>

#include "common/dropout.h"
#include "common/tensors.h"
#include "cpu/kernels.h"

namespace fastbert {

// A vector of parameters in fp32; undefined where there is none.
inline at::Tensor float_vector(const std::optional<at::Tensor>& t, int64_t size, const char* op,
                               const char* name) {
  if (!t.has_value()) return {};
  check_vector(*t, size, op, name);
  return t->to(at::kFloat).contiguous();
}

inline Gelu gelu_of(std::string_view approximate, const char* op) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh", op,
                    ": approximate must be 'none' or 'tanh', got '", approximate, "'");
  return approximate == "none" ? Gelu::kErf : Gelu::kTanh;
}

inline const float* data_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<float>() : nullptr;
}

inline DropoutStream stream_of(const at::Tensor& rng_state, uint32_t threshold, int64_t site) {
  TORCH_CHECK_VALUE(rng_state.numel() == 2 && rng_state.scalar_type() == at::kLong,
                    "rng_state must be int64 of shape (2,), got ", rng_state.scalar_type(),
                    " of shape ", rng_state.sizes());
  const at::Tensor state = rng_state.contiguous();
  const int64_t* values = state.const_data_ptr<int64_t>();
  return dropout_stream(values[0], values[1], static_cast<uint32_t>(site), threshold);
}

inline RowDropout row_dropout(double p, int64_t site, const std::optional<at::Tensor>& rng_state) {
  const uint32_t threshold = dropout_threshold(p);
  if (threshold == 0) return {DropoutStream{}, 1.0f};
  TORCH_CHECK_VALUE(rng_state.has_value(), "rng_state is required where dropout_p > 0");
  return {stream_of(*rng_state, threshold, site), dropout_scale(threshold)};
}

}  // namespace fastbert
