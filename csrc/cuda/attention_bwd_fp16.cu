#include "cuda/attention_bwd.cuh"

namespace fastbert {

template void launch_attention_bwd_of<fp16>(const Attention& a, Stream stream);

}  // namespace fastbert
