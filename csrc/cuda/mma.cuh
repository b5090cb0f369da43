// Tensor cores: products of 16x16 and 16x8 pieces that a warp makes together, and the loads that
// bring its operands from shared memory into the registers the products want them in.
//
// Layouts are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix". With g =
// lane / 4 and t = lane % 4 a lane holds, two neighbours in a register:
//   a: rows g, g + 8, g, g + 8 of columns 2t, 2t, 2t + 8, 2t + 8
//   b: rows 2t and 2t + 8 of column g
//   c: columns 2t and 2t + 1 of row g, then of row g + 8
#pragma once

#include <type_traits>

#include "cuda/common.cuh"

namespace fastbert {

struct Fragment {
  uint32_t pair[4];
};

#if defined(__CUDACC__)

template <typename T>
__device__ __forceinline__ uint32_t pair_of(float low, float high);
template <>
__device__ __forceinline__ uint32_t pair_of<bf16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t pair_of<fp16>(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four 8x8 matrices: lane 8m + i brings the address of row i of matrix m, 16 bytes of it, and every
// lane leaves with columns 2t, 2t + 1 of row g of each; transposed, with rows 2t, 2t + 1 of column
// g.
template <typename T>
__device__ __forceinline__ Fragment load_matrices(Shared<T> row) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.pair[0]), "=r"(f.pair[1]), "=r"(f.pair[2]), "=r"(f.pair[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
  return f;
}

template <typename T>
__device__ __forceinline__ Fragment load_matrices_transposed(Shared<T> row) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.pair[0]), "=r"(f.pair[1]), "=r"(f.pair[2]), "=r"(f.pair[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
  return f;
}

// c += a b, products of bf16 or fp16 summed in fp32.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment& a, uint32_t b_low,
                                             uint32_t b_high) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.pair[0]), "r"(a.pair[1]), "r"(a.pair[2]), "r"(a.pair[3]), "r"(b_low), "r"(b_high));
  } else {
    static_assert(std::is_same_v<T, fp16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.pair[0]), "r"(a.pair[1]), "r"(a.pair[2]), "r"(a.pair[3]), "r"(b_low), "r"(b_high));
  }
}

#else

namespace cuda_on_cpu {

template <typename T>
T half_of(uint32_t pair, int half) {
  const uint16_t bits = static_cast<uint16_t>(pair >> (16 * half));
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct MatrixLoad {
  const char* row;
  Fragment loaded;
};

template <bool kTransposed>
void load_matrices_of_warp(void* const* lanes, uint32_t) {
  const auto of_lane = [&](int lane) { return static_cast<MatrixLoad*>(lanes[lane]); };
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t pair = 0;
      for (int half = 0; half < 2; ++half) {
        const int g = lane / 4, next = lane % 4 * 2 + half;
        const int row = kTransposed ? next : g, column = kTransposed ? g : next;
        uint16_t bits;
        std::memcpy(&bits, of_lane(8 * matrix + row)->row + 2 * column, sizeof bits);
        pair |= static_cast<uint32_t>(bits) << (16 * half);
      }
      of_lane(lane)->loaded.pair[matrix] = pair;
    }
  }
}

template <bool kTransposed, typename T>
Fragment load_matrices(const char* name, Shared<T> row, Site site) {
  check_shared(row.address(), 16, 16, /*write=*/false);
  MatrixLoad own{reinterpret_cast<const char*>(row.address()), {}};
  warp_collective(name, kWholeWarp, &own, load_matrices_of_warp<kTransposed>, site);
  return own.loaded;
}

struct Product {
  Fragment a;
  uint32_t b[2];
  float c[4];
};

template <typename T>
void multiply_add_of_warp(void* const* lanes, uint32_t) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Product& own = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = to_float(half_of<T>(own.a.pair[i], half));
      }
      for (int i = 0; i < 2; ++i) {
        b[2 * t + 8 * i + half][g] = to_float(half_of<T>(own.b[i], half));
        c[g + 8 * i][2 * t + half] = own.c[2 * i + half];
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    Product& own = *static_cast<Product*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) own.c[i] = c[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
  }
}

}  // namespace cuda_on_cpu

template <typename T>
uint32_t pair_of(float low, float high) {
  const T both[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t pair;
  std::memcpy(&pair, both, sizeof pair);
  return pair;
}

template <typename T>
Fragment load_matrices(Shared<T> row, cuda_on_cpu::Site site = cuda_on_cpu::Site::here()) {
  return cuda_on_cpu::load_matrices<false>("ldmatrix", row, site);
}

template <typename T>
Fragment load_matrices_transposed(Shared<T> row,
                                  cuda_on_cpu::Site site = cuda_on_cpu::Site::here()) {
  return cuda_on_cpu::load_matrices<true>("ldmatrix.trans", row, site);
}

template <typename T>
void multiply_add(float (&c)[4], const Fragment& a, uint32_t b_low, uint32_t b_high,
                  cuda_on_cpu::Site site = cuda_on_cpu::Site::here()) {
  cuda_on_cpu::Product own{a, {b_low, b_high}, {c[0], c[1], c[2], c[3]}};
  cuda_on_cpu::warp_collective("mma.sync", kWholeWarp, &own, cuda_on_cpu::multiply_add_of_warp<T>,
                               site);
  for (int i = 0; i < 4; ++i) c[i] = own.c[i];
}

#endif

}  // namespace fastbert
