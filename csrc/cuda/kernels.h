// The interface of the CUDA kernels: one launcher for each, raw pointers and a stream in. Compiled
// by nvcc and by C++ compilers; the emulated build has the same.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(FASTBERT_CUDA_ON_CPU)
namespace fastbert {
using Stream = void*;
}
#else
#include <cuda_runtime_api.h>
namespace fastbert {
using Stream = cudaStream_t;
}
#endif

namespace fastbert {

enum class Dtype : int { kFloat, kBFloat16, kHalf };

struct ConstVector {
  const void* data;  // (columns,), null where there is none
  Dtype dtype;
};

struct Vector {
  void* data;  // (columns,), null where none is wanted
  Dtype dtype;
};

// The dropout of rows (docs/dropout.md); nothing is dropped, or read, with a threshold of 0.
struct Dropout {
  const int64_t* rng_state;  // (2,), on the device
  uint32_t site;
  uint32_t threshold;
  float scale;
};

}  // namespace fastbert
