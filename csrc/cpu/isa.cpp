// Finds what the machine can run, once, and lets tests and users choose less.
#include "cpu/isa.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>

#include "cpu/inline.h"

#if defined(FASTBERT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastbert {

namespace portable {
extern const Kernels kTable;
}
#if defined(FASTBERT_X86)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}
namespace avx512_bf16 {
extern const Kernels kTable;
}
#endif

namespace {

constexpr std::array<const char*, 5> kNames = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(FASTBERT_X86)

bool has_leaf_7_bit(unsigned subleaf, char reg, int bit) {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, subleaf, &eax, &ebx, &ecx, &edx)) return false;
  return ((reg == 'a' ? eax : reg == 'c' ? ecx : edx) >> bit) & 1u;
}

// The kernel gives a process the tile registers only when asked.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa best_isa() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (!avx2) return Isa::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx512) return Isa::kAvx2;
  const bool bf16 = has_leaf_7_bit(1, 'a', 5), vnni = has_leaf_7_bit(0, 'c', 11);
  if (!bf16 || !vnni) return Isa::kAvx512;
  const bool tiles = has_leaf_7_bit(0, 'd', 24);
  const bool amx = tiles && has_leaf_7_bit(0, 'd', 22) && has_leaf_7_bit(0, 'd', 25);
  return amx && may_use_tiles() ? Isa::kAmx : Isa::kAvx512Bf16;
}

#else

Isa best_isa() { return Isa::kPortable; }

#endif

Isa best() {
  static const Isa isa = best_isa();
  return isa;
}

Isa isa_named(std::string_view name, const char* where) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name != kNames[i]) continue;
    TORCH_CHECK_VALUE(static_cast<Isa>(i) <= best(), where, ": this machine cannot run ", name,
                      "; the best it can is ", kNames[static_cast<size_t>(best())]);
    return static_cast<Isa>(i);
  }
  TORCH_CHECK_VALUE(false, where, ": unknown instruction set '", name,
                    "'; known are portable, avx2, avx512, avx512_bf16 and amx");
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa = [] {
    const char* wanted = std::getenv("FASTBERT_CPU_ISA");
    return wanted == nullptr || *wanted == 0 ? best() : isa_named(wanted, "FASTBERT_CPU_ISA");
  }();
  return isa;
}

// Chooses one by its name, "best" for the machine's, or none (""); returns the one then in force.
std::string cpu_isa(std::string_view name) {
  if (!name.empty()) chosen() = name == "best" ? best() : isa_named(name, "cpu_isa");
  return kNames[static_cast<size_t>(current_isa())];
}

// The kernels' elementary functions by themselves, for the tests of their bounds.
at::Tensor vector_math(const at::Tensor& x, std::string_view function) {
  TORCH_CHECK_VALUE(function == "exp" || function == "erf",
                    "vector_math: function must be 'exp' or 'erf', got '", function, "'");
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat, "vector_math: x must be fp32, got ",
                   x.scalar_type());
  const at::Tensor input = x.contiguous();
  at::Tensor y = at::empty_like(input);
  (function == "exp" ? kernels().exp : kernels().erf)(input.const_data_ptr<float>(), x.numel(),
                                                      y.mutable_data_ptr<float>());
  return y;
}

}  // namespace

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

const Kernels& kernels() {
#if defined(FASTBERT_X86)
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512Bf16) return avx512_bf16::kTable;
  if (isa == Isa::kAvx512) return avx512::kTable;
  if (isa == Isa::kAvx2) return avx2::kTable;
#endif
  return portable::kTable;
}

}  // namespace fastbert

TORCH_LIBRARY_FRAGMENT(fastbert, m) {
  m.def("cpu_isa(str name) -> str", &fastbert::cpu_isa);
  m.def("vector_math(Tensor x, str function) -> Tensor");
  m.impl("vector_math", c10::DispatchKey::CPU, &fastbert::vector_math);
}
