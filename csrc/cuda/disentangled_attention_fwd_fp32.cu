#include "cuda/disentangled_attention_fwd.cuh"

namespace fastbert {

template void launch_disentangled_attention_fwd_of<float>(const DisentangledAttention& p,
                                                          Stream stream);

}  // namespace fastbert
