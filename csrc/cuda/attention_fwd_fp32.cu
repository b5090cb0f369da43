#include "cuda/attention_fwd.cuh"

namespace fastbert {

template void launch_attention_fwd_of<float>(const Attention& a, Stream stream);

}  // namespace fastbert
