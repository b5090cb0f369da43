// The scalar functions of philox.h, as a kernel would call them: compiled by a C++ compiler and run
// against the frozen masks, and compiled by nvcc for each GPU.
#include <cstdio>
#include <cstdlib>

#include "common/philox.h"

using namespace fastbert;

FASTBERT_HOST_DEVICE bool keeps_row_element(const DropoutStream& s, uint64_t row, uint32_t column,
                                            uint32_t columns) {
  const uint64_t calls = (columns + 7) / 8;
  const PhiloxWords w = row_call(s, row * calls + column / 8);
  return keeps(s, w.word[column % 8 / 2], column % 2);
}

FASTBERT_HOST_DEVICE bool keeps_score(const DropoutStream& s, uint32_t sequence_head, uint32_t r,
                                      uint32_t c) {
  const PhiloxWords w = score_call(s, score_place(r, c), sequence_head);
  return keeps(s, w.word[score_word(r, c)], c % 2);
}

#if defined(__CUDACC__)
__global__ void row_mask(const int64_t* rng_state, bool* mask, uint32_t columns, uint32_t site,
                         uint32_t threshold) {
  const DropoutStream s = dropout_stream(rng_state[0], rng_state[1], site, threshold);
  const uint32_t column = threadIdx.x;
  mask[blockIdx.x * columns + column] = keeps_row_element(s, blockIdx.x, column, columns);
}

__global__ void score_mask(const int64_t* rng_state, bool* mask, uint32_t seqlen_k, uint32_t site,
                           uint32_t threshold) {
  const DropoutStream s = dropout_stream(rng_state[0], rng_state[1], site, threshold);
  mask[blockIdx.x * seqlen_k + threadIdx.x] = keeps_score(s, blockIdx.y, blockIdx.x, threadIdx.x);
}
#else
// rows SEED OFFSET SITE THRESHOLD ROWS COLUMNS
// scores SEED OFFSET SITE THRESHOLD SEQUENCE HEADS QUERIES KEYS
int main(int, char** arguments) {
  int64_t n[8] = {};
  for (int i = 0; arguments[i + 2] != nullptr; ++i) n[i] = std::atoll(arguments[i + 2]);
  const DropoutStream s =
      dropout_stream(n[0], n[1], static_cast<uint32_t>(n[2]), static_cast<uint32_t>(n[3]));
  if (arguments[1][0] == 'r') {
    for (int64_t r = 0; r < n[4]; ++r)
      for (int64_t c = 0; c < n[5]; ++c) std::putchar('0' + keeps_row_element(s, r, c, n[5]));
  } else {
    for (int64_t head = 0; head < n[5]; ++head)
      for (int64_t r = 0; r < n[6]; ++r)
        for (int64_t c = 0; c < n[7]; ++c)
          std::putchar('0' + keeps_score(s, n[4] * n[5] + head, r, c));
  }
}
#endif
