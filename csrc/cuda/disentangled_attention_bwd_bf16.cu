#include "cuda/disentangled_attention_bwd.cuh"

namespace fastbert {

template void launch_disentangled_attention_bwd_of<bf16>(const DisentangledAttention& p,
                                                         Stream stream);

}  // namespace fastbert
