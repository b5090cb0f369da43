#include "cuda/disentangled_attention_positions.cuh"

namespace fastbert {

template void launch_position_sums_of<fp16>(const DisentangledAttention& p,
                                            const PositionSums& sums, Stream stream);

}  // namespace fastbert
