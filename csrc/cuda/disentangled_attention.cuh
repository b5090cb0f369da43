// The terms of relative positions that disentangled attention adds to the products of queries and
// keys: those of a block's own rows with one table, and of the other side's rows with the other.
//
// A distance is that of an own row to one of the other side. Sixteen rows of a warp and sixteen
// others meet at 31 distances, which lie in two neighbouring runs of sixteen: `above`, which begins
// where rows of the same number meet, and `below`. Products are made with all distances of both.
// Own row r and other row c meet at r - c: at that distance of `above` where r >= c, else at
// r - c + 16 of `below`. So of each row and distance mod 16 one run is needed, and what brings
// products to their pairs is to turn each row of them, or each column, by its number.
#pragma once

#include "cuda/attention.cuh"

namespace fastbert {

// --- turning scores ---

// out(r, c) = s(r, (r - c) mod 16): from distances to the other side's rows, and back.
__device__ __forceinline__ Scores turn_rows(const Scores& s) {
  const int g = lane_of() / 4, t = lane_of() % 4;
  Scores out;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int column = (g - 2 * t - e) & 15, source = lane_of() / 4 * 4 + column / 2 % 4;
    const bool odd = (g + e) % 2 == 1;  // what all four lanes of a row ask for
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float half[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float given = odd ? s.score[j][2 * h + 1] : s.score[j][2 * h];
        half[j] = __shfl_sync(kWholeWarp, given, source);
      }
      const bool swapped = (column >= 8) != (h == 1);
      out.score[0][2 * h + e] = swapped ? half[1] : half[0];
      out.score[1][2 * h + e] = swapped ? half[0] : half[1];
    }
  }
  return out;
}

// out(r, c) = s((r + kSign c) mod 16, c): with -1 from distances to own rows, with 1 back.
template <int kSign>
__device__ __forceinline__ Scores turn_columns(const Scores& s) {
  const int g = lane_of() / 4, t = lane_of() % 4;
  Scores out;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int row = (g + kSign * (2 * t + e)) & 15, source = row % 8 * 4 + t;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float half[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        half[h] = __shfl_sync(kWholeWarp, s.score[j][2 * h + e], source);
      }
      const bool swapped = (row >= 8) != (j == 1);
      out.score[j][e] = swapped ? half[1] : half[0];
      out.score[j][2 + e] = swapped ? half[0] : half[1];
    }
  }
  return out;
}

// Which run is needed where rows are a warp's own and columns distances.
struct OwnRun {
  __device__ __forceinline__ static bool is_above(int row, int distance) { return distance <= row; }
};

// Where rows are distances and columns the other side's rows.
struct OtherRun {
  __device__ __forceinline__ static bool is_above(int distance, int column) {
    return distance + column < 16;
  }
};

// Calls f(j, i, is_above) for each of a lane's scores s.score[j][i].
template <typename Run, typename F>
__device__ __forceinline__ void for_each_score(F f) {
  const int g = lane_of() / 4, t = lane_of() % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(j, i, Run::is_above(g + i / 2 * 8, 8 * j + 2 * t + i % 2));
  }
}

template <typename Run>
__device__ __forceinline__ Scores merge(const Scores& above, const Scores& below) {
  Scores out;
  for_each_score<Run>([&](int j, int i, bool is_above) {
    out.score[j][i] = is_above ? above.score[j][i] : below.score[j][i];
  });
  return out;
}

// Of merged scores those of one run, and zeros.
template <typename Run>
__device__ __forceinline__ Scores only(bool above, const Scores& s) {
  Scores out;
  for_each_score<Run>([&](int j, int i, bool is_above) {
    out.score[j][i] = is_above == above ? s.score[j][i] : 0.0f;
  });
  return out;
}

__device__ __forceinline__ void add(Scores& s, const Scores& term) {
#pragma unroll
  for (int i = 0; i < 8; ++i) s.score[i / 4][i % 4] += term.score[i / 4][i % 4];
}

// --- rows of a table by distance ---

// Runs are counted the way a block walks over the other side: distances fall.
template <typename T>
struct PositionTable {
  const DisentangledAttention& p;
  const Heads& heads;  // without data where there is no such term
  int first_distance;  // of run 0
  bool from_keys;      // whether distances are those of keys to queries, not of queries to keys

  __device__ __forceinline__ int distance(int run) const { return first_distance - 16 * run; }
  __device__ __forceinline__ int bucket(int distance) const {
    const int of_query = from_keys ? -distance : distance;
    return p.buckets[min(max(of_query, -p.reach), p.reach) + p.reach];
  }
  __device__ __forceinline__ const T* row(int bucket) const {
    return static_cast<const T*>(heads.data) + blockIdx.y * heads.head_step +
           bucket * heads.row_step;
  }
};

// In shared memory the rows of some runs, the latest of those brought.
template <typename T, int kDim, int kRuns>
class Band {
 public:
  static constexpr size_t kBytes = kRuns * 16 * kDim * sizeof(T);

  __device__ __forceinline__ Band(const PositionTable<T>& table, Shared<char> memory)
      : table_(table), tile_{shared_cast<T>(memory)} {}

  template <int kNewRuns, int kBlockThreads>
  __device__ __forceinline__ void bring(int run) const {
    bring_rows<16 * kNewRuns, kBlockThreads>(
        tile_, static_cast<const T*>(table_.heads.data), table_.p.content.head_dim,
        table_.p.content.wide, [&](int row) {
          const int of_row = run + row / 16;
          const T* from = table_.row(table_.bucket(table_.distance(of_row) + row % 16));
          return RowCopy<T>{place(of_row) + row % 16, true, from};
        });
  }

  __device__ __forceinline__ bool is_there() const { return table_.heads.data != nullptr; }
  __device__ __forceinline__ const Tile<T, kDim>& rows() const { return tile_; }
  __device__ __forceinline__ int place(int run) const {
    return static_cast<int>(static_cast<unsigned>(run) % kRuns) * 16;
  }

 private:
  PositionTable<T> table_;
  Tile<T, kDim> tile_;
};

// There is no room for them in fp32: rows are read where they lie.
template <int kDim, int kRuns>
class Band<float, kDim, kRuns> {
 public:
  static constexpr size_t kBytes = 0;

  struct Rows {
    using Element = float;
    static constexpr int kPieces = kDim / 4;
    const PositionTable<float>& table;

    struct Row {
      const PositionTable<float>& table;
      int bucket;  // addresses would take twice the registers

      __device__ __forceinline__ Pack<float> pack(int piece) const {
        const int column = 4 * piece;
        return load_piece(table.row(bucket), column, table.p.content.head_dim,
                          table.p.content.wide && column < table.p.content.head_dim);
      }
      __device__ __forceinline__ Two<float> two(int column) const {
        const float* row = table.row(bucket);
        return {{column < table.p.content.head_dim ? row[column] : 0.0f,
                 column + 1 < table.p.content.head_dim ? row[column + 1] : 0.0f}};
      }
    };
    __device__ __forceinline__ Row row(int distance) const {
      return {table, table.bucket(distance)};
    }
  };

  __device__ __forceinline__ Band(const PositionTable<float>& table, Shared<char>)
      : table_(table) {}

  template <int kNewRuns, int kBlockThreads>
  __device__ __forceinline__ void bring(int) const {}

  __device__ __forceinline__ bool is_there() const { return table_.heads.data != nullptr; }
  __device__ __forceinline__ Rows rows() const { return {table_}; }
  __device__ __forceinline__ int place(int run) const { return table_.distance(run); }

 private:
  PositionTable<float> table_;
};

// --- the terms ---

// A warp's rows and sixteen others are said to meet at the run that is their `above`; the next one
// is their `below`.
template <typename T, int kDim, int kRuns, bool kOwnsKeys>
class PositionTerms {
 public:
  using OneBand = Band<T, kDim, kRuns>;
  static constexpr size_t kBytes = 2 * OneBand::kBytes;

  __device__ __forceinline__ PositionTerms(const DisentangledAttention& p, Shared<char> memory,
                                           int first_distance)
      : own_(table(p, kOwnsKeys ? p.position_query : p.position_key, first_distance), memory),
        other_(table(p, kOwnsKeys ? p.position_key : p.position_query, first_distance),
               memory + OneBand::kBytes) {}

  template <int kNewRuns, int kBlockThreads>
  __device__ __forceinline__ void bring(int run) const {
    if (own_.is_there()) own_.template bring<kNewRuns, kBlockThreads>(run);
    if (other_.is_there()) other_.template bring<kNewRuns, kBlockThreads>(run);
  }

  // Adds the terms of a warp's rows and of sixteen rows of `others` from `first` on.
  template <typename Own>
  __device__ __forceinline__ void add_to(Scores& s, const Own& own, const Tile<T, kDim>& others,
                                         int first, int run) const {
    if (own_.is_there()) {
      const Scores above = own.times(own_.rows(), own_.place(run));
      const Scores below = own.times(own_.rows(), own_.place(run + 1));
      add(s, turn_rows(merge<OwnRun>(above, below)));
    }
    if (other_.is_there()) {
      const Scores above = product(other_.rows(), other_.place(run), others, first);
      const Scores below = product(other_.rows(), other_.place(run + 1), others, first);
      add(s, turn_columns<-1>(merge<OtherRun>(above, below)));
    }
  }

  // Adds what the gradients of such scores hand on to the warp's rows.
  template <int kEights>
  __device__ __forceinline__ void add_gradient(float (&sums)[kEights][4], const Scores& gradient,
                                               int run) const {
    if (!own_.is_there()) return;
    const Scores by_distance = turn_rows(gradient);
#pragma unroll 1  // both at once would cost registers
    for (int i = 0; i < 2; ++i) {
      add_product(sums, only<OwnRun>(i == 0, by_distance), own_.rows(), own_.place(run + i));
    }
  }

 private:
  static __device__ __forceinline__ PositionTable<T> table(const DisentangledAttention& p,
                                                           const Heads& heads, int first_distance) {
    return {p, heads, first_distance, kOwnsKeys};
  }

  OneBand own_, other_;
};

// Rows of the other side in a tile: two tiles of them and the bands fit what a block may have.
template <int kDim>
constexpr int kRowsBesideBands = kDim <= 96 ? 32 : 16;

// The terms of a block that walks over the other side in tiles, of which there are two at a time.
// Its last warp and the first rows of the other side meet at run 0.
template <typename T, int kDim, bool kOwnsKeys>
class BlockTerms {
  static constexpr int kOwnRuns = kOwnRows / 16, kOtherRuns = kRowsBesideBands<kDim> / 16;
  using Terms = PositionTerms<T, kDim, kOwnRuns + 2 * kOtherRuns, kOwnsKeys>;

 public:
  static constexpr size_t kBytes = Terms::kBytes;

  __device__ __forceinline__ BlockTerms(const DisentangledAttention& p, Shared<char> memory,
                                        int first_own)
      : terms_(p, memory, first_own + kOwnRows - kWarpRows) {}

  __device__ __forceinline__ void bring_first() const {
    terms_.template bring<kOwnRuns, kThreads>(0);
  }
  __device__ __forceinline__ void bring(int first_other) const {
    terms_.template bring<kOtherRuns, kThreads>(kOwnRuns + first_other / 16);
  }

  template <typename Own>
  __device__ __forceinline__ void add_to(Scores& s, const Own& own, const Tile<T, kDim>& others,
                                         int first, int first_other) const {
    terms_.add_to(s, own, others, first, run_of(first_other));
  }
  template <int kEights>
  __device__ __forceinline__ void add_gradient(float (&sums)[kEights][4], const Scores& gradient,
                                               int first_other) const {
    terms_.add_gradient(sums, gradient, run_of(first_other));
  }

 private:
  static __device__ __forceinline__ int run_of(int first_other) {
    return (kOwnRows - kWarpRows - first_row_of_warp() + first_other) / 16;
  }

  Terms terms_;
};

// Defined for float, bf16 and fp16, in files of their own that compile side by side.
template <typename T>
void launch_disentangled_attention_fwd_of(const DisentangledAttention& p, Stream stream);
template <typename T>
void launch_disentangled_attention_bwd_of(const DisentangledAttention& p, Stream stream);
template <typename T>
void launch_position_sums_of(const DisentangledAttention& p, const PositionSums& sums,
                             Stream stream);

}  // namespace fastbert
