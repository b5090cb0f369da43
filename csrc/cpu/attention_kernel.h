// Attention of one head over one sequence. Keys and values are packed once; then 32 queries at a
// time see all their keys: a row of scores is whole when its softmax is taken, so nothing is
// rescaled, and a query's result does not depend on which queries stand beside it.
//
// Backward keeps its two gradients over keys transposed, (head_dim, keys): probabilities and their
// gradients then are right operands, whose pairs of rows are made by a shift and an or, where as
// left operands they would have to be transposed. Included inside a namespace.

// Queries whose products with the scores' gradients are summed in one go.
constexpr int64_t kQueryBlocks = 4;

FASTBERT_INLINE int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

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

// [rows / 32][head_dim / 32] blocks of a head, or the other way round.
FASTBERT_INLINE void pack_head(const Source& s, Arithmetic arithmetic, Layout layout,
                               bool by_columns, int64_t first_block, int64_t num_blocks,
                               char* out) {
  const int64_t deep = blocks_of(s.columns), bytes = bytes_per_block(arithmetic);
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t d = 0; d < deep; ++d) {
      const int64_t place = by_columns ? d * num_blocks + block : block * deep + d;
      pack_block(s, arithmetic, layout, (first_block + block) * kBlock, d * kBlock,
                 out + place * bytes);
    }
  }
}

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
  for (; i < n; ++i) best = max(best, broadcast(row[i]));
  return largest(best);
}

FASTBERT_INLINE float smallest_of(const float* row, int64_t n) {
  float least = __builtin_inff();
  for (int64_t i = 0; i < n; ++i) least = row[i] < least ? row[i] : least;
  return least;
}

// 0 in the first n lanes.
FASTBERT_INLINE Vec without_first(Vec v, int64_t n) {
  return n >= Vec::kLanes ? broadcast(0.0f) : n <= 0 ? v : v - first_lanes(v, static_cast<int>(n));
}
FASTBERT_INLINE Pack without_first(Pack p, int64_t n) {
  for (int i = 0; i < Pack::kVecs; ++i) p.v[i] = without_first(p.v[i], n - i * Vec::kLanes);
  return p;
}

FASTBERT_INLINE Vec total(Vec v) { return v; }
FASTBERT_INLINE Vec total(Pack p) { return (p.v[0] + p.v[1]) + (p.v[2] + p.v[3]); }

FASTBERT_INLINE Vec kept_only(const uint32_t* bits, int64_t i, Vec v) {
  return zero_unless(mask_of_bits(bits, i), v);
}
FASTBERT_INLINE Pack kept_only(const uint32_t* bits, int64_t i, Pack p) {
  for (int n = 0; n < Pack::kVecs; ++n) p.v[n] = kept_only(bits, i + n * Vec::kLanes, p.v[n]);
  return p;
}

FASTBERT_INLINE void fill_zero(float* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) row[i] = 0.0f;
}

// The bits of 32 queries from `query`, or null without dropout.
FASTBERT_INLINE const uint32_t* keep_bits(const Attention& a, const AttentionTask& t, int64_t query,
                                          int64_t words, uint32_t* bits) {
  if (a.dropout.stream.threshold == 0) return nullptr;
  const auto sequence_head =
      static_cast<uint32_t>(static_cast<uint64_t>(t.sequence) * static_cast<uint64_t>(a.num_heads) +
                            static_cast<uint64_t>(t.head));
  for (int64_t half = 0; half < kBlock; half += 16) {
    score_keep_bits(a.dropout.stream, sequence_head, query + half, t.num_k, words,
                    bits + half * words);
  }
  return bits;
}

// exp(scale · row - peak) over the keys seen, 0 elsewhere, and dropped where bits say so.
struct Softmax {
  float sum, lse;
};

FASTBERT_INLINE Softmax softmax_row(const Attention& a, KeyRange keys, int64_t padded,
                                    const uint32_t* bits, float* row) {
  fill_zero(row, 0, keys.begin);
  fill_zero(row, keys.end, padded);
  if (keys.begin == keys.end) return {0.0f, -__builtin_inff()};
  // From a multiple of the vectors, so that the bits line up; what lies before is not seen.
  const int64_t start = keys.begin / Pack::kLanes * Pack::kLanes;
  const float scale = a.softmax_scale;
  const float peak = scale * (scale >= 0.0f ? largest_of(row + keys.begin, keys.end - keys.begin)
                                            : smallest_of(row + keys.begin, keys.end - keys.begin));
  Vec sums = broadcast(0.0f);
  for_each_pack(keys.end - start, [&](int64_t i, auto part) {
    float* at = row + start + i;
    auto x = part.load(at);
    using V = decltype(x);
    V e = part.only(exp(x * constant<V>(scale) - constant<V>(peak)));
    if (start + i < keys.begin) e = without_first(e, keys.begin - start - i);
    sums = sums + total(e);
    if (bits != nullptr) e = kept_only(bits, start + i, e);
    part.store(at, e);
  });
  const float total_sum = sum(sums);
  return {total_sum, peak + __builtin_logf(total_sum)};
}

// Rows of fp32 as the left operand's blocks.
template <typename T>
FASTBERT_INLINE void pack_left_row(const float* row, int64_t r, int64_t columns, char* blocks) {
  for (int64_t c = 0; c < columns; c += Vec::kLanes) {
    T* to = reinterpret_cast<T*>(blocks) + c / kBlock * kBlock * kBlock + r * kBlock + c % kBlock;
    store(to, load(row + c));
  }
}

FASTBERT_INLINE void pack_left_rows(Arithmetic arithmetic, const float* rows, int64_t columns,
                                    char* blocks) {
  for (int64_t r = 0; r < kBlock; ++r) {
    const float* row = rows + r * columns;
    arithmetic == Arithmetic::kFloat ? pack_left_row<float>(row, r, columns, blocks)
                                     : pack_left_row<bfloat16>(row, r, columns, blocks);
  }
}

// The same rows as one block of depth `place` of every panel of a right operand of `deep` blocks.
FASTBERT_INLINE void pack_right_rows(Arithmetic arithmetic, const float* rows, int64_t columns,
                                     int64_t deep, int64_t place, char* blocks) {
  const int64_t bytes = bytes_per_block(arithmetic);
  for (int64_t c = 0; c < columns; c += kBlock) {
    char* block = blocks + (c / kBlock * deep + place) * bytes;
    if (arithmetic == Arithmetic::kFloat) {
      for (int64_t r = 0; r < kBlock; ++r) {
        __builtin_memcpy(block + r * kBlock * 4, rows + r * columns + c, kBlock * 4);
      }
      continue;
    }
#if defined(FASTBERT_AVX512)
    auto* pairs = reinterpret_cast<uint32_t*>(block);
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int64_t r = 0; r < kBlock; r += 2) {
      for (int64_t half = 0; half < 2; ++half) {
        const float* at = rows + r * columns + c + 16 * half;
        const __m512i first = _mm512_srli_epi32(bf16_bits(load(at)), 16);
        const __m512i second = _mm512_and_si512(bf16_bits(load(at + columns)), high);
        _mm512_storeu_si512(pairs + half * 256 + r * 8, _mm512_or_si512(first, second));
      }
    }
#endif
  }
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

  FASTBERT_INLINE ForwardScratch(Scratch& s, const Attention& a, int64_t num_k) {
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t key_blocks = blocks_of(num_k);
    keys = s.take<char>(key_blocks * deep * bytes);
    values = s.take<char>(key_blocks * deep * bytes);
    query = s.take<char>(deep * bytes);
    weights = s.take<char>(key_blocks * bytes);
    scores = s.take<float>(kBlock * key_blocks * kBlock);
    sums = s.take<float>(kBlock * deep * kBlock);
    // Sixteen columns more: the masks are made 64 columns at a time.
    bits = s.take<uint32_t>(kBlock * (key_blocks + 1));
  }
};

void attention_fwd(const Attention& a, const AttentionTask& t, char* memory) {
  Scratch pieces{memory};
  const ForwardScratch s(pieces, a, t.num_k);
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), padded = key_blocks * kBlock,
                width = deep * kBlock;
  const Source q = head_of(a, a.q, t.head, t.first_q, t.num_q);
  pack_head(head_of(a, a.k, t.head, t.first_k, t.num_k), a.arithmetic, Layout::kBTransposed, false,
            0, key_blocks, s.keys);
  pack_head(head_of(a, a.v, t.head, t.first_k, t.num_k), a.arithmetic, Layout::kB, true, 0,
            key_blocks, s.values);
  Softmax rows[kBlock];
  for (int64_t block = t.first_block; block < t.last_block; ++block) {
    const int64_t query = block * kBlock, count = smaller(kBlock, t.num_q - query);
    pack_head(q, a.arithmetic, Layout::kA, false, block, 1, s.query);
    for (int64_t j = 0; j < key_blocks; ++j) {
      a.multiply(s.query, s.keys + j * deep * bytes, deep, s.scores + j * kBlock, padded, false);
    }
    const uint32_t* bits = keep_bits(a, t, query, key_blocks, s.bits);
    for (int64_t r = 0; r < kBlock; ++r) {
      float* row = s.scores + r * padded;
      if (r < count) {
        rows[r] = softmax_row(a, keys_seen(a, query + r, t.num_k), padded,
                              bits == nullptr ? nullptr : bits + r * key_blocks, row);
      } else {
        fill_zero(row, 0, padded);
      }
    }
    pack_left_rows(a.arithmetic, s.scores, padded, s.weights);
    for (int64_t d = 0; d < deep; ++d) {
      a.multiply(s.weights, s.values + d * key_blocks * bytes, key_blocks, s.sums + d * kBlock,
                 width, false);
    }
    for (int64_t r = 0; r < count; ++r) {
      const float factor =
          rows[r].sum > 0.0f || rows[r].sum != rows[r].sum ? a.dropout.scale / rows[r].sum : 0.0f;
      write_head_row(a, a.out, t.first_q + query + r, t.head, s.sums + r * width, factor);
      a.softmax_lse[t.head * a.lse_ld + t.first_q + query + r] = rows[r].lse;
    }
  }
}

struct BackwardScratch {
  char *keys, *key_rows, *values, *query, *gradient, *query_columns, *gradient_columns;
  char *score_rows, *weight_pairs, *score_pairs;
  float *scores, *dweights, *dq, *dk, *dv;
  uint32_t* bits;

  FASTBERT_INLINE BackwardScratch(Scratch& s, const Attention& a, int64_t num_k) {
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t key_blocks = blocks_of(num_k);
    keys = s.take<char>(key_blocks * deep * bytes);
    key_rows = s.take<char>(key_blocks * deep * bytes);
    values = s.take<char>(key_blocks * deep * bytes);
    query = s.take<char>(deep * bytes);
    gradient = s.take<char>(deep * bytes);
    query_columns = s.take<char>(kQueryBlocks * deep * bytes);
    gradient_columns = s.take<char>(kQueryBlocks * deep * bytes);
    score_rows = s.take<char>(key_blocks * bytes);
    weight_pairs = s.take<char>(key_blocks * kQueryBlocks * bytes);
    score_pairs = s.take<char>(key_blocks * kQueryBlocks * bytes);
    scores = s.take<float>(kBlock * key_blocks * kBlock);
    dweights = s.take<float>(kBlock * key_blocks * kBlock);
    dq = s.take<float>(kBlock * deep * kBlock);
    dk = s.take<float>(deep * kBlock * key_blocks * kBlock);
    dv = s.take<float>(deep * kBlock * key_blocks * kBlock);
    bits = s.take<uint32_t>(kBlock * (key_blocks + 1));
  }
};

// One row's probabilities and the gradient of its scores: weights becomes Z·P, dweights the
// gradient scale·P·(Z·dP - Σ P·Z·dP), Z the dropout's factors.
FASTBERT_INLINE void score_gradient_row(const Attention& a, KeyRange keys, int64_t padded,
                                        float lse, const uint32_t* bits, float* weights,
                                        float* dweights) {
  fill_zero(weights, 0, keys.begin);
  fill_zero(weights, keys.end, padded);
  fill_zero(dweights, 0, keys.begin);
  fill_zero(dweights, keys.end, padded);
  if (keys.begin == keys.end) return;
  const int64_t start = keys.begin / Pack::kLanes * Pack::kLanes, n = keys.end - start;
  weights += start;
  dweights += start;
  const float scale = a.softmax_scale, drop = a.dropout.scale;
  Vec sums = broadcast(0.0f);
  for_each_pack(n, [&](int64_t i, auto part) {
    auto x = part.load(weights + i);
    using V = decltype(x);
    V p = part.only(exp(x * constant<V>(scale) - constant<V>(lse)));
    if (start + i < keys.begin) p = without_first(p, keys.begin - start - i);
    V d = part.load(dweights + i);
    if (bits != nullptr) d = kept_only(bits, start + i, d * constant<V>(drop));
    sums = sums + total(p * d);
    part.store(weights + i, p);
    part.store(dweights + i, d);
  });
  const float mean = sum(sums);
  for_each_pack(n, [&](int64_t i, auto part) {
    auto p = part.load(weights + i);
    using V = decltype(p);
    part.store(dweights + i,
               p * constant<V>(scale) * (part.load(dweights + i) - constant<V>(mean)));
    if (bits != nullptr) part.store(weights + i, kept_only(bits, start + i, p * constant<V>(drop)));
  });
}

// (head_dim, keys) in fp32 to rows of keys.
FASTBERT_INLINE void write_transposed(const Attention& a, const AttentionTask& t, const Heads& h,
                                      const float* columns, int64_t padded) {
  float tile[kBlock][kBlock];
  for (int64_t key = 0; key < t.num_k; key += kBlock) {
    for (int64_t d = 0; d < a.head_dim; d += kBlock) {
      for (int64_t r = 0; r < kBlock; ++r) {
        __builtin_memcpy(tile[r], columns + (d + r) * padded + key, kBlock * 4);
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

void attention_bwd(const Attention& a, const AttentionTask& t, char* memory) {
  Scratch pieces{memory};
  const BackwardScratch s(pieces, a, t.num_k);
  const Arithmetic arithmetic = a.arithmetic;
  const int64_t bytes = bytes_per_block(arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), padded = key_blocks * kBlock,
                width = deep * kBlock;
  const Source q = head_of(a, a.q, t.head, t.first_q, t.num_q);
  const Source dout = head_of(a, a.dout, t.head, t.first_q, t.num_q);
  const Source k = head_of(a, a.k, t.head, t.first_k, t.num_k);
  const Source v = head_of(a, a.v, t.head, t.first_k, t.num_k);
  pack_head(k, arithmetic, Layout::kBTransposed, false, 0, key_blocks, s.keys);
  pack_head(k, arithmetic, Layout::kB, true, 0, key_blocks, s.key_rows);
  pack_head(v, arithmetic, Layout::kBTransposed, false, 0, key_blocks, s.values);
  const int64_t query_blocks = blocks_of(t.num_q);
  for (int64_t first = 0; first < query_blocks; first += kQueryBlocks) {
    const int64_t group = smaller(kQueryBlocks, query_blocks - first);
    for (int64_t place = 0; place < group; ++place) {
      const int64_t query = (first + place) * kBlock, count = smaller(kBlock, t.num_q - query);
      pack_head(q, arithmetic, Layout::kA, false, first + place, 1, s.query);
      pack_head(dout, arithmetic, Layout::kA, false, first + place, 1, s.gradient);
      for (int64_t j = 0; j < key_blocks; ++j) {
        const int64_t panel = j * deep * bytes;
        a.multiply(s.query, s.keys + panel, deep, s.scores + j * kBlock, padded, false);
        a.multiply(s.gradient, s.values + panel, deep, s.dweights + j * kBlock, padded, false);
      }
      const uint32_t* bits = keep_bits(a, t, query, key_blocks, s.bits);
      for (int64_t r = 0; r < kBlock; ++r) {
        const KeyRange seen = keys_seen(a, query + r, t.num_k);
        const KeyRange keys = r < count ? seen : KeyRange{0, 0};
        const float* lse = a.softmax_lse + t.head * a.lse_ld + t.first_q + query;
        score_gradient_row(a, keys, padded, r < count ? lse[r] : 0.0f,
                           bits == nullptr ? nullptr : bits + r * key_blocks, s.scores + r * padded,
                           s.dweights + r * padded);
      }
      pack_left_rows(arithmetic, s.dweights, padded, s.score_rows);
      pack_right_rows(arithmetic, s.scores, padded, group, place, s.weight_pairs);
      pack_right_rows(arithmetic, s.dweights, padded, group, place, s.score_pairs);
      for (int64_t d = 0; d < deep; ++d) {
        a.multiply(s.score_rows, s.key_rows + d * key_blocks * bytes, key_blocks, s.dq + d * kBlock,
                   width, false);
      }
      for (int64_t r = 0; r < count; ++r) {
        write_head_row(a, a.dq, t.first_q + query + r, t.head, s.dq + r * width, 1.0f);
      }
    }
    pack_head(q, arithmetic, Layout::kATransposed, true, first, group, s.query_columns);
    pack_head(dout, arithmetic, Layout::kATransposed, true, first, group, s.gradient_columns);
    for (int64_t d = 0; d < deep; ++d) {
      for (int64_t j = 0; j < key_blocks; ++j) {
        const int64_t left = d * group * bytes, right = j * group * bytes;
        const int64_t at = d * kBlock * padded + j * kBlock;
        a.multiply(s.query_columns + left, s.score_pairs + right, group, s.dk + at, padded,
                   first > 0);
        a.multiply(s.gradient_columns + left, s.weight_pairs + right, group, s.dv + at, padded,
                   first > 0);
      }
    }
  }
  write_transposed(a, t, a.dk, s.dk, padded);
  write_transposed(a, t, a.dv, s.dv, padded);
}

int64_t attention_scratch(const Attention& a, int64_t num_q, int64_t num_k, bool backward) {
  Scratch pieces{nullptr};
  if (backward) {
    BackwardScratch(pieces, a, num_k);
  } else {
    ForwardScratch(pieces, a, num_k);
  }
  return pieces.used;
}
