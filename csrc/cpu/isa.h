// The instruction sets the kernels are compiled for, and the one in force.
#pragma once

#include "cpu/kernels.h"

namespace fastbert {

// In rising order: each implies those before it.
enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The best one this machine and system permit, or a lower one chosen by the op `cpu_isa`.
Isa current_isa();

}  // namespace fastbert
