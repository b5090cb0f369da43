// add_layer_norm and embed_layer_norm, a row at a time: the row is built once in fp32 in a buffer
// that stays in L1, and everything else reads that. Included inside a namespace.

// Fixed so that rows of any width need no allocation; wider ones take the reference.
constexpr int64_t kMaxColumns = 8192;

struct Statistics {
  float mean, rstd;
};

// Two passes: the variance from the mean's differences, which cannot cancel.
FASTBERT_INLINE Statistics statistics_of(const float* row, int64_t columns, Vec sums, float eps) {
  const float mean = sum(sums) / static_cast<float>(columns);
  Vec squares = broadcast(0.0f);
  for_each_pack(columns, [&](int64_t i, auto part) {
    const auto x = part.load(row + i);
    const auto d = part.only(x - constant<decltype(part.load(row))>(mean));
    squares = squares + total(d * d);
  });
  const float variance = sum(squares) / static_cast<float>(columns);
  return {mean, 1.0f / __builtin_sqrtf(variance + eps)};
}

template <typename V>
FASTBERT_INLINE V normalised(V h, Statistics s) {
  return (h - constant<V>(s.mean)) * constant<V>(s.rstd);
}

template <typename V>
FASTBERT_INLINE V dropped(const RowDropout& dropout, const uint32_t* kept, int64_t i, V v) {
  return kept_only(kept, i, v) * constant<V>(dropout.scale);
}

// The sum of a row, into `row`, and its elements added up.
template <typename TX, typename TR>
FASTBERT_INLINE Vec add_row(const AddLayerNorm& a, int64_t index, const uint32_t* kept,
                            float* row) {
  const TX* x = static_cast<const TX*>(a.x) + index * a.columns;
  const TR* residual =
      a.residual == nullptr ? nullptr : static_cast<const TR*>(a.residual) + index * a.columns;
  const bool drops = a.dropout.stream.threshold > 0;
  Vec sums = broadcast(0.0f);
  for_each_pack(a.columns, [&](int64_t i, auto part) {
    auto h = part.load(x + i);
    if (a.linear_bias != nullptr) h = h + part.load(a.linear_bias + i);
    if (drops) h = dropped(a.dropout, kept, i, h);
    if (residual != nullptr) h = h + part.load(residual + i);
    part.store(row + i, h);
    sums = sums + total(h);
  });
  return sums;
}

// TR, the wider type where they differ, is that of the sum and of y.
template <typename TX, typename TR>
void add_layer_norm_fwd_rows(const AddLayerNorm& a, int64_t begin, int64_t end) {
  float row[kMaxColumns];
  uint32_t kept[kMaxColumns / 32 + 1];
  for (int64_t index = begin; index < end; ++index) {
    if (a.dropout.stream.threshold > 0) {
      row_keep_bits(a.dropout.stream, index, a.columns, kept);
    }
    const Vec sums = add_row<TX, TR>(a, index, kept, row);
    const Statistics s = statistics_of(row, a.columns, sums, a.eps);
    TR* y = static_cast<TR*>(a.y) + index * a.columns;
    TR* h = a.h == nullptr ? nullptr : static_cast<TR*>(a.h) + index * a.columns;
    for_each_pack(a.columns, [&](int64_t i, auto part) {
      const auto v = part.load(row + i);
      if (h != nullptr) part.store(h + i, v);
      auto n = normalised(v, s) * part.load(a.weight + i);
      if (a.bias != nullptr) n = n + part.load(a.bias + i);
      part.store(y + i, n);
    });
    a.mean[index] = s.mean;
    a.rstd[index] = s.rstd;
  }
}

void add_layer_norm_fwd(const AddLayerNorm& a, int64_t begin, int64_t end) {
  with_dtype(a.x_dtype, [&](auto x_zero) {
    using TX = decltype(x_zero);
    if (a.residual_dtype == a.x_dtype) return add_layer_norm_fwd_rows<TX, TX>(a, begin, end);
    add_layer_norm_fwd_rows<TX, float>(a, begin, end);
  });
}

// The gradient of a normalised row, before that of its dropout:
//   dh = rstd (dn - mean(dn) - n mean(dn n)), dn = dy weight, n = (h - mean) rstd.
// load_dy(i, part) gives dy; `row` holds n and `scaled` dn afterwards. Adds dy n and dy to the
// sums.
template <typename TH, typename LoadDy>
FASTBERT_INLINE Statistics norm_bwd_row(const TH* h, Statistics s, const float* weight,
                                        int64_t columns, const LoadDy& load_dy,
                                        const ColumnSums& sums, float* row, float* scaled) {
  Vec sum_dn = broadcast(0.0f), sum_dn_n = broadcast(0.0f);
  for_each_pack(columns, [&](int64_t i, auto part) {
    const auto n = part.only(normalised(part.load(h + i), s)), dy = load_dy(i, part);
    const auto dn = dy * part.load(weight + i);
    part.store(row + i, n);
    part.store(scaled + i, dn);
    sum_dn = sum_dn + total(dn);
    sum_dn_n = sum_dn_n + total(dn * n);
    part.store(sums.dweight + i, fma(dy, n, part.load(sums.dweight + i)));
    if (sums.dbias != nullptr) part.store(sums.dbias + i, part.load(sums.dbias + i) + dy);
  });
  const float count = static_cast<float>(columns);
  return {sum(sum_dn) / count, sum(sum_dn_n) / count};
}

template <typename V>
FASTBERT_INLINE V norm_gradient(V n, V dn, Statistics means, float rstd) {
  const V centred = dn - constant<V>(means.mean);
  return fnma(n, constant<V>(means.rstd), centred) * constant<V>(rstd);
}

template <typename TH, typename TX>
void add_layer_norm_bwd_rows(const AddLayerNormGrad& a, int64_t begin, int64_t end,
                             const ColumnSums& sums) {
  float row[kMaxColumns], scaled[kMaxColumns];
  uint32_t kept[kMaxColumns / 32 + 1];
  const bool drops = a.dropout.stream.threshold > 0;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t offset = index * a.columns;
    const TH* dy = static_cast<const TH*>(a.dy) + offset;
    const TH* dh = a.dh == nullptr ? nullptr : static_cast<const TH*>(a.dh) + offset;
    TX* dx = a.dx == nullptr ? nullptr : static_cast<TX*>(a.dx) + offset;
    TH* dresidual = static_cast<TH*>(a.dresidual) + offset;
    if (drops) row_keep_bits(a.dropout.stream, index, a.columns, kept);
    const Statistics s{a.mean[index], a.rstd[index]};
    const Statistics means = norm_bwd_row(
        static_cast<const TH*>(a.h) + offset, s, a.weight, a.columns,
        [&](int64_t i, auto part) { return part.load(dy + i); }, sums, row, scaled);
    for_each_pack(a.columns, [&](int64_t i, auto part) {
      auto d = norm_gradient(part.load(row + i), part.load(scaled + i), means, s.rstd);
      if (dh != nullptr) d = d + part.load(dh + i);
      part.store(dresidual + i, d);
      if (drops) d = dropped(a.dropout, kept, i, d);
      if (dx != nullptr) part.store(dx + i, d);
      if (sums.dlinear_bias != nullptr) {
        part.store(sums.dlinear_bias + i, part.load(sums.dlinear_bias + i) + d);
      }
    });
  }
}

void add_layer_norm_bwd(const AddLayerNormGrad& a, int64_t begin, int64_t end,
                        const ColumnSums& sums) {
  with_dtype(a.x_dtype, [&](auto x_zero) {
    using TX = decltype(x_zero);
    if (a.h_dtype == a.x_dtype) return add_layer_norm_bwd_rows<TX, TX>(a, begin, end, sums);
    add_layer_norm_bwd_rows<float, TX>(a, begin, end, sums);
  });
}

template <typename T>
void embed_layer_norm_fwd_rows(const EmbedLayerNorm& a, int64_t begin, int64_t end) {
  float row[kMaxColumns];
  uint32_t kept[kMaxColumns / 32 + 1];
  const bool drops = a.dropout.stream.threshold > 0;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t word = a.input_ids == nullptr ? index : a.input_ids[index];
    const T* words = static_cast<const T*>(a.words) + word * a.columns;
    const T* types = static_cast<const T*>(a.token_types) + a.token_type_ids[index] * a.columns;
    const T* positions = static_cast<const T*>(a.positions) + a.position_ids[index] * a.columns;
    T *y = static_cast<T*>(a.y) + index * a.columns, *h = static_cast<T*>(a.h) + index * a.columns;
    Vec sums = broadcast(0.0f);
    for_each_pack(a.columns, [&](int64_t i, auto part) {
      const auto v = part.load(words + i) + part.load(types + i) + part.load(positions + i);
      part.store(row + i, v);
      part.store(h + i, v);
      sums = sums + total(v);
    });
    const Statistics s = statistics_of(row, a.columns, sums, a.eps);
    if (drops) row_keep_bits(a.dropout.stream, index, a.columns, kept);
    for_each_pack(a.columns, [&](int64_t i, auto part) {
      auto n = normalised(part.load(row + i), s) * part.load(a.weight + i);
      if (a.bias != nullptr) n = n + part.load(a.bias + i);
      if (drops) n = dropped(a.dropout, kept, i, n);
      part.store(y + i, n);
    });
    a.mean[index] = s.mean;
    a.rstd[index] = s.rstd;
  }
}

void embed_layer_norm_fwd(const EmbedLayerNorm& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto zero) { embed_layer_norm_fwd_rows<decltype(zero)>(a, begin, end); });
}

template <typename T>
void embed_layer_norm_bwd_rows(const EmbedLayerNormGrad& a, int64_t begin, int64_t end,
                               const ColumnSums& sums) {
  float row[kMaxColumns], scaled[kMaxColumns];
  uint32_t kept[kMaxColumns / 32 + 1];
  const bool drops = a.dropout.stream.threshold > 0;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t offset = index * a.columns;
    const T* dy = static_cast<const T*>(a.dy) + offset;
    if (drops) row_keep_bits(a.dropout.stream, index, a.columns, kept);
    const auto load_dy = [&](int64_t i, auto part) {
      const auto d = part.load(dy + i);
      return drops ? dropped(a.dropout, kept, i, d) : d;
    };
    const Statistics s{a.mean[index], a.rstd[index]};
    const Statistics means = norm_bwd_row(static_cast<const T*>(a.h) + offset, s, a.weight,
                                          a.columns, load_dy, sums, row, scaled);
    for_each_pack(a.columns, [&](int64_t i, auto part) {
      part.store(a.dh + offset + i,
                 norm_gradient(part.load(row + i), part.load(scaled + i), means, s.rstd));
    });
  }
}

void embed_layer_norm_bwd(const EmbedLayerNormGrad& a, int64_t begin, int64_t end,
                          const ColumnSums& sums) {
  with_dtype(a.dtype,
             [&](auto zero) { embed_layer_norm_bwd_rows<decltype(zero)>(a, begin, end, sums); });
}
