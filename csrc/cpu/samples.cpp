// Whether views of weights still hold the values they held when copies of them were made. A view
// has one element of every row, each in a cache line of its own, so what this costs is waiting for
// memory, which prefetching overlaps.
#include <ATen/ATen.h>

#include <cstdint>
#include <cstring>

namespace fastbert {
namespace {

constexpr int64_t kAhead = 64;

template <typename T>
bool rows_match(const at::Tensor& view, const at::Tensor& sample) {
  const bool matrix = view.dim() == 2;
  const int64_t rows = matrix ? view.size(0) : 1, columns = view.numel() / rows;
  const int64_t row_step = matrix ? view.stride(0) : 0, step = view.stride(-1);
  const T* at = static_cast<const T*>(view.const_data_ptr());
  const T* expected = static_cast<const T*>(sample.const_data_ptr());
  // Differences are gathered: a branch on each would end the loop early and leave nothing to
  // overlap.
  bool differs = false;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) {
      const T* element = at + row * row_step + i * step;
      __builtin_prefetch(element + kAhead * step);
      differs |= *element != *expected++;
    }
  }
  return !differs;
}

}  // namespace

// views: integers, of one or two dimensions; samples: their contiguous copies.
bool samples_match(at::TensorList views, at::TensorList samples) {
  for (size_t i = 0; i < views.size(); ++i) {
    const at::Tensor &view = views[i], &sample = samples[i];
    if (view.numel() == 0) continue;
    const bool same = [&] {
      switch (view.element_size()) {
        case 1:
          return rows_match<uint8_t>(view, sample);
        case 2:
          return rows_match<uint16_t>(view, sample);
        case 4:
          return rows_match<uint32_t>(view, sample);
        default:
          return rows_match<uint64_t>(view, sample);
      }
    }();
    if (!same) return false;
  }
  return true;
}

}  // namespace fastbert
