// rotary for tensors.
#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

constexpr const char* kOp = "rotary";

// The kernel reads tables of fp32 rows.
at::Tensor table_of(const at::Tensor& t, int64_t half_dim, const char* name) {
  TORCH_CHECK_VALUE(t.dim() == 2 && t.size(1) == half_dim, "rotary: ", name,
                    " must have shape (P, ", half_dim, "), got ", t.sizes());
  return t.to(at::kFloat).contiguous();
}

}  // namespace

at::Tensor FASTBERT_CUDA_OP(rotary)(const at::Tensor& qkv, int64_t num_heads, const at::Tensor& cos,
                                    const at::Tensor& sin, const at::Tensor& index, bool inverse) {
  TORCH_CHECK_VALUE(qkv.dim() == 2 && num_heads > 0 && qkv.size(1) % (6 * num_heads) == 0,
                    "rotary: qkv must have shape (T, 3·", num_heads, "·D), D even, got ",
                    qkv.sizes());
  TORCH_CHECK_VALUE(index.dim() == 1 && index.size(0) == qkv.size(0),
                    "rotary: index must have shape (", qkv.size(0), ",), got ", index.sizes());
  const DeviceGuard guard(qkv);
  const int64_t half_dim = qkv.size(1) / (6 * num_heads);
  const at::Tensor input = qkv.contiguous(), positions = index.to(at::kLong).contiguous();
  const at::Tensor cosines = table_of(cos, half_dim, "cos"), sines = table_of(sin, half_dim, "sin");
  at::Tensor out = at::empty(qkv.sizes(), qkv.options());
  if (qkv.numel() == 0) return out;
  Rotary a{};
  a.dtype = dtype_of(qkv, kOp);
  a.wide = are_wide(half_dim, {input, out, cosines, sines});
  a.inverse = inverse;
  a.rows = qkv.size(0);
  a.positions = cosines.size(0);
  a.num_heads = static_cast<int>(num_heads);
  a.half_dim = static_cast<int>(half_dim);
  a.qkv = input.const_data_ptr();
  a.cos = cosines.const_data_ptr<float>();
  a.sin = sines.const_data_ptr<float>();
  a.index = positions.const_data_ptr<int64_t>();
  a.out = out.mutable_data_ptr();
  launch_rotary(a, guard.stream());
  return out;
}

}  // namespace fastbert
