// Small kernels, right ones and wrong ones, for test_cuda_on_cpu.py: what the emulation must let
// pass and what it must catch; compiled by g++ alone. Run with the name of one and a seed of the
// schedule.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "cuda/common.cuh"

using namespace fastbert;

namespace {

constexpr int kThreads = 64;

__global__ void block_sum(const float* x, float* y) {
  float sum[1] = {x[threadIdx.x]};
  reduce_row<2, Sum>(sum);
  y[threadIdx.x] = sum[0];
}

// Each thread reads its neighbour's element of the other warp.
template <bool kBarrier>
__global__ void exchange(const float* x, float* y) {
  FASTBERT_SHARED(float, values, kThreads);
  values[threadIdx.x] = x[threadIdx.x];
  if (kBarrier) __syncthreads();
  y[threadIdx.x] = values[(threadIdx.x + 32) % kThreads];
}

// The second value must not overwrite the first before it is read.
template <bool kBarrier>
__global__ void exchange_twice(const float* x, float* y) {
  FASTBERT_SHARED(float, values, kThreads);
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    if (kBarrier && round > 0) __syncthreads();
    values[threadIdx.x] = x[threadIdx.x] * (round + 1);
    __syncthreads();
    sum += values[kThreads - 1 - threadIdx.x];
  }
  y[threadIdx.x] = sum;
}

template <bool kBarrier>
__global__ void exchange_in_warp(const float* x, float* y) {
  FASTBERT_SHARED(float, values, kThreads);
  values[threadIdx.x] = x[threadIdx.x];
  if (kBarrier) {
    __syncwarp();
  } else {
    __any_sync(kWholeWarp, 1);  // meets, but orders no memory
  }
  y[threadIdx.x] = values[threadIdx.x ^ 1];
}

__global__ void halves_of_a_word(const float* x, float* y) {
  FASTBERT_SHARED(bf16, values, kThreads);
  values[threadIdx.x] = from_float<bf16>(x[threadIdx.x]);
  __syncthreads();
  const bf16 value = values[threadIdx.x ^ 1];
  y[threadIdx.x] = to_float(value);
}

__global__ void some_at_a_barrier(const float* x, float* y) {
  if (x[threadIdx.x] < 32) __syncthreads();
  y[threadIdx.x] = 0;
}

__global__ void two_barriers(const float* x, float* y) {
  if (x[threadIdx.x] < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  y[threadIdx.x] = 0;
}

__global__ void shuffle_without_half(const float* x, float* y) {
  y[threadIdx.x] = threadIdx.x % 2 == 0 ? __shfl_xor_sync(kWholeWarp, x[threadIdx.x], 2) : 0.0f;
}

__global__ void shuffle_from_outside(const float* x, float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0xFFFFu, x[threadIdx.x], 16);
}

__global__ void shuffles(const float* x, float* y) {
  const float value = x[threadIdx.x];
  float sum = __shfl_sync(kWholeWarp, value, 3) + __shfl_down_sync(kWholeWarp, value, 30);
  if (threadIdx.x % 32 < 8) sum += 1000.0f * __shfl_xor_sync(0xFFu, value, 7);
  y[threadIdx.x] = sum;
}

// Votes of a whole warp while eight of its lanes still shuffle among themselves.
__global__ void votes(const float* x, float* y) {
  float value = x[threadIdx.x];
  if (threadIdx.x % 32 < 8) value = __shfl_xor_sync(0xFFu, value, 1);
  const bool all = __all_sync(kWholeWarp, value >= 0.0f),
             any = __any_sync(kWholeWarp, value < 0.0f);
  const uint32_t ballot = __ballot_sync(kWholeWarp, threadIdx.x % 32 < 2);
  y[threadIdx.x] = all && !any ? static_cast<float>(ballot) : -1.0f;
}

__global__ void beyond_the_end(const float* x, float* y) {
  FASTBERT_SHARED(float, values, kThreads);
  FASTBERT_SHARED(float, others, kThreads);
  values[threadIdx.x + 1] = x[threadIdx.x];
  others[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = 0;
}

__global__ void misaligned(const float* x, float* y) {
  const Pack<float> pack = load_pack(x + 1);
  y[threadIdx.x] = pack.element[0];
}

__global__ void misaligned_shared(const float*, float* y) {
  FASTBERT_SHARED(float, values, kThreads + 4);
  const Pack<float> pack = shared_cast<Pack<float>>(values + 1)[0];
  y[threadIdx.x] = pack.element[0];
}

__global__ void unwritten(const float*, float* y) {
  y[threadIdx.x] = dynamic_shared<float>()[threadIdx.x];
}

// Two groups of copies; the first is waited for while the second is in flight.
template <int kInFlight, bool kBarrier>
__global__ void copies(const float* x, float* y) {
  const Shared<float> values = dynamic_shared<float>();
  if (threadIdx.x < 16)
    copy_async_16(shared_cast<char>(values + 4 * threadIdx.x), x + 4 * threadIdx.x);
  copy_async_commit();
  if (threadIdx.x < 16) {
    copy_async_16(shared_cast<char>(values + kThreads + 4 * threadIdx.x), x + 4 * threadIdx.x, 8);
  }
  copy_async_commit();
  copy_async_wait<kInFlight>();
  if (kBarrier) __syncthreads();
  y[threadIdx.x] = values[threadIdx.x];
  if (kInFlight == 0) y[threadIdx.x] += 100.0f * values[kThreads + threadIdx.x];
}

// A warp-wide instruction that reverses what the lanes hold, as mma.cuh would add one.
__global__ void instruction(const float* x, float* y) {
  float value = x[threadIdx.x];
  cuda_on_cpu::warp_collective(
      "reverse", kWholeWarp, &value,
      [](void* const* lanes, uint32_t) {
        for (int i = 0; i < 16; ++i) {
          std::swap(*static_cast<float*>(lanes[i]), *static_cast<float*>(lanes[31 - i]));
        }
      },
      cuda_on_cpu::Site::here());
  y[threadIdx.x] = value;
}

// The numbers of threads in the order they ran.
__global__ void order(const float*, float* y) {
  static int count = 0;
  y[count++] = static_cast<float>(threadIdx.x);
}

struct Probe {
  void (*kernel)(const float*, float*);
  size_t shared_bytes = 0;
};

const std::map<std::string, Probe> kProbes = {
    {"block_sum", {block_sum}},
    {"exchange", {exchange<true>}},
    {"exchange_unordered", {exchange<false>}},
    {"exchange_twice", {exchange_twice<true>}},
    {"exchange_twice_unordered", {exchange_twice<false>}},
    {"exchange_in_warp", {exchange_in_warp<true>}},
    {"exchange_in_warp_unordered", {exchange_in_warp<false>}},
    {"halves_of_a_word", {halves_of_a_word}},
    {"some_at_a_barrier", {some_at_a_barrier}},
    {"two_barriers", {two_barriers}},
    {"shuffle_without_half", {shuffle_without_half}},
    {"shuffle_from_outside", {shuffle_from_outside}},
    {"shuffles", {shuffles}},
    {"votes", {votes}},
    {"beyond_the_end", {beyond_the_end}},
    {"misaligned", {misaligned}},
    {"misaligned_shared", {misaligned_shared}},
    {"unwritten", {unwritten, 4 * kThreads}},
    {"copies", {copies<0, true>, 8 * kThreads}},
    {"copies_of_first_group", {copies<1, true>, 8 * kThreads}},
    {"copies_not_waited_for", {copies<2, true>, 8 * kThreads}},
    {"copies_unordered", {copies<0, false>, 8 * kThreads}},
    {"instruction", {instruction}},
    {"order", {order}},
    {"too_much_shared_memory", {unwritten, 228 << 10}},
};

}  // namespace

// PROBE SEED: the 64 results of 0, 1, 2, ..., or what was wrong.
int main(int, char** arguments) {
  const Probe& probe = kProbes.at(arguments[1]);
  cuda_on_cpu::set_schedule(std::strtoull(arguments[2], nullptr, 10));
  alignas(16) float x[kThreads], y[kThreads] = {};
  for (int i = 0; i < kThreads; ++i) x[i] = static_cast<float>(i);
  try {
    launch(probe.kernel, 1, kThreads, probe.shared_bytes, nullptr, x, y);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  for (const float value : y) std::printf("%g ", value);
}
