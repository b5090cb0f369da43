// CUDA's language on a CPU, for tests: with this header in the place of nvcc's own the sources of
// csrc/cuda compile with g++ and run. Nothing here is fast, everything is checked.
//
// - Blocks run one after another; the threads of a block are fibers that change places where they
//   wait for one another, in the order of their numbers or, under `set_schedule`, in a random one.
// - __syncthreads, __syncwarp, shuffles and votes wait for exactly the threads they name. Threads
//   that meet at different calls, or wait for one that has ended, end the launch with an exception
//   that names file and line.
// - Shared memory is NaN when a block begins, lies in guarded allocations, and is reached through
//   `Shared<T>`, which checks bounds and alignment and finds races: two accesses by two threads,
//   one of them a write, without a __syncthreads between them, or a __syncwarp of a whole warp
//   where both are of it. Shuffles and votes order no memory, as CUDA promises none.
// - `copy_async` gives NaN until the thread has waited for its group.
//
// What is not here: named barriers, clusters, atomics, textures, warps that are not whole.
// A warp-wide instruction of its own (`mma.sync`, `ldmatrix`) is built upon `warp_collective`.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Those of the running thread.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace fastbert {

using Stream = void*;

namespace cuda_on_cpu {

// Where a thread waits.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

[[noreturn]] void fail(const std::string& what);

// Runs `thread` once for each thread of the grid; throws std::runtime_error.
void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

// The order in which fibers go on and blocks run: 0 by their numbers, any other number seeds a
// random one; FASTBERT_EMULATION_SEED is the first. Returns the seed before.
uint64_t set_schedule(uint64_t seed);

void block_barrier(Site site);
void warp_barrier(uint32_t mask, Site site);

// A warp-wide instruction: every thread of `mask` brings its operands and leaves with its results,
// both in *own. The last to arrive calls `combine` with the operands of all 32 lanes, null for
// those outside the mask, and writes every lane's results.
using Combine = void (*)(void* const* lanes, uint32_t mask);
void warp_collective(const char* name, uint32_t mask, void* own, Combine combine, Site site);

// A block's shared memory: one allocation for each `key`, the same for all its threads.
void* static_shared(const void* key, size_t bytes, size_t alignment, const char* name, Site site);
void* dynamic_shared();
void check_shared(const void* at, size_t bytes, size_t alignment, bool write);

// cp.async: `bytes` into shared memory, zeros from `valid` on, at the wait for their group.
void copy_async(void* to, const void* from, size_t bytes, size_t valid);
void copy_async_commit();
void copy_async_wait(int groups_in_flight);

void check_aligned(const void* at, size_t alignment);
void check_index(int64_t index, int64_t size);

template <typename T>
class SharedElement {
 public:
  explicit SharedElement(T* at) : at_(at) {}
  SharedElement(const SharedElement&) = default;

  operator T() const {
    check_shared(at_, sizeof(T), alignof(T), /*write=*/false);
    return *at_;
  }
  const SharedElement& operator=(const T& value) const {
    check_shared(at_, sizeof(T), alignof(T), /*write=*/true);
    *at_ = value;
    return *this;
  }
  const SharedElement& operator=(const SharedElement& other) const {
    return *this = static_cast<T>(other);
  }
  const SharedElement& operator+=(const T& value) const {
    return *this = static_cast<T>(*this) + value;
  }

 private:
  T* at_;
};

template <typename T>
struct Lane {
  T value;
  int source;
};

template <typename T>
void take_from_source(void* const* lanes, uint32_t mask) {
  T taken[32] = {};
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    const int source = static_cast<const Lane<T>*>(lanes[i])->source;
    if (!(mask >> source & 1)) {
      fail("lane " + std::to_string(i) + " reads lane " + std::to_string(source) +
           ", which is not in the mask of the shuffle");
    }
    taken[i] = static_cast<const Lane<T>*>(lanes[source])->value;
  }
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1) static_cast<Lane<T>*>(lanes[i])->value = taken[i];
  }
}

int lane_of_thread();

template <typename T>
T shuffle(const char* name, uint32_t mask, T value, int source, Site site) {
  Lane<T> lane{value, source};
  warp_collective(name, mask, &lane, take_from_source<T>, site);
  return lane.value;
}

uint32_t vote(const char* name, uint32_t mask, bool value, Site site);

}  // namespace cuda_on_cpu

// A pointer to shared memory; under nvcc it is T*. Elements are read into and written from values
// (`T x = s[i]`, never `auto x`), whole: a member of an element cannot be reached.
template <typename T>
class Shared {
 public:
  Shared() = default;
  explicit Shared(T* at) : at_(at) {}

  cuda_on_cpu::SharedElement<T> operator[](ptrdiff_t i) const {
    return cuda_on_cpu::SharedElement<T>(at_ + i);
  }
  cuda_on_cpu::SharedElement<T> operator*() const { return (*this)[0]; }
  Shared operator+(ptrdiff_t i) const { return Shared(at_ + i); }
  // For instructions, which check what they touch themselves.
  T* address() const { return at_; }

 private:
  T* at_ = nullptr;
};

template <typename U, typename T>
Shared<U> shared_cast(Shared<T> s) {
  return Shared<U>(reinterpret_cast<U*>(s.address()));
}

template <typename T>
Shared<T> dynamic_shared() {
  return Shared<T>(static_cast<T*>(cuda_on_cpu::dynamic_shared()));
}

#define FASTBERT_SHARED(type, name, count)                                                       \
  static const char name##_key = 0;                                                              \
  const ::fastbert::Shared<type> name(static_cast<type*>(                                        \
      ::fastbert::cuda_on_cpu::static_shared(&name##_key, sizeof(type) * (count), alignof(type), \
                                             #name, ::fastbert::cuda_on_cpu::Site::here())))

inline void copy_async_16(Shared<char> to, const void* from, int valid = 16) {
  cuda_on_cpu::copy_async(to.address(), from, 16, static_cast<size_t>(valid));
}

inline void copy_async_commit() { cuda_on_cpu::copy_async_commit(); }

template <int kGroupsInFlight>
void copy_async_wait() {
  cuda_on_cpu::copy_async_wait(kGroupsInFlight);
}

inline void store_16(void* to, const void* from) { std::memcpy(to, from, 16); }

inline void check_aligned(const void* at, size_t alignment) {
  cuda_on_cpu::check_aligned(at, alignment);
}

inline void check_index(int64_t index, int64_t size) { cuda_on_cpu::check_index(index, size); }

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Stream,
            Arguments... arguments) {
  const std::tuple<Parameters...> values(arguments...);
  cuda_on_cpu::run(grid, block, shared_bytes, [&] { std::apply(kernel, values); });
}

// --- numbers ---

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  _Float16 value;
};

inline float to_float(float x) { return x; }
inline float to_float(fp16 x) { return static_cast<float>(x.value); }
inline float to_float(bf16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <typename T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline fp16 from_float<fp16>(float x) {
  return {static_cast<_Float16>(x)};
}
// To nearest, ties to even; NaN stays NaN.
template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {0x7FFF};
  return {static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

}  // namespace fastbert

// --- what CUDA declares in the global namespace ---

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

inline void __syncthreads(fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  fastbert::cuda_on_cpu::block_barrier(site);
}

inline void __syncwarp(uint32_t mask = 0xFFFFFFFFu,
                       fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  fastbert::cuda_on_cpu::warp_barrier(mask, site);
}

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane,
              fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  return fastbert::cuda_on_cpu::shuffle("__shfl_sync", mask, value, lane & 31, site);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes,
                  fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  const int source = (fastbert::cuda_on_cpu::lane_of_thread() ^ lanes) & 31;
  return fastbert::cuda_on_cpu::shuffle("__shfl_xor_sync", mask, value, source, site);
}

// Beyond the last lane a thread gets its own value back.
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned lanes,
                   fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  const int own = fastbert::cuda_on_cpu::lane_of_thread();
  const int source = own + lanes < 32 ? own + static_cast<int>(lanes) : own;
  return fastbert::cuda_on_cpu::shuffle("__shfl_down_sync", mask, value, source, site);
}

inline uint32_t __ballot_sync(
    uint32_t mask, int predicate,
    fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  return fastbert::cuda_on_cpu::vote("__ballot_sync", mask, predicate != 0, site);
}

inline int __any_sync(uint32_t mask, int predicate,
                      fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  return fastbert::cuda_on_cpu::vote("__any_sync", mask, predicate != 0, site) != 0;
}

inline int __all_sync(uint32_t mask, int predicate,
                      fastbert::cuda_on_cpu::Site site = fastbert::cuda_on_cpu::Site::here()) {
  return fastbert::cuda_on_cpu::vote("__all_sync", mask, predicate != 0, site) == mask;
}
