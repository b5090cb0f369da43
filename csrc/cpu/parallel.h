// Work over rows in pieces whose borders do not depend on the number of threads, so that sums over
// pieces come out the same for any of them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/kernels.h"

namespace fastbert {

constexpr int64_t kGrain = 1 << 14;  // elements a thread should get at least

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(begin, end) over [0, size) in threads, about `grain` elements of work at least per thread.
template <typename Body>
void for_each_range(int64_t size, int64_t grain, const Body& body) {
  at::parallel_for(0, size, std::max<int64_t>(1, grain), body);
}

// The same over rows of `columns` elements, about kGrain of them at least per thread.
template <typename Body>
void for_each_row_range(int64_t rows, int64_t columns, const Body& body) {
  for_each_range(rows, kGrain / std::max<int64_t>(1, columns), body);
}

// body(kept, i) for [0, count), taken one after the other by up to `threads` threads; make() gives
// what a thread keeps. For work of unequal size whose results do not depend on the order.
template <typename Make, typename Body>
void in_turn(int64_t threads, int64_t count, const Make& make, const Body& body) {
  std::atomic<int64_t> next{0};
  for_each_range(std::min(threads, count), 1, [&](int64_t, int64_t) {
    auto kept = make();
    for (int64_t i = next++; i < count; i = next++) body(kept, i);
  });
}

// Column sums of a (rows, columns) computation, in fp32: body(begin, end, sums) adds the rows
// [begin, end) to `sums`, `vectors` vectors of `columns`, zero before; one part of kRowsPerPart
// rows after the other is added up, whatever the threads.
template <typename Body>
at::Tensor column_sums(int64_t rows, int64_t columns, int64_t vectors, const Body& body) {
  const int64_t parts = ceil_div(rows, kRowsPerPart), size = vectors * columns;
  const at::Tensor partials = at::zeros({std::max<int64_t>(1, parts), size}, at::kFloat);
  float* data = partials.mutable_data_ptr<float>();
  for_each_range(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * kRowsPerPart;
      body(first, std::min(rows, first + kRowsPerPart), data + part * size);
    }
  });
  for (int64_t part = 1; part < parts; ++part) kernels().add_to(data + part * size, data, size);
  return partials.select(0, 0).view({vectors, columns});
}

}  // namespace fastbert
