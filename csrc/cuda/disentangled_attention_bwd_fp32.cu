#include "cuda/disentangled_attention_bwd.cuh"

namespace fastbert {

template void launch_disentangled_attention_bwd_of<float>(const DisentangledAttention& p,
                                                          Stream stream);
template void launch_position_sums_of<float>(const DisentangledAttention& p,
                                             const PositionSums& sums, Stream stream);

}  // namespace fastbert
