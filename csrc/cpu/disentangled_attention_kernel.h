// Attention of one head over one sequence with the terms of relative positions. Both are products
// of packed blocks like the content's: a row of q·position_key stands one column further left than
// the row above it, so that a shift brings it to its keys; k·position_query is the same with the
// roles of queries and keys exchanged, so that its blocks are turned as well. Nothing is looked up
// one by one. Included inside a namespace, behind attention_kernel.h.

FASTBERT_INLINE int64_t between(int64_t low, int64_t x, int64_t high) {
  return larger(low, smaller(x, high));
}

// Where the block of distances `block`, counted from distance 0, stands in a table.
FASTBERT_INLINE int64_t place_of(const DisentangledAttention& a, int64_t block) {
  return between(-a.half_blocks, block, a.half_blocks - 1) + a.half_blocks;
}

FASTBERT_INLINE int64_t head_bytes(const DisentangledAttention& a) {
  return 2 * a.half_blocks * blocks_of(a.content.head_dim) * bytes_per_block(a.content.arithmetic);
}

FASTBERT_INLINE void pack_table(const DisentangledAttention& a, const Positions& table,
                                int64_t head, bool backward) {
  if (table.panels == nullptr) return;
  const int64_t blocks = 2 * a.half_blocks, at = head * head_bytes(a);
  const Source rows = head_of(a.content, table.rows, head, 0, blocks * kBlock);
  const Arithmetic arithmetic = a.content.arithmetic;
  pack_head(rows, arithmetic, Layout::kBTransposed, false, 0, blocks, table.panels + at);
  if (backward) pack_head(rows, arithmetic, Layout::kB, true, 0, blocks, table.by_depth + at);
}

void pack_positions(const DisentangledAttention& a, int64_t head, bool backward) {
  pack_table(a, a.key, head, backward);
  pack_table(a, a.query, head, backward);
}

// c (32 x 32) = or += left, `count` blocks, times the blocks of distances from `first` on that
// stand in `rows` one after the other.
FASTBERT_INLINE void multiply_distances(const DisentangledAttention& a, const char* left,
                                        const char* rows, int64_t first, int64_t count, float* c,
                                        int64_t ldc, bool accumulate) {
  const int64_t bytes = bytes_per_block(a.content.arithmetic);
  for (int64_t i = 0; i < count;) {
    const int64_t block = first + i;
    const bool inside = -a.half_blocks <= block && block < a.half_blocks;
    const int64_t run = inside ? smaller(count - i, a.half_blocks - block) : 1;
    a.content.multiply(left + i * bytes, rows + place_of(a, block) * bytes, run, c, ldc,
                       accumulate || i > 0);
    i += run;
  }
}

// Products of a left block and the blocks of distances from `first` on, `count` of them side by
// side.
FASTBERT_INLINE void multiply_by_positions(const DisentangledAttention& a, const Positions& table,
                                           int64_t head, const char* left, int64_t first,
                                           int64_t count, float* c, int64_t ldc) {
  const int64_t deep = blocks_of(a.content.head_dim);
  const int64_t bytes = deep * bytes_per_block(a.content.arithmetic);
  const char* panels = table.panels + head * head_bytes(a);
  for (int64_t i = 0; i < count; ++i) {
    a.content.multiply(left, panels + place_of(a, first + i) * bytes, deep, c + i * kBlock, ldc,
                       false);
  }
}

// out (32 x 32) = the transpose of the block at `rows`.
FASTBERT_INLINE void turn_block(const float* rows, int64_t step, float* out) {
  float tile[kBlock][kBlock];
  for (int64_t r = 0; r < kBlock; ++r) __builtin_memcpy(tile[r], rows + r * step, kBlock * 4);
  transpose_block(tile, out);
}

FASTBERT_INLINE void add_block(const float* block, float* rows, int64_t step) {
  for (int64_t r = 0; r < kBlock; ++r) add_to(block + r * kBlock, rows + r * step, kBlock);
}

// What the scores of a group of query blocks are made of.
struct ScoreScratch {
  char *keys, *key_left, *query;
  float *scores, *by_query, *by_key;
  int64_t step;  // of the scores' rows

  FASTBERT_INLINE ScoreScratch(Scratch& s, const DisentangledAttention& d, const AttentionTask& t) {
    const Attention& a = d.content;
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t key_blocks = blocks_of(t.num_k);
    step = score_step(key_blocks + 2);
    keys = s.take<char>(key_blocks * deep * bytes);
    key_left = s.take<char>(d.query.panels == nullptr ? 0 : key_blocks * deep * bytes);
    query = s.take<char>(deep * bytes);
    scores = s.take<float>(kQueryBlocks * kBlock * step);
    by_query = s.take<float>(kBlock * score_step(key_blocks + 1));
    by_key = s.take<float>(kBlock * score_step(kQueryBlocks + 1));
  }
};

FASTBERT_INLINE void pack_keys(const DisentangledAttention& d, const AttentionTask& t,
                               const ScoreScratch& s) {
  const Attention& a = d.content;
  const int64_t key_blocks = blocks_of(t.num_k);
  const Source k = head_of(a, a.k, t.head, t.first_k, t.num_k);
  pack_head(k, a.arithmetic, Layout::kBTransposed, false, 0, key_blocks, s.keys);
  if (d.query.panels == nullptr) return;
  pack_head(k, a.arithmetic, Layout::kA, false, 0, key_blocks, s.key_left);
}

// Scores, not scaled, of the blocks [first, first + group) of queries and all keys.
FASTBERT_INLINE void score_group(const DisentangledAttention& d, const AttentionTask& t,
                                 const ScoreScratch& s, int64_t first, int64_t group) {
  const Attention& a = d.content;
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), wide = score_step(key_blocks + 1);
  const int64_t narrow = score_step(kQueryBlocks + 1);
  const Source q = head_of(a, a.q, t.head, t.first_q, t.num_q);
  for (int64_t place = 0; place < group; ++place) {
    float* scores = s.scores + place * kBlock * s.step;
    pack_head(q, a.arithmetic, Layout::kA, false, first + place, 1, s.query);
    for (int64_t j = 0; j < key_blocks; ++j) {
      a.multiply(s.query, s.keys + j * deep * bytes, deep, scores + j * kBlock, s.step, false);
    }
    if (d.key.panels == nullptr) continue;
    multiply_by_positions(d, d.key, t.head, s.query, -(first + place) - 1, key_blocks + 1,
                          s.by_query, wide);
    for (int64_t r = 0; r < kBlock; ++r) {
      add_to(s.by_query + r * wide + kBlock - r, scores + r * s.step, key_blocks * kBlock);
    }
  }
  if (d.query.panels == nullptr) return;
  for (int64_t j = 0; j < key_blocks; ++j) {
    multiply_by_positions(d, d.query, t.head, s.key_left + j * deep * bytes, first - j - 1,
                          group + 1, s.by_key, narrow);
    for (int64_t place = 0; place < group; ++place) {
      float turned[kBlock * kBlock];
      turn_block(s.by_key + (place + 1) * kBlock, narrow - 1, turned);
      add_block(turned, s.scores + place * kBlock * s.step + j * kBlock, s.step);
    }
  }
}

struct DisentangledForwardScratch {
  ScoreScratch score;
  char *values, *weights;
  float* sums;
  uint32_t* bits;

  FASTBERT_INLINE DisentangledForwardScratch(Scratch& s, const DisentangledAttention& d,
                                             const AttentionTask& t)
      : score(s, d, t) {
    const Attention& a = d.content;
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t key_blocks = blocks_of(t.num_k);
    values = s.take<char>(key_blocks * deep * bytes);
    weights = s.take<char>(key_blocks * bytes);
    sums = s.take<float>(kBlock * deep * kBlock);
    bits = s.take<uint32_t>(kBlock * (key_blocks + 1));
  }
};

template <bool kHalves>
void disentangled_attention_fwd_task(const DisentangledAttention& d, const AttentionTask& t,
                                     char* memory) {
  Scratch pieces{memory};
  const DisentangledForwardScratch s(pieces, d, t);
  const Attention& a = d.content;
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), width = deep * kBlock;
  pack_keys(d, t, s.score);
  pack_head(head_of(a, a.v, t.head, t.first_k, t.num_k), a.arithmetic, Layout::kB, true, 0,
            key_blocks, s.values);
  for (int64_t first = t.first_block; first < t.last_block; first += kQueryBlocks) {
    const int64_t group = smaller(kQueryBlocks, t.last_block - first);
    score_group(d, t, s.score, first, group);
    for (int64_t place = 0; place < group; ++place) {
      const int64_t query = (first + place) * kBlock, count = smaller(kBlock, t.num_q - query);
      const uint32_t* bits = keep_bits(a, t, query, KeyBlocks{0, key_blocks}, s.bits);
      Softmax rows[kBlock];
      for (int64_t r = 0; r < kBlock; ++r) {
        rows[r] =
            softmax_row<kHalves>(a, KeyRange{0, r < count ? t.num_k : 0}, key_blocks * kBlock,
                                 bits == nullptr ? nullptr : bits + r * key_blocks, r,
                                 s.score.scores + (place * kBlock + r) * s.score.step, s.weights);
      }
      for (int64_t column = 0; column < deep; ++column) {
        a.multiply(s.weights, s.values + column * key_blocks * bytes, key_blocks,
                   s.sums + column * kBlock, width, false);
      }
      for (int64_t r = 0; r < count; ++r) {
        const int64_t row = t.first_q + query + r;
        write_head_row(a, a.out, row, t.head, s.sums + r * width, a.dropout.scale / rows[r].sum);
        a.softmax_lse[t.head * a.lse_ld + row] = rows[r].lse();
      }
    }
  }
}

struct DisentangledBackwardScratch {
  ScoreScratch score;
  char *key_rows, *key_columns, *values, *gradient, *query_columns, *gradient_columns;
  char *score_rows, *weight_pairs, *score_pairs;
  char *slanted_rows, *slanted_pairs, *turned_rows, *turned_pairs;
  float *dweights, *turned, *dq, *dk, *dk_by_position, *dv;
  uint32_t* bits;

  FASTBERT_INLINE DisentangledBackwardScratch(Scratch& s, const DisentangledAttention& d,
                                              const AttentionTask& t)
      : score(s, d, t) {
    const Attention& a = d.content;
    const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
    const int64_t key_blocks = blocks_of(t.num_k), spread = key_blocks + kQueryBlocks;
    key_rows = s.take<char>(key_blocks * deep * bytes);
    key_columns = s.take<char>(key_blocks * deep * bytes);
    values = s.take<char>(key_blocks * deep * bytes);
    gradient = s.take<char>(deep * bytes);
    query_columns = s.take<char>(kQueryBlocks * deep * bytes);
    gradient_columns = s.take<char>(kQueryBlocks * deep * bytes);
    score_rows = s.take<char>(key_blocks * bytes);
    weight_pairs = s.take<char>(key_blocks * kQueryBlocks * bytes);
    score_pairs = s.take<char>(key_blocks * kQueryBlocks * bytes);
    slanted_rows = s.take<char>((key_blocks + 1) * bytes);
    slanted_pairs = s.take<char>(spread * kQueryBlocks * bytes);
    turned_rows = s.take<char>((kQueryBlocks + 1) * bytes);
    turned_pairs = s.take<char>(spread * (kQueryBlocks + 1) * bytes);
    dweights = s.take<float>(kQueryBlocks * kBlock * score.step);
    turned = s.take<float>(kBlock * score_step(kQueryBlocks + 2));
    dq = s.take<float>(kBlock * deep * kBlock);
    dk = s.take<float>(deep * kBlock * score_step(key_blocks));
    dk_by_position = s.take<float>(key_blocks * kBlock * deep * kBlock);
    dv = s.take<float>(deep * kBlock * score_step(key_blocks));
    bits = s.take<uint32_t>(kBlock * (key_blocks + 1));
  }
};

// put_gradients, which leaves the gradients of the scores in place of dweights too.
template <bool kHalves>
FASTBERT_INLINE void put_score_gradients(const Attention& a, const Operands& to, int64_t padded,
                                         int64_t step, int64_t r, const float* means,
                                         const uint32_t* const* bits, const float* weights,
                                         float* dweights) {
  for_each_pack(padded, [&](int64_t c, auto part) FASTBERT_INLINE_BODY {
    using V = decltype(part.load(weights));
    V p[2], ds[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      p[i] = part.load(weights + i * step + c);
      ds[i] = p[i] * constant<V>(a.softmax_scale) *
              (part.load(dweights + i * step + c) - constant<V>(means[i]));
      part.store(dweights + i * step + c, ds[i]);
      put_left<kHalves>(to.score_rows, r + i, c, ds[i]);
      if (bits[i] != nullptr) p[i] = kept_only(bits[i], c, p[i] * constant<V>(a.dropout.scale));
    }
    put_right<kHalves>(to.score_pairs, to.deep, to.place, r, c, ds[0], ds[1]);
    put_right<kHalves>(to.weight_pairs, to.deep, to.place, r, c, p[0], p[1]);
  });
}

// 32 rows, each one column further right than the row above it, from pairs of keys and queries to
// distances: column c of row r is rows[r][c + r - 32]. As a left operand, and as a right one whose
// blocks stand `panel` blocks apart.
template <bool kHalves>
FASTBERT_INLINE void put_slanted(const float* rows, int64_t step, int64_t columns, char* left,
                                 char* right, int64_t panel) {
  for (int64_t r = 0; r < kBlock; r += 2) {
    const float *upper = rows + r * (step + 1) - kBlock, *lower = upper + step + 1;
    for (int64_t c = 0; c < columns; c += Vec::kLanes) {
      const Vec first = load(upper + c), second = load(lower + c);
      put_left<kHalves>(left, r, c, first);
      put_left<kHalves>(left, r + 1, c, second);
      put_right<kHalves>(right, panel, 0, r, c, first, second);
    }
  }
}

// Zeros in the 32 columns on both sides of `rows` rows.
FASTBERT_INLINE void clear_margins(float* at, int64_t rows, int64_t step, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    __builtin_memset(at + r * step - kBlock, 0, kBlock * 4);
    __builtin_memset(at + r * step + columns, 0, kBlock * 4);
  }
}

// From the gradients of the scores of one block of queries to those of its products with the
// position keys: rows of dq, and right operands for the sums over queries.
template <bool kHalves>
FASTBERT_INLINE void slant_queries(const DisentangledAttention& d, const AttentionTask& t,
                                   const DisentangledBackwardScratch& s, const float* dscores,
                                   int64_t first, int64_t group, int64_t place) {
  const Attention& a = d.content;
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k);
  // Blocks of distances count from the first that the last block of the group meets.
  char* pairs = s.slanted_pairs + ((group - 1 - place) * group + place) * bytes;
  put_slanted<kHalves>(dscores, s.score.step, (key_blocks + 1) * kBlock, s.slanted_rows, pairs,
                       group);
  const char* rows = d.key.by_depth + t.head * head_bytes(d);
  for (int64_t column = 0; column < deep; ++column) {
    multiply_distances(d, s.slanted_rows, rows + column * 2 * d.half_blocks * bytes,
                       -(first + place) - 1, key_blocks + 1, s.dq + column * kBlock, deep * kBlock,
                       true);
  }
}

// The same of a group of blocks of queries, turned: products of every block of keys with the
// position queries.
template <bool kHalves>
FASTBERT_INLINE void slant_keys(const DisentangledAttention& d, const AttentionTask& t,
                                const DisentangledBackwardScratch& s, const float* dscores,
                                int64_t first, int64_t group) {
  const Attention& a = d.content;
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), width = deep * kBlock;
  const int64_t step = score_step(kQueryBlocks + 2);
  const char* rows = d.query.by_depth + t.head * head_bytes(d);
  float* turned = s.turned + kBlock;
  clear_margins(turned, kBlock, step, group * kBlock);
  for (int64_t j = 0; j < key_blocks; ++j) {
    for (int64_t place = 0; place < group; ++place) {
      float block[kBlock * kBlock];
      turn_block(dscores + place * kBlock * s.score.step + j * kBlock, s.score.step, block);
      for (int64_t r = 0; r < kBlock; ++r) {
        __builtin_memcpy(turned + r * step + place * kBlock, block + r * kBlock, kBlock * 4);
      }
    }
    // Blocks of distances count from the first that the last block of keys meets.
    char* pairs = s.turned_pairs + (key_blocks - 1 - j) * (group + 1) * bytes;
    put_slanted<kHalves>(turned, step, (group + 1) * kBlock, s.turned_rows, pairs, group + 2);
    for (int64_t column = 0; column < deep; ++column) {
      multiply_distances(d, s.turned_rows, rows + column * 2 * d.half_blocks * bytes, first - j - 1,
                         group + 1, s.dk_by_position + j * kBlock * width + column * kBlock, width,
                         first > 0);
    }
  }
}

// Adds the products of a group of blocks of queries with all keys to the sums of both tables.
FASTBERT_INLINE void add_position_sums(const DisentangledAttention& d, const AttentionTask& t,
                                       const DisentangledBackwardScratch& s,
                                       const PositionSums& sums, int64_t first, int64_t group) {
  const Attention& a = d.content;
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k);
  for (int64_t i = 0; i < key_blocks + group; ++i) {
    // Block i of the distances holds a product at the places [low, high] alone.
    if (d.key.panels != nullptr) {
      const int64_t low = larger(0, group - 1 - i);
      const int64_t high = smaller(group - 1, key_blocks + group - 1 - i);
      const int64_t at = place_of(d, i - first - group) * kBlock;
      for (int64_t column = 0; column < deep; ++column) {
        a.multiply(s.query_columns + (column * group + low) * bytes,
                   s.slanted_pairs + (i * group + low) * bytes, high - low + 1,
                   sums.key + column * kBlock * sums.ld + at, sums.ld, true);
      }
    }
    if (d.query.panels != nullptr) {
      const int64_t low = larger(0, i - key_blocks + 1), high = smaller(group, i);
      const int64_t at = place_of(d, i + first - key_blocks) * kBlock;
      for (int64_t column = 0; column < deep; ++column) {
        const int64_t block = column * key_blocks + key_blocks - 1 - i + low;
        a.multiply(s.key_columns + block * bytes, s.turned_pairs + (i * (group + 1) + low) * bytes,
                   high - low + 1, sums.query + column * kBlock * sums.ld + at, sums.ld, true);
      }
    }
  }
}

// dk (head_dim, keys) += the transpose of what comes by way of the positions.
FASTBERT_INLINE void add_by_position(const DisentangledBackwardScratch& s, int64_t key_blocks,
                                     int64_t deep) {
  for (int64_t j = 0; j < key_blocks; ++j) {
    for (int64_t column = 0; column < deep; ++column) {
      float turned[kBlock * kBlock];
      turn_block(s.dk_by_position + j * kBlock * deep * kBlock + column * kBlock, deep * kBlock,
                 turned);
      add_block(turned, s.dk + column * kBlock * score_step(key_blocks) + j * kBlock,
                score_step(key_blocks));
    }
  }
}

template <bool kHalves>
void disentangled_attention_bwd_task(const DisentangledAttention& d, const AttentionTask& t,
                                     const PositionSums& sums, char* memory) {
  Scratch pieces{memory};
  const DisentangledBackwardScratch s(pieces, d, t);
  const Attention& a = d.content;
  const int64_t bytes = bytes_per_block(a.arithmetic), deep = blocks_of(a.head_dim);
  const int64_t key_blocks = blocks_of(t.num_k), query_blocks = key_blocks;
  const int64_t width = deep * kBlock, padded = key_blocks * kBlock, step = s.score.step;
  const int64_t key_step = score_step(key_blocks);
  const Source q = head_of(a, a.q, t.head, t.first_q, t.num_q);
  const Source dout = head_of(a, a.dout, t.head, t.first_q, t.num_q);
  const Source k = head_of(a, a.k, t.head, t.first_k, t.num_k);
  float* dscores = s.dweights + kBlock;
  pack_keys(d, t, s.score);
  pack_head(k, a.arithmetic, Layout::kB, true, 0, key_blocks, s.key_rows);
  pack_head(head_of(a, a.v, t.head, t.first_k, t.num_k), a.arithmetic, Layout::kBTransposed, false,
            0, key_blocks, s.values);
  if (d.query.panels != nullptr) {
    pack_head(k, a.arithmetic, Layout::kATransposed, true, 0, key_blocks, s.key_columns);
  }
  clear_margins(dscores, kQueryBlocks * kBlock, step, padded);
  for (int64_t first = 0; first < query_blocks; first += kQueryBlocks) {
    const int64_t group = smaller(kQueryBlocks, query_blocks - first);
    score_group(d, t, s.score, first, group);
    for (int64_t place = 0; place < group; ++place) {
      const int64_t query = (first + place) * kBlock, count = smaller(kBlock, t.num_q - query);
      float* weights = s.score.scores + place * kBlock * step;
      float* dweights = dscores + place * kBlock * step;
      pack_head(dout, a.arithmetic, Layout::kA, false, first + place, 1, s.gradient);
      for (int64_t j = 0; j < key_blocks; ++j) {
        a.multiply(s.gradient, s.values + j * deep * bytes, deep, dweights + j * kBlock, step,
                   false);
      }
      const uint32_t* bits = keep_bits(a, t, query, KeyBlocks{0, key_blocks}, s.bits);
      const float* lse = a.softmax_lse + t.head * a.lse_ld + t.first_q + query;
      const Operands operands{s.score_rows, s.score_pairs, s.weight_pairs, group, place};
      for (int64_t r = 0; r < kBlock; r += 2) {
        float means[2];
        const uint32_t* row_bits[2];
        for (int64_t i = 0; i < 2; ++i) {
          const bool real = r + i < count;
          row_bits[i] = bits == nullptr ? nullptr : bits + (r + i) * key_blocks;
          means[i] = weigh_row<kHalves>(a, KeyRange{0, real ? t.num_k : 0}, padded,
                                        real ? lse[r + i] : 0.0f, row_bits[i],
                                        weights + (r + i) * step, dweights + (r + i) * step);
        }
        put_score_gradients<kHalves>(a, operands, padded, step, r, means, row_bits,
                                     weights + r * step, dweights + r * step);
      }
      for (int64_t column = 0; column < deep; ++column) {
        a.multiply(s.score_rows, s.key_rows + column * key_blocks * bytes, key_blocks,
                   s.dq + column * kBlock, width, false);
      }
      if (d.key.panels != nullptr) {
        slant_queries<kHalves>(d, t, s, dweights, first, group, place);
      }
      for (int64_t r = 0; r < count; ++r) {
        write_head_row(a, a.dq, t.first_q + query + r, t.head, s.dq + r * width, 1.0f);
      }
    }
    pack_head(q, a.arithmetic, Layout::kATransposed, true, first, group, s.query_columns);
    pack_head(dout, a.arithmetic, Layout::kATransposed, true, first, group, s.gradient_columns);
    for (int64_t column = 0; column < deep; ++column) {
      for (int64_t j = 0; j < key_blocks; ++j) {
        const int64_t left = column * group * bytes, right = j * group * bytes;
        const int64_t at = column * kBlock * key_step + j * kBlock;
        a.multiply(s.query_columns + left, s.score_pairs + right, group, s.dk + at, key_step,
                   first > 0);
        a.multiply(s.gradient_columns + left, s.weight_pairs + right, group, s.dv + at, key_step,
                   first > 0);
      }
    }
    if (d.query.panels != nullptr) slant_keys<kHalves>(d, t, s, dscores, first, group);
    add_position_sums(d, t, s, sums, first, group);
  }
  if (d.query.panels != nullptr) add_by_position(s, key_blocks, deep);
  write_transposed(a, t, a.dk, s.dk, key_step, padded);
  write_transposed(a, t, a.dv, s.dv, key_step, padded);
}

int64_t disentangled_attention_scratch(const DisentangledAttention& a, const AttentionTask& t,
                                       bool backward) {
  Scratch pieces{nullptr};
  if (backward) {
    DisentangledBackwardScratch(pieces, a, t);
  } else {
    DisentangledForwardScratch(pieces, a, t);
  }
  return pieces.used;
}

void disentangled_attention_fwd(const DisentangledAttention& a, const AttentionTask& t,
                                char* memory) {
#if defined(FASTBERT_AVX512_BF16)
  if (a.content.arithmetic == Arithmetic::kBFloat16) {
    return disentangled_attention_fwd_task<true>(a, t, memory);
  }
#endif
  disentangled_attention_fwd_task<false>(a, t, memory);
}

void disentangled_attention_bwd(const DisentangledAttention& a, const AttentionTask& t,
                                const PositionSums& sums, char* memory) {
#if defined(FASTBERT_AVX512_BF16)
  if (a.content.arithmetic == Arithmetic::kBFloat16) {
    return disentangled_attention_bwd_task<true>(a, t, sums, memory);
  }
#endif
  disentangled_attention_bwd_task<false>(a, t, sums, memory);
}
