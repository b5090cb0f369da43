// What attention's kernels share: the rows a block owns, tiles in shared memory, products of a
// warp's sixteen rows, what a query sees, and dropout.
//
// A block owns 64 rows of one sequence and head, queries or keys, sixteen for each of its warps,
// and walks over the rows of the other side tile by tile: while one is worked on, the next is on
// its way. A warp takes 16 x 16 scores at a time, in the accumulators' layout of the tensor cores,
// `Scores`. fp32 has the same layouts and plain multiply-adds.
#pragma once

#include <type_traits>

#include "cuda/mma.cuh"

namespace fastbert {

constexpr int kWarpRows = 16;
constexpr int kOwnRows = 64;
constexpr int kThreads = kOwnRows / kWarpRows * 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Shared memory that a block may have on every GPU from sm_80 on.
constexpr size_t kMostShared = 99 << 10;

// The widest heads of which a multiprocessor holds three blocks: with those of sm_89 and sm_120 it
// has 100 KiB of shared memory for them.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kWidestOfThree = 32;
#else
constexpr int kWidestOfThree = 64;
#endif

// Whether registers hold a warp's own rows beside all else.
template <typename T>
constexpr bool kFitsRegisters = !std::is_same_v<T, float>;

// Blocks that a multiprocessor is to hold at a time; with more, registers would be spilled.
template <typename T>
constexpr int resident_blocks(int dim) {
  return dim <= kWidestOfThree && !std::is_same_v<T, float> ? 3 : 2;
}

// score[j][2h + e] is that of row g + 8h and column 8j + 2t + e.
struct Scores {
  float score[2][4];
};

__device__ __forceinline__ int lane_of() { return static_cast<int>(threadIdx.x) % 32; }
__device__ __forceinline__ int first_row_of_warp() {
  return static_cast<int>(threadIdx.x) / 32 * kWarpRows;
}

// --- which rows ---

struct Block {
  int sequence;   // as many as there are sequences: the idle rows behind the last one
  int64_t start;  // its first row
  int length;
  int first;  // row of the block's first, within the sequence
};

// One launch serves sequences of any lengths, which the host never learns: sequence i takes the
// blocks from cu_seqlens[i] / kOwnRows + i on. There are always enough of them, since
// floor(a + b) - floor(a) + 1 >= ceil(b); a block that is left over finds `first` at or behind
// `length`.
inline unsigned blocks_of(int64_t rows, int sequences) {
  return static_cast<unsigned>(rows / kOwnRows + sequences + 1);
}

__device__ __forceinline__ Block find_block(const int32_t* cu_seqlens, int sequences,
                                            int64_t rows) {
  const int slot = static_cast<int>(blockIdx.x);
  Block b{0, 0, 0, 0};
  for (int first = 0; first < sequences; first += 32) {
    const int index = first + lane_of() + 1;
    const bool passed = index <= sequences && cu_seqlens[index] / kOwnRows + index <= slot;
    b.sequence += __popc(__ballot_sync(kWholeWarp, passed));
  }
  b.start = cu_seqlens[b.sequence];
  const int64_t end = b.sequence < sequences ? cu_seqlens[b.sequence + 1] : rows;
  b.length = static_cast<int>(end - b.start);
  b.first = (slot - static_cast<int>(b.start / kOwnRows) - b.sequence) * kOwnRows;
  return b;
}

// The rows of one head in one sequence.
template <typename T>
struct HeadRows {
  T* data;
  int64_t step;
  int length;

  __device__ __forceinline__ T* row(int i) const { return data + i * step; }
};

template <typename T>
__device__ __forceinline__ HeadRows<T> rows_of(const Heads& heads, int64_t start, int length) {
  return {static_cast<T*>(heads.data) + start * heads.row_step + blockIdx.y * heads.head_step,
          heads.row_step, length};
}

struct OtherSide {
  int64_t start;
  int length;
};

// The rows of the same sequence on the other side; the idle rows have none.
__device__ __forceinline__ OtherSide other_side(const int32_t* cu_seqlens, const Block& b,
                                                int sequences) {
  if (b.sequence == sequences) return {0, 0};
  const int start = cu_seqlens[b.sequence];
  return {start, cu_seqlens[b.sequence + 1] - start};
}

struct Range {
  int low, high;
};

// What rows of the block see of the other side, beginning with a whole tile.
template <int kTileRows>
__device__ __forceinline__ Range rows_in_sight(int first, int length, int before, int after) {
  const int low = first > before ? (first - before) / kTileRows * kTileRows : 0;
  const int64_t high = static_cast<int64_t>(first) + kOwnRows + after;
  return {low, high < length ? static_cast<int>(high) : length};
}

// --- tiles in shared memory ---

template <typename T>
struct alignas(2 * sizeof(T)) Two {
  T element[2];
};

// Rows of kDim elements in pieces of 16 bytes, which are swapped about within a row such that the
// same piece of eight neighbouring rows lies in eight different groups of banks.
template <typename T, int kDim>
struct Tile {
  using Element = T;
  static constexpr int kPiece = 16 / sizeof(T);
  static constexpr int kPieces = kDim / kPiece;
  Shared<T> data;

  __device__ __forceinline__ static int place(int row, int piece) {
    const int swap = kPieces % 8 == 0 ? row % 8 : row / 2 % 4;
    return (row * kPieces + (piece ^ swap)) * kPiece;
  }
  __device__ __forceinline__ Shared<T> at(int row, int piece) const {
    return data + place(row, piece);
  }

  struct Row {
    const Tile& tile;
    int index;

    __device__ __forceinline__ Pack<T> pack(int piece) const {
      return *shared_cast<Pack<T>>(tile.at(index, piece));
    }
    __device__ __forceinline__ Two<T> two(int column) const {
      return *shared_cast<Two<T>>(tile.at(index, column / kPiece) + column % kPiece);
    }
  };
  __device__ __forceinline__ Row row(int index) const { return {*this, index}; }
};

// The columns from `column` on of a row that are there; zeros behind the head dim.
template <typename T>
__device__ __forceinline__ Pack<T> load_piece(const T* row, int column, int head_dim, bool wide) {
  if (wide) return load_pack(row + column);
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    pack.element[i] = column + i < head_dim ? row[column + i] : from_float<T>(0.0f);
  }
  return pack;
}

template <typename T>
struct RowCopy {
  int to;  // row of a tile
  bool there;
  const T* from;  // its first element
};

// Brings the rows that row_copy(0) to row_copy(kRows - 1) name into a tile; zeros where there are
// none, and behind the head dim: what lies in memory there is another sequence's or nobody's.
// `anywhere` may be read.
template <int kRows, int kBlockThreads, typename T, int kDim, typename F>
__device__ __forceinline__ void bring_rows(const Tile<T, kDim>& tile, const T* anywhere,
                                           int head_dim, bool wide, F row_copy) {
  using Piece = Tile<T, kDim>;
  constexpr int kCopies = kRows * Piece::kPieces / kBlockThreads;
  static_assert(kRows * Piece::kPieces % kBlockThreads == 0);
  // Addresses take registers: in fp32 those of one at a time, of a warp alone, which makes many,
  // two.
#pragma unroll(!kFitsRegisters<T> ? 1 : kBlockThreads < kThreads ? 2 : kCopies)
  for (int i = 0; i < kCopies; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kBlockThreads;
    const int piece = index % Piece::kPieces, column = piece * Piece::kPiece;
    const RowCopy<T> copy = row_copy(index / Piece::kPieces);
    const bool there = copy.there && column < head_dim;
    const Shared<T> to = tile.at(copy.to, piece);
    if (wide) {
      copy_async_16(shared_cast<char>(to), there ? copy.from + column : anywhere, there ? 16 : 0);
    } else {
      const int columns = there ? head_dim : 0;
      *shared_cast<Pack<T>>(to) = load_piece(copy.from, column, columns, false);
    }
  }
}

// Rows [first, first + kRows) of a head.
template <int kRows, int kBlockThreads = kThreads, typename T, int kDim>
__device__ __forceinline__ void bring(const Tile<T, kDim>& tile, const HeadRows<const T>& from,
                                      int first, int head_dim, bool wide) {
  bring_rows<kRows, kBlockThreads>(tile, from.data, head_dim, wide, [&](int row) {
    return RowCopy<T>{row, first + row < from.length, from.row(first + row)};
  });
}

// Writes a warp's rows, `factor` times the sums, by way of its own rows of a tile that is done
// with.
template <typename T, int kDim>
__device__ __forceinline__ void write_rows(const Tile<T, kDim>& tile,
                                           const float (&sums)[kDim / 8][4],
                                           const float (&factor)[2], const HeadRows<T>& to,
                                           int first, int head_dim, bool wide) {
  using Piece = Tile<T, kDim>;
  const int g = lane_of() / 4, t = lane_of() % 4, own = first_row_of_warp();
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kDim / 8; ++j) {
    const int column = 8 * j + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Two<T> two{{from_float<T>(sums[j][2 * h] * factor[h]),
                        from_float<T>(sums[j][2 * h + 1] * factor[h])}};
      const Shared<T> at = tile.at(own + g + 8 * h, column / Piece::kPiece);
      *shared_cast<Two<T>>(at + column % Piece::kPiece) = two;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kWarpRows * Piece::kPieces / 32; ++i) {
    const int index = lane_of() + 32 * i;
    const int row = own + index / Piece::kPieces, piece = index % Piece::kPieces;
    const int column = piece * Piece::kPiece;
    if (first + row >= to.length || column >= head_dim) continue;
    const Pack<T> pack = *shared_cast<Pack<T>>(tile.at(row, piece));
    T* at = to.row(first + row) + column;
    if (wide) {
      store_pack(at, pack);
    } else {
#pragma unroll
      for (int j = 0; j < Piece::kPiece; ++j) {
        if (column + j < head_dim) at[j] = pack.element[j];
      }
    }
  }
}

// --- products ---
//
// Of sixteen rows of a tile with sixteen rows of another, each with each: the left ones are the
// rows of the scores.

template <typename T, int kDim>
__device__ __forceinline__ Fragment load_left(const Tile<T, kDim>& tile, int first, int k) {
  return load_matrices<T>(tile.at(first + lane_of() % 16, 2 * k + lane_of() / 16));
}

template <typename T, int kDim>
__device__ __forceinline__ void add_step(Scores& s, const Fragment& left,
                                         const Tile<T, kDim>& right, int first, int k) {
  const int row = first + lane_of() / 16 * 8 + lane_of() % 8, piece = lane_of() / 8 % 2;
  const Fragment other = load_matrices<T>(right.at(row, 2 * k + piece));
  multiply_add<T>(s.score[0], left, other.pair[0], other.pair[1]);
  multiply_add<T>(s.score[1], left, other.pair[2], other.pair[3]);
}

template <typename T, int kDim>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2, Scores> product(
    const Tile<T, kDim>& left, int first_left, const Tile<T, kDim>& right, int first_right) {
  Scores s{};
#pragma unroll 2
  for (int k = 0; k < kDim / 16; ++k) {
    add_step(s, load_left(left, first_left, k), right, first_right, k);
  }
  return s;
}

// In fp32 rows may also be those of a table that is not in shared memory.
template <typename Left, typename Right>
__device__ __forceinline__ std::enable_if_t<std::is_same_v<typename Left::Element, float>, Scores>
product(const Left& left, int first_left, const Right& right, int first_right) {
  const int g = lane_of() / 4, t = lane_of() % 4;
  const typename Left::Row own_rows[2] = {left.row(first_left + g), left.row(first_left + g + 8)};
  const typename Right::Row other_rows[4] = {
      right.row(first_right + 2 * t), right.row(first_right + 2 * t + 1),
      right.row(first_right + 2 * t + 8), right.row(first_right + 2 * t + 9)};
  Scores s{};
#pragma unroll 1
  for (int piece = 0; piece < Left::kPieces; ++piece) {
    const Pack<float> own[2] = {own_rows[0].pack(piece), own_rows[1].pack(piece)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pack<float> other = other_rows[i].pack(piece);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = s.score[i / 2][2 * h + i % 2];
#pragma unroll
        for (int d = 0; d < 4; ++d) score = fmaf(own[h].element[d], other.element[d], score);
      }
    }
  }
  return s;
}

// A warp's sixteen rows as the left side of products, kept in registers or, where those are needed
// for more, loaded for each product. In fp32 they never fit.
template <typename T, int kDim, bool kKept>
class OwnRows {
 public:
  __device__ __forceinline__ explicit OwnRows(const Tile<T, kDim>& tile) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) kept_[k] = load_left(tile, first_row_of_warp(), k);
  }

  __device__ __forceinline__ Scores times(const Tile<T, kDim>& tile, int first) const {
    Scores s{};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) add_step(s, kept_[k], tile, first, k);
    return s;
  }

 private:
  Fragment kept_[kDim / 16];
};

template <typename T, int kDim>
class OwnRows<T, kDim, false> {
 public:
  __device__ __forceinline__ explicit OwnRows(const Tile<T, kDim>& tile) : tile_(tile) {}

  template <typename Rows>
  __device__ __forceinline__ Scores times(const Rows& rows, int first) const {
    return product(tile_, first_row_of_warp(), rows, first);
  }

 private:
  Tile<T, kDim> tile_;
};

// sums += s times sixteen rows of a tile, from `first` on.
template <typename T, int kDim>
__device__ __forceinline__ std::enable_if_t<sizeof(T) == 2> add_product(float (&sums)[kDim / 8][4],
                                                                        const Scores& s,
                                                                        const Tile<T, kDim>& tile,
                                                                        int first) {
  Fragment own;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&four)[4] = s.score[i / 2];
    own.pair[i] = pair_of<T>(four[i % 2 * 2], four[i % 2 * 2 + 1]);
  }
  const int row = first + lane_of() % 16, piece = lane_of() / 16;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const Fragment other = load_matrices_transposed<T>(tile.at(row, 2 * k + piece));
    multiply_add<T>(sums[2 * k], own, other.pair[0], other.pair[1]);
    multiply_add<T>(sums[2 * k + 1], own, other.pair[2], other.pair[3]);
  }
}

template <int kEights, typename Rows>
__device__ __forceinline__ std::enable_if_t<std::is_same_v<typename Rows::Element, float>>
add_product(float (&sums)[kEights][4], const Scores& s, const Rows& rows, int first) {
  const int t = lane_of() % 4;
#pragma unroll 1  // loads of later rows would cost registers
  for (int i = 0; i < 16; ++i) {
    const int holder = lane_of() / 4 * 4 + i % 8 / 2;
    float own[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float even = i < 8 ? s.score[0][2 * h] : s.score[1][2 * h];
      const float odd = i < 8 ? s.score[0][2 * h + 1] : s.score[1][2 * h + 1];
      own[h] = __shfl_sync(kWholeWarp, i % 2 == 0 ? even : odd, holder);
    }
    const typename Rows::Row row = rows.row(first + i);
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const Two<float> other = row.two(8 * j + 2 * t);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sums[j][k] = fmaf(own[k / 2], other.element[k % 2], sums[j][k]);
      }
    }
  }
}

// Over the four lanes that hold a row; each of them gets the result.
template <typename Combine>
__device__ __forceinline__ float reduce_quad(float x) {
  x = Combine::of(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return Combine::of(x, __shfl_xor_sync(kWholeWarp, x, 2));
}

// --- terms beside the products of queries and keys ---

// Attention has none. Those of disentangled attention stand in disentangled_attention.cuh.
struct NoTerms {
  template <typename Inputs>
  __device__ __forceinline__ NoTerms(const Inputs&, Shared<char>, int) {}

  // Begins to bring what the first tile and every further one need of a block.
  __device__ __forceinline__ void bring_first() const {}
  // What the tile needs that begins with this row of the other side.
  __device__ __forceinline__ void bring(int) const {}

  template <typename Own, typename Others>
  __device__ __forceinline__ void add_to(Scores&, const Own&, const Others&, int, int) const {}
  template <int kEights>
  __device__ __forceinline__ void add_gradient(float (&)[kEights][4], const Scores&, int) const {}
};

// --- what is seen and what is kept ---

// Whether every one of some queries sees every one of some keys: most tiles need no mask.
__device__ __forceinline__ bool sees_all(const Attention& a, int first_query, int queries,
                                         int first_key, int keys, int num_keys) {
  return first_key + keys <= num_keys && first_query + queries - 1 - first_key <= a.left &&
         first_key + keys - 1 - first_query <= a.right;
}

__device__ __forceinline__ bool sees(const Attention& a, int query, int key, int num_keys) {
  return key < num_keys && query - key <= a.left && key - query <= a.right;
}

// The bits of a piece of scores: half e of word[j][h] is that of score[j][2h + e].
struct ScoreBits {
  uint32_t word[2][2];
};

// Rows are queries: a lane's scores are one call's.
__device__ __forceinline__ ScoreBits bits_of_queries(const DropoutStream& stream,
                                                     uint32_t sequence_head, int first_query,
                                                     int first_key) {
  const uint32_t query = first_query + lane_of() / 4, key = first_key + lane_of() % 4 * 2;
  const PhiloxWords w = score_call(stream, score_place(query, key), sequence_head);
  return {{{w.word[0], w.word[2]}, {w.word[1], w.word[3]}}};
}

// Rows are keys: a lane's scores are halves of two calls, whose other halves are those of the lane
// with the neighbouring key. Each of the two makes one call and hands it over.
__device__ __forceinline__ ScoreBits bits_of_keys(const DropoutStream& stream,
                                                  uint32_t sequence_head, int first_query,
                                                  int first_key) {
  const uint32_t key = first_key + lane_of() / 4, odd = key % 2;
  const uint32_t query = first_query + lane_of() % 4 * 2 + odd;
  const PhiloxWords w = score_call(stream, score_place(query, key), sequence_head);
  ScoreBits bits;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t other = __shfl_xor_sync(kWholeWarp, w.word[i], 4);
    bits.word[i / 2][i % 2] =
        odd == 0 ? (w.word[i] & 0xFFFFu) | other << 16 : (w.word[i] & 0xFFFF0000u) | other >> 16;
  }
  return bits;
}

__device__ __forceinline__ bool keeps(const DropoutStream& stream, const ScoreBits& bits, int j,
                                      int i) {
  return keeps(stream, bits.word[j][i / 2], i % 2);
}

__device__ __forceinline__ uint32_t sequence_head(const Attention& a, int sequence) {
  return static_cast<uint32_t>(sequence) * a.heads + blockIdx.y;
}

// --- choosing an instance ---

// Calls f with the head dim that the tiles are padded to, as a type.
template <typename F>
void with_padded_dim(int head_dim, F f) {
  if (head_dim <= 32) return f(std::integral_constant<int, 32>());
  if (head_dim <= 64) return f(std::integral_constant<int, 64>());
  if (head_dim <= 96) return f(std::integral_constant<int, 96>());
  f(std::integral_constant<int, 128>());
}

// Defined for float, bf16 and fp16, in files of their own that compile side by side.
template <typename T>
void launch_attention_fwd_of(const Attention& a, Stream stream);
template <typename T>
void launch_attention_bwd_of(const Attention& a, Stream stream);

}  // namespace fastbert
