// From tensors to what the launchers of cuda/kernels.h take. The same source is compiled for CUDA
// tensors and, with FASTBERT_CUDA_ON_CPU, for the emulation, whose tensors are a CPU's.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "common/dropout.h"
#include "common/tensors.h"
#include "cuda/kernels.h"

#if defined(FASTBERT_CUDA_ON_CPU)
#define FASTBERT_CUDA_OP(name) name##_cuda_emulated
#else
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#define FASTBERT_CUDA_OP(name) name##_cuda
#endif

namespace fastbert {

// Launches go to the device of the tensors and to the stream that is current there.
#if defined(FASTBERT_CUDA_ON_CPU)
class DeviceGuard {
 public:
  explicit DeviceGuard(const at::Tensor&) {}
  Stream stream() const { return nullptr; }
};
#else
class DeviceGuard {
 public:
  explicit DeviceGuard(const at::Tensor& t) : guard_(t.device()) {}
  Stream stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

 private:
  c10::cuda::CUDAGuard guard_;
};
#endif

// A vector of parameters, of any of the dtypes; the tensor that holds it must outlive the launch.
inline at::Tensor vector_of(const std::optional<at::Tensor>& t, int64_t size, const char* op,
                            const char* name) {
  if (!t.has_value()) return {};
  check_vector(*t, size, op, name);
  return t->contiguous();
}

inline ConstVector const_vector(const at::Tensor& t, const char* op) {
  if (!t.defined()) return {nullptr, Dtype::kFloat};
  return {t.const_data_ptr(), dtype_of(t, op)};
}

inline Vector mutable_vector(const at::Tensor& t, const char* op) {
  return {t.mutable_data_ptr(), dtype_of(t, op)};
}

inline const void* data_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr() : nullptr;
}

// Whether rows of `columns` are whole chunks of eight on 16-byte boundaries in all of the tensors.
inline bool are_wide(int64_t columns, std::initializer_list<at::Tensor> tensors) {
  if (columns % 8 != 0) return false;
  for (const at::Tensor& t : tensors) {
    if (reinterpret_cast<uintptr_t>(data_or_null(t)) % 16 != 0) return false;
  }
  return true;
}

inline Dropout dropout_of_threshold(uint32_t threshold, int64_t site, const at::Tensor& rng_state) {
  if (threshold == 0) return {nullptr, 0, 0, 1.0f};
  TORCH_CHECK_VALUE(rng_state.defined() && rng_state.numel() == 2 &&
                        rng_state.scalar_type() == at::kLong && rng_state.is_contiguous(),
                    "rng_state must be contiguous int64 of shape (2,) where dropout_p > 0");
  return {rng_state.const_data_ptr<int64_t>(), static_cast<uint32_t>(site), threshold,
          dropout_scale(threshold)};
}

inline Dropout dropout_of(double p, int64_t site, const at::Tensor& rng_state) {
  return dropout_of_threshold(dropout_threshold(p), site, rng_state);
}

// Sums fp32 (vectors, parts, columns) over the parts into the vectors given.
inline void sum_parts(const at::Tensor& partial, const std::vector<at::Tensor>& out, const char* op,
                      Stream stream) {
  SumParts a{partial.const_data_ptr<float>(),
             partial.size(1),
             partial.size(2),
             static_cast<int>(out.size()),
             {}};
  if (a.columns == 0) return;
  for (size_t i = 0; i < out.size(); ++i) a.out[i] = mutable_vector(out[i], op);
  launch_sum_parts(a, stream);
}

}  // namespace fastbert
