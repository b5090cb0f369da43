#include "cuda/disentangled_attention_fwd.cuh"

namespace fastbert {

template void launch_disentangled_attention_fwd_of<bf16>(const DisentangledAttention& p,
                                                         Stream stream);

}  // namespace fastbert
