#include "cuda/disentangled_attention_bwd.cuh"

namespace fastbert {

template void launch_disentangled_attention_bwd_of<float>(const DisentangledAttention& p,
                                                          Stream stream);

}  // namespace fastbert
