// unpad and pad for tensors.
#include <algorithm>

#include "cuda/ops/tensors.h"

namespace fastbert {
namespace {

// The longest word, a power of two, that row lengths and addresses are multiples of.
int word_of(int64_t row_bytes, const void* from, const void* to) {
  const uintptr_t bits = static_cast<uintptr_t>(row_bytes) | reinterpret_cast<uintptr_t>(from) |
                         reinterpret_cast<uintptr_t>(to);
  return static_cast<int>(std::min<uintptr_t>(16, bits & (~bits + 1)));
}

void move_rows(const at::Tensor& from, const at::Tensor& indices, at::Tensor& to, bool scatter,
               Stream stream) {
  if (from.numel() == 0 || to.numel() == 0) return;
  MoveRows a{};
  a.scatter = scatter;
  a.rows = indices.size(0);
  a.longer_rows = scatter ? to.size(0) : from.size(0);
  a.row_bytes = bytes_per_row(from);
  a.indices = indices.const_data_ptr<int64_t>();
  a.from = from.const_data_ptr();
  a.to = to.mutable_data_ptr();
  a.word_bytes = word_of(a.row_bytes, a.from, a.to);
  launch_move_rows(a, stream);
}

}  // namespace

at::Tensor FASTBERT_CUDA_OP(unpad)(const at::Tensor& x, const at::Tensor& indices) {
  const DeviceGuard guard(x);
  at::Tensor y = at::empty(sizes_with_rows(x, indices.size(0)), x.options());
  move_rows(x.contiguous(), indices.contiguous(), y, /*scatter=*/false, guard.stream());
  return y;
}

at::Tensor FASTBERT_CUDA_OP(pad)(const at::Tensor& x, const at::Tensor& indices, int64_t num_rows) {
  const DeviceGuard guard(x);
  at::Tensor y = at::zeros(sizes_with_rows(x, num_rows), x.options());
  move_rows(x.contiguous(), indices.contiguous(), y, /*scatter=*/true, guard.stream());
  return y;
}

}  // namespace fastbert
