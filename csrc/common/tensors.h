// What the op files of every room ask of tensors before their pointers reach a kernel.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "common/dtype.h"

namespace fastbert {

inline Dtype dtype_of(const at::Tensor& t, const char* op) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kHalf;
    default:
      TORCH_CHECK_TYPE(false, op, ": the kernels take fp32, bf16 and fp16, got ", t.scalar_type());
  }
}

inline void check_vector(const at::Tensor& t, int64_t size, const char* op, const char* name) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == size, op, ": ", name, " must have shape (", size,
                    ",), got ", t.sizes());
}

// Rows are what the first dimension counts.
inline int64_t bytes_per_row(const at::Tensor& t) {
  int64_t bytes = t.element_size();
  for (int64_t d = 1; d < t.dim(); ++d) bytes *= t.size(d);
  return bytes;
}

inline std::vector<int64_t> sizes_with_rows(const at::Tensor& t, int64_t rows) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

// What score_keep_mask takes; from longer sequences on the words of the counter overlap.
inline void check_score_mask(const at::Tensor& sequences, int64_t seqlen_q, int64_t seqlen_k) {
  TORCH_CHECK_VALUE(sequences.dim() == 1 && sequences.scalar_type() == at::kLong,
                    "score_keep_mask: sequences must be int64 of shape (b,), got ",
                    sequences.scalar_type(), " of shape ", sequences.sizes());
  TORCH_CHECK_VALUE(seqlen_q <= 131072 && seqlen_k <= 262144,
                    "dropout of attention probabilities: at most 131072 queries and 262144 keys "
                    "in a sequence, got ",
                    seqlen_q, " and ", seqlen_k);
}

}  // namespace fastbert
