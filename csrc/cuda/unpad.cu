// Rows gathered by unique indices, and put back. Letters: R rows of the longer tensor, T rows.
//
// A warp moves a row, in the longest words that its length and the addresses allow; what the bytes
// mean does not matter here.
#include "cuda/common.cuh"

namespace fastbert {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

template <int kBytes>
struct alignas(kBytes) Word {
  char byte[kBytes];
};

template <bool kScatter, typename Word>
__global__ void __launch_bounds__(kThreads) move_rows_kernel(const MoveRows a) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + thread / 32;
  if (row >= a.rows) return;
  const int64_t index = a.indices[row];
  check_index(index, a.longer_rows);
  const int64_t words = a.row_bytes / static_cast<int64_t>(sizeof(Word));
  const Word* __restrict__ from =
      static_cast<const Word*>(a.from) + (kScatter ? row : index) * words;
  Word* __restrict__ to = static_cast<Word*>(a.to) + (kScatter ? index : row) * words;
  check_aligned(from, sizeof(Word));
  check_aligned(to, sizeof(Word));
#pragma unroll 4
  for (int64_t i = thread % 32; i < words; i += 32) to[i] = from[i];
}

template <typename Word>
void launch_words(const MoveRows& a, Stream stream) {
  launch(a.scatter ? move_rows_kernel<true, Word> : move_rows_kernel<false, Word>,
         static_cast<unsigned>(ceil_div(a.rows, kWarps)), kThreads, 0, stream, a);
}

}  // namespace

void launch_move_rows(const MoveRows& a, Stream stream) {
  switch (a.word_bytes) {
    case 16:
      return launch_words<Word<16>>(a, stream);
    case 8:
      return launch_words<Word<8>>(a, stream);
    case 4:
      return launch_words<Word<4>>(a, stream);
    case 2:
      return launch_words<Word<2>>(a, stream);
    default:
      return launch_words<Word<1>>(a, stream);
  }
}

}  // namespace fastbert
