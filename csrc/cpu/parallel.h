// Work over rows in pieces whose borders do not depend on the number of threads, so that sums over
// pieces come out the same for any of them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
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
