// Tiles of a student's logits and its teacher's, and the student's gradients. Included inside a
// namespace.

// What exponentials are taken beside: where all logits are -inf they are then 0, not NaN.
FASTBERT_INLINE float base_of(float peak) { return peak == -__builtin_inff() ? 0.0f : peak; }

void sum_distillation(const Distillation& a, int64_t first, int64_t rows, int64_t column,
                      int64_t columns, float* logits, float* teacher_logits, int64_t ld,
                      DistillationSums* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    float *row = logits + r * ld, *teacher_row = teacher_logits + r * ld;
    finish_logit_row(a.student, column, columns, row);
    finish_logit_row(a.teacher, column, columns, teacher_row);
    const float peak = largest_of(row, columns), teacher_peak = largest_of(teacher_row, columns);
    Vec exponentials = broadcast(0.0f), soft = exponentials, teacher_soft = exponentials,
        apart = exponentials;
    for_each_pack(columns, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      const auto z = part.load(row + i), t = part.load(teacher_row + i);
      using V = decltype(part.load(row));
      const V below = z - constant<V>(base_of(peak)), cold = constant<V>(a.cold);
      const V share = part.only(exp((t - constant<V>(base_of(teacher_peak))) * cold));
      exponentials = exponentials + total(part.only(exp(below)));
      soft = soft + total(part.only(exp(below * cold)));
      teacher_soft = teacher_soft + total(share);
      // A word that the teacher rules out has no part, whatever the student says of it.
      const V zero = constant<V>(0.0f);
      apart = apart + total(select(less(zero, share), share * (t - z), zero));
    });
    const int64_t place = a.student.label[first + r] - column;
    const float label = place >= 0 && place < columns ? row[place] : 0.0f;
    sums[r] = {peak,         sum(exponentials), sum(soft), label,
               teacher_peak, sum(teacher_soft), sum(apart)};
  }
}

// dz = dloss · (softmax(z) - onehot) + factor · (softmax(z / T) - softmax(t / T)).
void distillation_gradients(const DistillationGrad& a, int64_t first, int64_t rows, int64_t column,
                            int64_t columns, float* logits, float* teacher_logits, int64_t ld,
                            float* dbias) {
  for (int64_t r = 0; r < rows; ++r) {
    float *row = logits + r * ld, *teacher_row = teacher_logits + r * ld;
    finish_logit_row(a.of.student, column, columns, row);
    finish_logit_row(a.of.teacher, column, columns, teacher_row);
    const float lse = a.lse[first + r], soft_lse = a.soft_lse[first + r];
    const float teacher_lse = a.teacher_lse[first + r];
    const float dloss = a.dloss[first + r], factor = a.factor[first + r];
    for_each_pack(columns, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      const auto z = part.load(row + i), t = part.load(teacher_row + i);
      using V = decltype(part.load(row));
      const V cold = constant<V>(a.of.cold);
      const V q = exp(fma(z, cold, constant<V>(-soft_lse)));
      const V p = exp(fma(t, cold, constant<V>(-teacher_lse)));
      const V hard = exp(z - constant<V>(lse)) * constant<V>(dloss);
      part.store(row + i, fma(q - p, constant<V>(factor), hard));
    });
    const int64_t place = a.of.student.label[first + r] - column;
    if (place >= 0 && place < columns) row[place] -= dloss;
    if (dbias != nullptr) add_to(row, dbias, columns);
  }
}
