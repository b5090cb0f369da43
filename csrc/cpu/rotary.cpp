// Rotary position embedding of packed queries and keys, forwards and (its gradient) backwards.
#include <ATen/ATen.h>

#include "cpu/parallel.h"
#include "cpu/tensors.h"
#include "cpu/workspace.h"

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

at::Tensor rotary_cpu(const at::Tensor& qkv, int64_t num_heads, const at::Tensor& cos,
                      const at::Tensor& sin, const at::Tensor& index, bool inverse) {
  TORCH_CHECK_VALUE(qkv.dim() == 2 && num_heads > 0 && qkv.size(1) % (6 * num_heads) == 0,
                    "rotary: qkv must have shape (T, 3·", num_heads, "·D), D even, got ",
                    qkv.sizes());
  TORCH_CHECK_VALUE(index.dim() == 1 && index.size(0) == qkv.size(0),
                    "rotary: index must have shape (", qkv.size(0), ",), got ", index.sizes());
  const int64_t half_dim = qkv.size(1) / (6 * num_heads);
  const at::Tensor input = qkv.contiguous();
  const at::Tensor cosines = table_of(cos, half_dim, "cos"), sines = table_of(sin, half_dim, "sin");
  const at::Tensor positions = index.to(at::kLong).contiguous();
  at::Tensor out = empty_from_pool(qkv.sizes(), input.options());
  const Rotary a{dtype_of(qkv, kOp),
                 inverse,
                 num_heads,
                 half_dim,
                 input.const_data_ptr(),
                 cosines.const_data_ptr<float>(),
                 sines.const_data_ptr<float>(),
                 positions.const_data_ptr<int64_t>(),
                 out.mutable_data_ptr()};
  for_each_row_range(qkv.size(0), qkv.size(1),
                     [&](int64_t begin, int64_t end) { kernels().rotary(a, begin, end); });
  return out;
}

}  // namespace fastbert
