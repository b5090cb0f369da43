// Attention of one head over one sequence. Keys and values are packed once; then 32 queries at a
// time see all their keys: a row of scores is whole when its softmax is taken, so nothing is
// rescaled, and a query's result does not depend on which queries stand beside it. With a window a
// tile is as wide as the blocks of keys that its queries see: nothing else is read or computed.
//
// Backward keeps its two gradients over keys transposed, (head_dim, keys): probabilities and their
// gradients then are right operands, whose pairs of rows are made by a shift and an or, where as
// left operands they would have to be transposed. Included inside a namespace.

// Queries whose products with the scores' gradients are summed in one go.
constexpr int64_t kQueryBlocks = 4;

// Takes pieces of a buffer one after the other; counts only where there is none.
struct Scratch {
  char* base;
  int64_t used = 0;

  template <typename T>
  FASTBERT_INLINE T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

// One head's rows of a tensor.
FASTBERT_INLINE Source head_of(const Attention& a, const Heads& h, int64_t head, int64_t first,
                               int64_t rows) {
  const int64_t size = a.dtype == Dtype::kFloat ? 4 : 2;
  const char* data = static_cast<const char*>(h.data);
  return {a.dtype, data + (first * h.ld + head * h.head_step) * size, rows, a.head_dim, h.ld};
}

// Rows of a head lie too far apart for the hardware to foresee the next ones.
FASTBERT_INLINE void prefetch_rows(const Source& s, int64_t row) {
  const int64_t size = s.dtype == Dtype::kFloat ? 4 : 2;
  const char* first = static_cast<const char*>(s.data) + row * s.ld * size;
  for (int64_t r = 0; r < smaller(kBlock, s.rows - row); ++r) {
    for (int64_t at = 0; at < s.columns * size; at += 64) {
      __builtin_prefetch(first + r * s.ld * size + at);
    }
  }
}

// [rows / 32][head_dim / 32] blocks of a head, or the other way round.
FASTBERT_INLINE void pack_head(const Source& s, Arithmetic arithmetic, Layout layout,
                               bool by_columns, int64_t first_block, int64_t num_blocks,
                               char* out) {
  const int64_t deep = blocks_of(s.columns), bytes = bytes_per_block(arithmetic);
  for (int64_t block = 0; block < num_blocks; ++block) {
    prefetch_rows(s, (first_block + block + 1) * kBlock);
    for (int64_t d = 0; d < deep; ++d) {
      const int64_t place = by_columns ? d * num_blocks + block : block * deep + d;
      pack_block(s, arithmetic, layout, (first_block + block) * kBlock, d * kBlock,
                 out + place * bytes);
    }
  }
}

// Floats from one row of scores to the next: rows a power of two apart would crowd into a few sets
// of the L1 cache.
FASTBERT_INLINE int64_t score_step(int64_t key_blocks) { return key_blocks * kBlock + 16; }

// The keys [begin, end) that a query sees.
struct KeyRange {
  int64_t begin, end;
};

FASTBERT_INLINE KeyRange keys_seen(const Attention& a, int64_t query, int64_t num_keys) {
  const int64_t begin = query - a.left, end = query + a.right + 1;
  const int64_t first = begin < 0 ? 0 : smaller(begin, num_keys);
  const int64_t last = end < first ? first : smaller(end, num_keys);
  return {first, last};
}

// The blocks [first, last) of keys that a block of queries sees.
struct KeyBlocks {
  int64_t first, last;

  FASTBERT_INLINE int64_t count() const { return last - first; }
};

FASTBERT_INLINE KeyBlocks key_blocks_seen(const Attention& a, int64_t first_block,
                                          int64_t last_block, int64_t num_keys) {
  const int64_t begin = keys_seen(a, first_block * kBlock, num_keys).begin;
  const int64_t end = keys_seen(a, last_block * kBlock - 1, num_keys).end;
  return {begin / kBlock, larger(begin / kBlock, blocks_of(end))};
}

// Blocks of keys that `group` neighbouring blocks of a task's queries see at most.
FASTBERT_INLINE int64_t widest_tile(const Attention& a, const AttentionTask& t, int64_t group) {
  int64_t most = 0;
  for (int64_t block = t.first_block; block < t.last_block; block += group) {
    most = larger(most, key_blocks_seen(a, block, block + group, t.num_k).count());
  }
  return most;
}

// `keys`, counted from the first of a tile.
FASTBERT_INLINE KeyRange within(KeyRange keys, KeyBlocks tile) {
  return {keys.begin - tile.first * kBlock, keys.end - tile.first * kBlock};
}

FASTBERT_INLINE float largest_of(const float* row, int64_t n) {
  Vec best = broadcast(-__builtin_inff());
  int64_t i = 0;
  if (n >= Pack::kLanes) {
    WholePack part;
    Pack most = part.load(row);
    for (i = Pack::kLanes; i + Pack::kLanes <= n; i += Pack::kLanes) {
      most = max(most, part.load(row + i));
    }
    best = max(max(most.v[0], most.v[1]), max(most.v[2], most.v[3]));
  }
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) best = max(best, load(row + i));
  if (i < n) {
    const uint32_t lanes = (1u << (n - i)) - 1u;
    const Vec rest = load(row + i, static_cast<int>(n - i));
    best = max(best, select(mask_of_bits(&lanes, 0), rest, best));
  }
  return largest(best);
}

FASTBERT_INLINE float smallest_of(const float* row, int64_t n) {
  float least = __builtin_inff();
  for (int64_t i = 0; i < n; ++i) least = row[i] < least ? row[i] : least;
  return least;
}

// 0 in the lanes outside [lo, hi).
FASTBERT_INLINE Vec only_between(Vec v, int64_t lo, int64_t hi) {
  constexpr int64_t kLanes = Vec::kLanes;
  const uint32_t below = (1u << (lo < 0 ? 0 : smaller(lo, kLanes))) - 1u;
  const uint32_t lanes = ((1u << (hi < 0 ? 0 : smaller(hi, kLanes))) - 1u) & ~below;
  return zero_unless(mask_of_bits(&lanes, 0), v);
}
FASTBERT_INLINE Pack only_between(Pack p, int64_t lo, int64_t hi) {
  for (int i = 0; i < Pack::kVecs; ++i) {
    p.v[i] = only_between(p.v[i], lo - i * Vec::kLanes, hi - i * Vec::kLanes);
  }
  return p;
}

// v at column c where its keys are seen, 0 elsewhere.
template <typename V>
FASTBERT_INLINE V seen_only(KeyRange keys, int64_t c, V v) {
  const bool all = keys.begin <= c && c + V::kLanes <= keys.end;
  return all ? v : only_between(v, keys.begin - c, keys.end - c);
}

// The bits of 32 queries from `query` and a tile's keys, or null without dropout.
FASTBERT_INLINE const uint32_t* keep_bits(const Attention& a, const AttentionTask& t, int64_t query,
                                          KeyBlocks tile, uint32_t* bits) {
  if (a.dropout.stream.threshold == 0) return nullptr;
  const auto sequence_head =
      static_cast<uint32_t>(static_cast<uint64_t>(t.sequence) * static_cast<uint64_t>(a.num_heads) +
                            static_cast<uint64_t>(t.head));
  for (int64_t half = 0; half < kBlock; half += 16) {
    score_keep_bits(a.dropout.stream, sequence_head, query + half, tile.first * kBlock,
                    tile.count() * kBlock, tile.count(), bits + half * tile.count());
  }
  return bits;
}

// --- rows of fp32 as operands ---

// The element of packed operands: bf16, or fp32, whose blocks are row-major on both sides.
template <bool kHalves>
struct Operand {
  using Element = float;
};
template <>
struct Operand<true> {
  using Element = bfloat16;
};

// A vector of row r at column c, a multiple of its width, into the blocks of a left operand.
template <bool kHalves>
FASTBERT_INLINE void put_left(char* blocks, int64_t r, int64_t c, Vec v) {
  using T = typename Operand<kHalves>::Element;
  T* block = reinterpret_cast<T*>(blocks) + c / kBlock * kBlock * kBlock;
  store(block + r * kBlock + c % kBlock, v);
}
template <bool kHalves>
FASTBERT_INLINE void put_left(char* blocks, int64_t r, int64_t c, Pack p) {
#pragma GCC unroll 4
  for (int i = 0; i < Pack::kVecs; ++i) {
    put_left<kHalves>(blocks, r, c + i * Vec::kLanes, p.v[i]);
  }
}

// Vectors of rows r and r + 1 (r even) at column c into a right operand of `deep` blocks a panel,
// of which these 32 rows are number `place`.
template <bool kHalves>
FASTBERT_INLINE void put_right(char* blocks, int64_t deep, int64_t place, int64_t r, int64_t c,
                               Vec upper, Vec lower) {
  using T = typename Operand<kHalves>::Element;
  T* block = reinterpret_cast<T*>(blocks) + (c / kBlock * deep + place) * kBlock * kBlock;
  if constexpr (kHalves) {
    store_pairs(block + c % kBlock / 16 * 512 + r * 16, upper, lower);
  } else {
    store(block + r * kBlock + c % kBlock, upper);
    store(block + (r + 1) * kBlock + c % kBlock, lower);
  }
}
template <bool kHalves>
FASTBERT_INLINE void put_right(char* blocks, int64_t deep, int64_t place, int64_t r, int64_t c,
                               Pack upper, Pack lower) {
#pragma GCC unroll 4
  for (int i = 0; i < Pack::kVecs; ++i) {
    put_right<kHalves>(blocks, deep, place, r, c + i * Vec::kLanes, upper.v[i], lower.v[i]);
  }
}

// exp, to what the operand of the next product can hold.
template <bool kHalves, typename V>
FASTBERT_INLINE V exp_for(V x) {
  if constexpr (kHalves) {
    return brief_exp(x);
  } else {
    return exp(x);
  }
}

// The same of x / kUnit, for which there is a shorter way.
template <bool kHalves>
struct Exponent {
  static constexpr float kUnit = 1.0f;
  template <typename V>
  static FASTBERT_INLINE V of(V x) {
    return exp(x);
  }
};
#if defined(FASTBERT_AVX512_BF16)
template <>
struct Exponent<true> {
  static constexpr float kUnit = 1.44269504f;  // log2 e
  template <typename V>
  static FASTBERT_INLINE V of(V x) {
    return brief_exp2(x);
  }
};
#endif

// Of a row: the sum of exp(score - peak).
struct Softmax {
  float sum, peak;

  FASTBERT_INLINE float lse() const {
    return sum == 0.0f ? -__builtin_inff() : peak + __builtin_logf(sum);
  }
};

// A row of `padded` scores, the first of which has `keys` to see, to exponentials in the left
// operand's blocks (dropped where bits say so); of none the sum is 0.
template <bool kHalves>
FASTBERT_INLINE Softmax softmax_row(const Attention& a, KeyRange keys, int64_t padded,
                                    const uint32_t* bits, int64_t r, const float* row,
                                    char* blocks) {
  const float scale = a.softmax_scale;
  const int64_t count = keys.end - keys.begin;
  float peak = 0.0f;
  if (count > 0) {
    peak =
        scale < 0.0f ? smallest_of(row + keys.begin, count) : largest_of(row + keys.begin, count);
  }
  const float factor = scale * Exponent<kHalves>::kUnit, shift = peak * factor;
  Vec sums = broadcast(0.0f);
  for_each_pack(padded, [&](int64_t c, auto part) FASTBERT_INLINE_BODY {
    const auto x = part.load(row + c);
    using V = decltype(part.load(row));
    // Product and difference are rounded apart, here and in backward, so that one key's
    // probability is exactly 1.
    V e = Exponent<kHalves>::of(x * constant<V>(factor) - constant<V>(shift));
    e = seen_only(keys, c, e);
    sums = sums + total(e);
    if (bits != nullptr) e = kept_only(bits, c, e);
    put_left<kHalves>(blocks, r, c, e);
  });
  return {sum(sums), scale * peak};
}

FASTBERT_INLINE void store_row(Dtype dtype, const float* row, float factor, int64_t n, void* out,
                               int64_t offset) {
  with_dtype(dtype, [&](auto zero) {
    auto* to = static_cast<decltype(zero)*>(out) + offset;
    for_each_vec(n, [&](int64_t i, auto part) {
      part.store(to + i, part.load(row + i) * broadcast(factor));
    });
  });
}

FASTBERT_INLINE void write_head_row(const Attention& a, const Heads& h, int64_t row, int64_t head,
                                    const float* values, float factor) {
  store_row(a.dtype, values, factor, a.head_dim, const_cast<void*>(h.data),
            row * h.ld + head * h.head_step);
}

struct ForwardScratch {
  char *keys, *values, *query, *weights;
  float *scores, *sums;
  uint32_t* bits;

  FASTBERT_INLINE ForwardScratch(Scratch& s, const Attention& a, const AttentionTask& t) {
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t held = key_blocks_seen(a, t.first_block, t.last_block, t.num_k).count();
    const int64_t tile = widest_tile(a, t, 1);
    keys = s.take<char>(held * deep * bytes);
    values = s.take<char>(held * deep * bytes);
    query = s.take<char>(deep * bytes);
    weights = s.take<char>(tile * bytes);
    scores = s.take<float>(kBlock * score_step(tile));
    sums = s.take<float>(kBlock * deep * kBlock);
    // Sixteen columns more: the masks are made 64 columns at a time.
    bits = s.take<uint32_t>(kBlock * (tile + 1));
  }
};

template <bool kHalves>
void attention_fwd_task(const Attention& a, const AttentionTask& t, char* memory) {
  Scratch pieces{memory};
  const ForwardScratch s(pieces, a, t);
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const KeyBlocks held = key_blocks_seen(a, t.first_block, t.last_block, t.num_k);
  const int64_t step = score_step(widest_tile(a, t, 1)), width = deep * kBlock;
  const Source q = head_of(a, a.q, t.head, t.first_q, t.num_q);
  pack_head(head_of(a, a.k, t.head, t.first_k, t.num_k), a.arithmetic, Layout::kBTransposed, false,
            held.first, held.count(), s.keys);
  pack_head(head_of(a, a.v, t.head, t.first_k, t.num_k), a.arithmetic, Layout::kB, true, held.first,
            held.count(), s.values);
  Softmax rows[kBlock];
  for (int64_t block = t.first_block; block < t.last_block; ++block) {
    const int64_t query = block * kBlock, count = smaller(kBlock, t.num_q - query);
    const KeyBlocks tile = key_blocks_seen(a, block, block + 1, t.num_k);
    const int64_t start = tile.first - held.first;
    pack_head(q, a.arithmetic, Layout::kA, false, block, 1, s.query);
    for (int64_t j = 0; j < tile.count(); ++j) {
      a.multiply(s.query, s.keys + (start + j) * deep * bytes, deep, s.scores + j * kBlock, step,
                 false);
    }
    const uint32_t* bits = keep_bits(a, t, query, tile, s.bits);
    for (int64_t r = 0; r < kBlock; ++r) {
      const KeyRange seen = within(keys_seen(a, query + r, t.num_k), tile);
      rows[r] = softmax_row<kHalves>(a, r < count ? seen : KeyRange{0, 0}, tile.count() * kBlock,
                                     bits == nullptr ? nullptr : bits + r * tile.count(), r,
                                     s.scores + r * step, s.weights);
    }
    for (int64_t d = 0; d < deep; ++d) {
      a.multiply(s.weights, s.values + (d * held.count() + start) * bytes, tile.count(),
                 s.sums + d * kBlock, width, false);
    }
    for (int64_t r = 0; r < count; ++r) {
      // A query without a key has a sum of 0 and a result of 0.
      const float factor = rows[r].sum == 0.0f ? 0.0f : a.dropout.scale / rows[r].sum;
      write_head_row(a, a.out, t.first_q + query + r, t.head, s.sums + r * width, factor);
      if (a.softmax_lse != nullptr) {
        a.softmax_lse[t.head * a.lse_ld + t.first_q + query + r] = rows[r].lse();
      }
    }
  }
}

struct BackwardScratch {
  char *keys, *key_rows, *values, *query, *gradient, *query_columns, *gradient_columns;
  char *score_rows, *weight_pairs, *score_pairs;
  float *scores, *dweights, *dq, *dk, *dv;
  uint32_t* bits;

  FASTBERT_INLINE BackwardScratch(Scratch& s, const Attention& a, const AttentionTask& t) {
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t key_blocks = blocks_of(t.num_k), tile = widest_tile(a, t, 1);
    const int64_t group_tile = widest_tile(a, t, kQueryBlocks);
    keys = s.take<char>(key_blocks * deep * bytes);
    key_rows = s.take<char>(key_blocks * deep * bytes);
    values = s.take<char>(key_blocks * deep * bytes);
    query = s.take<char>(deep * bytes);
    gradient = s.take<char>(deep * bytes);
    query_columns = s.take<char>(kQueryBlocks * deep * bytes);
    gradient_columns = s.take<char>(kQueryBlocks * deep * bytes);
    score_rows = s.take<char>(tile * bytes);
    weight_pairs = s.take<char>(group_tile * kQueryBlocks * bytes);
    score_pairs = s.take<char>(group_tile * kQueryBlocks * bytes);
    scores = s.take<float>(kBlock * score_step(tile));
    dweights = s.take<float>(kBlock * score_step(tile));
    dq = s.take<float>(kBlock * deep * kBlock);
    dk = s.take<float>(deep * kBlock * score_step(key_blocks));
    dv = s.take<float>(deep * kBlock * score_step(key_blocks));
    bits = s.take<uint32_t>(kBlock * (tile + 1));
  }
};

// A row's probabilities P in place of its scores, Z·dP in place of dP, Z the dropout's factors;
// returns Σ P·Z·dP.
template <bool kHalves>
FASTBERT_INLINE float weigh_row(const Attention& a, KeyRange keys, int64_t padded, float lse,
                                const uint32_t* bits, float* weights, float* dweights) {
  Vec sums = broadcast(0.0f);
  for_each_pack(padded, [&](int64_t c, auto part) FASTBERT_INLINE_BODY {
    const auto x = part.load(weights + c);
    using V = decltype(part.load(weights));
    V p = exp_for<kHalves>(x * constant<V>(a.softmax_scale) - constant<V>(lse));
    p = seen_only(keys, c, p);
    V d = part.load(dweights + c);
    if (bits != nullptr) d = kept_only(bits, c, d * constant<V>(a.dropout.scale));
    sums = sums + total(p * d);
    part.store(weights + c, p);
    part.store(dweights + c, d);
  });
  return sum(sums);
}

// Where two neighbouring rows stand in the operands of the last three products.
struct Operands {
  char *score_rows, *score_pairs, *weight_pairs;
  int64_t deep, place;
};

// dS = scale·P·(Z·dP - Σ P·Z·dP) and Z·P of rows r and r + 1, as operands.
template <bool kHalves>
FASTBERT_INLINE void put_gradients(const Attention& a, const Operands& to, int64_t padded,
                                   int64_t step, int64_t r, const float* means,
                                   const uint32_t* const* bits, const float* weights,
                                   const float* dweights) {
  for_each_pack(padded, [&](int64_t c, auto part) FASTBERT_INLINE_BODY {
    using V = decltype(part.load(weights));
    V p[2], ds[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      p[i] = part.load(weights + i * step + c);
      ds[i] = p[i] * constant<V>(a.softmax_scale) *
              (part.load(dweights + i * step + c) - constant<V>(means[i]));
      put_left<kHalves>(to.score_rows, r + i, c, ds[i]);
      if (bits[i] != nullptr) p[i] = kept_only(bits[i], c, p[i] * constant<V>(a.dropout.scale));
    }
    put_right<kHalves>(to.score_pairs, to.deep, to.place, r, c, ds[0], ds[1]);
    put_right<kHalves>(to.weight_pairs, to.deep, to.place, r, c, p[0], p[1]);
  });
}

// The blocks of a group's right operands at `place` whose keys the block there does not see.
FASTBERT_INLINE void clear_unseen(const Operands& to, int64_t bytes, KeyBlocks seen,
                                  KeyBlocks group) {
  for (int64_t j = group.first; j < group.last; ++j) {
    if (seen.first <= j && j < seen.last) continue;
    const int64_t at = ((j - group.first) * to.deep + to.place) * bytes;
    __builtin_memset(to.score_pairs + at, 0, bytes);
    __builtin_memset(to.weight_pairs + at, 0, bytes);
  }
}

// (head_dim, keys) in fp32 to rows of keys; zeros from key `written` on.
FASTBERT_INLINE void write_transposed(const Attention& a, const AttentionTask& t, const Heads& h,
                                      const float* columns, int64_t step, int64_t written) {
  float tile[kBlock][kBlock];
  for (int64_t key = 0; key < t.num_k; key += kBlock) {
    for (int64_t d = 0; d < a.head_dim; d += kBlock) {
      for (int64_t r = 0; r < kBlock; ++r) {
        if (key < written) {
          __builtin_memcpy(tile[r], columns + (d + r) * step + key, kBlock * 4);
        } else {
          __builtin_memset(tile[r], 0, kBlock * 4);
        }
      }
      float rows[kBlock * kBlock];
      transpose_block(tile, rows);
      for (int64_t r = 0; r < smaller(kBlock, t.num_k - key); ++r) {
        store_row(a.dtype, rows + r * kBlock, 1.0f, smaller(kBlock, a.head_dim - d),
                  const_cast<void*>(h.data),
                  (t.first_k + key + r) * h.ld + t.head * h.head_step + d);
      }
    }
  }
}

template <bool kHalves>
void attention_bwd_task(const Attention& a, const AttentionTask& t, char* memory) {
  Scratch pieces{memory};
  const BackwardScratch s(pieces, a, t);
  const Arithmetic arithmetic = a.arithmetic;
  const int64_t bytes = bytes_per_block(arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), width = deep * kBlock;
  const int64_t step = score_step(widest_tile(a, t, 1)), key_step = score_step(key_blocks);
  const Source q = head_of(a, a.q, t.head, t.first_q, t.num_q);
  const Source dout = head_of(a, a.dout, t.head, t.first_q, t.num_q);
  const Source k = head_of(a, a.k, t.head, t.first_k, t.num_k);
  const Source v = head_of(a, a.v, t.head, t.first_k, t.num_k);
  pack_head(k, arithmetic, Layout::kBTransposed, false, 0, key_blocks, s.keys);
  pack_head(k, arithmetic, Layout::kB, true, 0, key_blocks, s.key_rows);
  pack_head(v, arithmetic, Layout::kBTransposed, false, 0, key_blocks, s.values);
  const int64_t query_blocks = blocks_of(t.num_q);
  int64_t written = 0;  // blocks of keys whose gradients have been begun
  for (int64_t first = 0; first < query_blocks; first += kQueryBlocks) {
    const int64_t group = smaller(kQueryBlocks, query_blocks - first);
    const KeyBlocks in_sight = key_blocks_seen(a, first, first + kQueryBlocks, t.num_k);
    for (int64_t place = 0; place < group; ++place) {
      const int64_t query = (first + place) * kBlock, count = smaller(kBlock, t.num_q - query);
      const KeyBlocks tile = key_blocks_seen(a, first + place, first + place + 1, t.num_k);
      const int64_t padded = tile.count() * kBlock;
      pack_head(q, arithmetic, Layout::kA, false, first + place, 1, s.query);
      pack_head(dout, arithmetic, Layout::kA, false, first + place, 1, s.gradient);
      for (int64_t j = 0; j < tile.count(); ++j) {
        const int64_t panel = (tile.first + j) * deep * bytes;
        a.multiply(s.query, s.keys + panel, deep, s.scores + j * kBlock, step, false);
        a.multiply(s.gradient, s.values + panel, deep, s.dweights + j * kBlock, step, false);
      }
      const uint32_t* bits = keep_bits(a, t, query, tile, s.bits);
      const float* lse = a.softmax_lse + t.head * a.lse_ld + t.first_q + query;
      const Operands whole{s.score_rows, s.score_pairs, s.weight_pairs, group, place};
      clear_unseen(whole, bytes, tile, in_sight);
      const int64_t start = (tile.first - in_sight.first) * group * bytes;
      const Operands operands{s.score_rows, s.score_pairs + start, s.weight_pairs + start, group,
                              place};
      for (int64_t r = 0; r < kBlock; r += 2) {
        float means[2];
        const uint32_t* row_bits[2];
        for (int64_t i = 0; i < 2; ++i) {
          const bool real = r + i < count;
          const KeyRange seen = within(keys_seen(a, query + r + i, t.num_k), tile);
          row_bits[i] = bits == nullptr ? nullptr : bits + (r + i) * tile.count();
          means[i] = weigh_row<kHalves>(a, real ? seen : KeyRange{0, 0}, padded,
                                        real ? lse[r + i] : 0.0f, row_bits[i],
                                        s.scores + (r + i) * step, s.dweights + (r + i) * step);
        }
        put_gradients<kHalves>(a, operands, padded, step, r, means, row_bits, s.scores + r * step,
                               s.dweights + r * step);
      }
      for (int64_t d = 0; d < deep; ++d) {
        a.multiply(s.score_rows, s.key_rows + (d * key_blocks + tile.first) * bytes, tile.count(),
                   s.dq + d * kBlock, width, false);
      }
      for (int64_t r = 0; r < count; ++r) {
        write_head_row(a, a.dq, t.first_q + query + r, t.head, s.dq + r * width, 1.0f);
      }
    }
    pack_head(q, arithmetic, Layout::kATransposed, true, first, group, s.query_columns);
    pack_head(dout, arithmetic, Layout::kATransposed, true, first, group, s.gradient_columns);
    for (int64_t d = 0; d < deep; ++d) {
      for (int64_t j = in_sight.first; j < in_sight.last; ++j) {
        const int64_t left = d * group * bytes, right = (j - in_sight.first) * group * bytes;
        const int64_t at = d * kBlock * key_step + j * kBlock;
        a.multiply(s.query_columns + left, s.score_pairs + right, group, s.dk + at, key_step,
                   j < written);
        a.multiply(s.gradient_columns + left, s.weight_pairs + right, group, s.dv + at, key_step,
                   j < written);
      }
    }
    written = larger(written, in_sight.last);
  }
  write_transposed(a, t, a.dk, s.dk, key_step, written * kBlock);
  write_transposed(a, t, a.dv, s.dv, key_step, written * kBlock);
}

int64_t attention_scratch(const Attention& a, const AttentionTask& t, bool backward) {
  Scratch pieces{nullptr};
  if (backward) {
    BackwardScratch(pieces, a, t);
  } else {
    ForwardScratch(pieces, a, t);
  }
  return pieces.used;
}

void attention_fwd(const Attention& a, const AttentionTask& t, char* memory) {
#if defined(FASTBERT_AVX512_BF16)
  if (a.arithmetic == Arithmetic::kBFloat16) return attention_fwd_task<true>(a, t, memory);
#endif
  attention_fwd_task<false>(a, t, memory);
}

void attention_bwd(const Attention& a, const AttentionTask& t, char* memory) {
#if defined(FASTBERT_AVX512_BF16)
  if (a.arithmetic == Arithmetic::kBFloat16) return attention_bwd_task<true>(a, t, memory);
#endif
  attention_bwd_task<false>(a, t, memory);
}
