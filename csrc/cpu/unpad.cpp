// Rows gathered by unique indices, and put back among zeros.
#include <ATen/ATen.h>

#include <cstring>

#include "common/tensors.h"
#include "cpu/parallel.h"
#include "cpu/workspace.h"

namespace fastbert {
namespace {

void check_indices(const char* op, const int64_t* index, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(index[i] >= 0 && index[i] < rows, op, ": index ", index[i], " at ", i,
                      " is outside the ", rows, " rows");
  }
}

int64_t grain_of(int64_t bytes) {
  return std::max<int64_t>(1, 4 * kGrain / std::max<int64_t>(1, bytes));
}

}  // namespace

at::Tensor unpad_cpu(const at::Tensor& x, const at::Tensor& indices) {
  const at::Tensor input = x.contiguous(), index = indices.contiguous();
  const int64_t count = index.numel(), bytes = bytes_per_row(x);
  const int64_t* at = index.const_data_ptr<int64_t>();
  check_indices("unpad", at, count, x.size(0));
  at::Tensor y = empty_from_pool(sizes_with_rows(x, count), input.options());
  if (y.numel() == 0) return y;
  const char* from = static_cast<const char*>(input.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for_each_range(count, grain_of(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(to + i * bytes, from + at[i] * bytes, bytes);
  });
  return y;
}

at::Tensor pad_cpu(const at::Tensor& x, const at::Tensor& indices, int64_t num_rows) {
  const at::Tensor input = x.contiguous(), index = indices.contiguous();
  const int64_t count = index.numel(), bytes = bytes_per_row(x);
  const int64_t* at = index.const_data_ptr<int64_t>();
  check_indices("pad", at, count, num_rows);
  at::Tensor y = empty_from_pool(sizes_with_rows(x, num_rows), input.options());
  if (y.numel() == 0) return y;
  // Each row is written once: where it comes from first, then the rows in order.
  Workspace sources(num_rows * sizeof(int64_t));
  int64_t* source = sources.as<int64_t>();
  std::fill_n(source, num_rows, -1);
  for (int64_t i = 0; i < count; ++i) source[at[i]] = i;
  const char* from = static_cast<const char*>(input.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for_each_range(num_rows, grain_of(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (source[row] < 0) {
        std::memset(to + row * bytes, 0, bytes);
      } else {
        std::memcpy(to + row * bytes, from + source[row] * bytes, bytes);
      }
    }
  });
  return y;
}

}  // namespace fastbert
