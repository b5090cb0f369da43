// Memory for temporaries, taken from a pool: fresh pages cost more than the kernels that write
// them.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>

namespace fastbert {

// At least `bytes` bytes, aligned to 64, given back to the pool at the end of its scope. In torch's
// deterministic mode it is filled with NaN, as `torch.empty` is.
class Workspace {
 public:
  explicit Workspace(int64_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
  size_t size_;
};

// Frees what the pool keeps for later.
void empty_pool();

// `at::empty`, with memory from the pool where it is large.
at::Tensor empty_from_pool(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace fastbert
