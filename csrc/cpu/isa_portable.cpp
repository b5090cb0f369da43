// The kernels for any machine: at::vec as the baseline compiles it.
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "cpu/inline.h"
#include "cpu/kernels.h"

#define ISA portable
namespace fastbert {
namespace ISA {
#include "cpu/vec_portable.h"
}  // namespace ISA
}  // namespace fastbert
#include "cpu/table.h"
