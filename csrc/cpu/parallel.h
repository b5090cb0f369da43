// Work over rows in pieces whose borders do not depend on the number of threads, so that sums over
// pieces come out the same for any of them.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace fastbert {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(begin, end) over [0, size) in threads, about `grain` elements of work at least per thread.
template <typename Body>
void for_each_range(int64_t size, int64_t grain, const Body& body) {
  at::parallel_for(0, size, std::max<int64_t>(1, grain), body);
}

}  // namespace fastbert
