// Attention over packed sequences, forward and backward. The kernels stand in attention_fwd.cuh and
// attention_bwd.cuh, and are compiled type by type in attention_fwd_<type>.cu and
// attention_bwd_<type>.cu.
#include "cuda/attention.cuh"

namespace fastbert {

void launch_attention_fwd(const Attention& a, Stream stream) {
  if (a.dtype == Dtype::kFloat) return launch_attention_fwd_of<float>(a, stream);
  if (a.dtype == Dtype::kBFloat16) return launch_attention_fwd_of<bf16>(a, stream);
  launch_attention_fwd_of<fp16>(a, stream);
}

void launch_attention_bwd(const Attention& a, Stream stream) {
  if (a.dtype == Dtype::kFloat) return launch_attention_bwd_of<float>(a, stream);
  if (a.dtype == Dtype::kBFloat16) return launch_attention_bwd_of<bf16>(a, stream);
  launch_attention_bwd_of<fp16>(a, stream);
}

}  // namespace fastbert
