// A tile of logits of the masked-LM loss, and its gradients. Included inside a namespace.

// A row with its bias, rounded as a linear layer of its dtype would round it.
template <typename T>
FASTBERT_INLINE void finish_logits(const float* bias, int64_t columns, float* row) {
  for_each_vec(columns, [&](int64_t i, auto part) {
    Vec v = part.load(row + i);
    if (bias != nullptr) v = v + part.load(bias + i);
    T rounded[Vec::kLanes];
    store(rounded, v);
    part.store(row + i, load(rounded));
  });
}

FASTBERT_INLINE void finish_logit_row(const CrossEntropy& a, int64_t column, int64_t columns,
                                      float* row) {
  const float* bias = a.bias == nullptr ? nullptr : a.bias + column;
  if (bias == nullptr && a.dtype == Dtype::kFloat) return;
  with_dtype(a.dtype, [&](auto zero) { finish_logits<decltype(zero)>(bias, columns, row); });
}

void sum_logits(const CrossEntropy& a, int64_t first, int64_t rows, int64_t column, int64_t columns,
                float* logits, int64_t ld, LogitSums* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = logits + r * ld;
    finish_logit_row(a, column, columns, row);
    const float peak = largest_of(row, columns);
    Vec exponentials = broadcast(0.0f), all = broadcast(0.0f);
    for_each_pack(columns, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      const auto x = part.load(row + i);
      using V = decltype(part.load(row));
      exponentials = exponentials + total(part.only(exp(x - constant<V>(peak))));
      all = all + total(x);
    });
    const int64_t place = a.label[first + r] - column;
    const float label = place >= 0 && place < columns ? row[place] : 0.0f;
    sums[r] = {peak, sum(exponentials), sum(all), label};
  }
}

// dz = factor · softmax + every, and hit more at the label.
void logit_gradients(const CrossEntropyGrad& a, int64_t first, int64_t rows, int64_t column,
                     int64_t columns, float* logits, int64_t ld, float* dbias) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = logits + r * ld;
    finish_logit_row(a.of, column, columns, row);
    const float lse = a.lse[first + r], factor = a.factor[first + r], every = a.every[first + r];
    for_each_pack(columns, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      const auto x = part.load(row + i);
      using V = decltype(part.load(row));
      part.store(row + i, fma(exp(x - constant<V>(lse)), constant<V>(factor), constant<V>(every)));
    });
    const int64_t place = a.of.label[first + r] - column;
    if (place >= 0 && place < columns) row[place] += a.hit[first + r];
    if (dbias != nullptr) add_to(row, dbias, columns);
  }
}
