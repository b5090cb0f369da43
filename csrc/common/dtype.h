// The element types that kernels take, wherever they run.
#pragma once

namespace fastbert {

enum class Dtype : int { kFloat, kBFloat16, kHalf };

}  // namespace fastbert
