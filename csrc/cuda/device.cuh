// What the kernels take from a GPU, under the names that cuda_on_cpu/cuda_on_cpu.h gives its own:
// numbers, shared memory, asynchronous copies and `launch`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

namespace fastbert {

using Stream = cudaStream_t;
using bf16 = __nv_bfloat16;
using fp16 = __half;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}

// --- shared memory ---

template <typename T>
using Shared = T*;

template <typename U, typename T>
__device__ __forceinline__ U* shared_cast(T* s) {
  return reinterpret_cast<U*>(s);
}

template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) char fastbert_dynamic_shared[];
  return reinterpret_cast<T*>(fastbert_dynamic_shared);
}

#define FASTBERT_SHARED(type, name, count)                                       \
  __shared__ __align__(alignof(type)) char name##_bytes[sizeof(type) * (count)]; \
  type* const name = reinterpret_cast<type*>(name##_bytes)

// --- asynchronous copies ---

// 16 bytes into shared memory, zeros from `valid` bytes on, past the first-level cache.
__device__ __forceinline__ void copy_async_16(Shared<char> to, const void* from, int valid = 16) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(valid));
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most this many of the thread's groups are in flight. Other threads' copies are
// there only after a barrier that follows their waits.
template <int kGroupsInFlight>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsInFlight) : "memory");
}

// One store of 16 bytes to global memory. Assigned as a struct, packs of halves were stored in four
// pieces (sm_80, sm_90).
__device__ __forceinline__ void store_16(void* to, const void* from) {
  uint4 w;
  memcpy(&w, from, sizeof w);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}

__device__ __forceinline__ void check_aligned(const void*, size_t) {}

// Ends the launch: what an index outside would read or write is somebody else's.
__device__ __forceinline__ void check_index(int64_t index, int64_t size) {
  if (index < 0 || index >= size) __trap();
}

// --- launching ---

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  const char* remedy = error == cudaErrorNoKernelImageForDevice
                           ? "; build fastbert again with TORCH_CUDA_ARCH_LIST for this GPU"
                           : "";
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) + remedy);
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            Stream stream, Arguments... arguments) {
  std::tuple<Parameters...> values(arguments...);
  const auto pointers = [](auto&... value) {
    return std::array<void*, sizeof...(value)>{&value...};
  };
  auto of_values = std::apply(pointers, values);
  const void* function = reinterpret_cast<const void*>(kernel);
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking) {
    check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               "asking for shared memory");
  }
  check_cuda(cudaLaunchKernel(function, grid, block, of_values.data(), shared_bytes, stream),
             "launching a CUDA kernel");
}

}  // namespace fastbert
