// GELU(u) v of the halves (u, v) of a row, and its gradients, in fp32 around the dtype's loads and
// stores. Included inside a namespace.

template <typename T, bool kErf>
void geglu_fwd_rows(const Geglu& a, int64_t begin, int64_t end) {
  const int64_t n = a.columns;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * 2 * n;
    T* y = static_cast<T*>(a.out) + row * n;
    for_each_pack(n, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      auto u = part.load(x + i), v = part.load(x + n + i);
      if (a.bias != nullptr) {
        u = u + part.load(a.bias + i);
        v = v + part.load(a.bias + n + i);
      }
      part.store(y + i, gelu<T, kErf>(u) * v);
    });
  }
}

template <typename T, bool kErf>
void geglu_bwd_rows(const Geglu& a, int64_t begin, int64_t end, float* dbias) {
  const int64_t n = a.columns;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * 2 * n;
    const T* dy = static_cast<const T*>(a.dy) + row * n;
    T* dx = static_cast<T*>(a.out) + row * 2 * n;
    for_each_pack(n, [&](int64_t i, auto part) FASTBERT_INLINE_BODY {
      auto u = part.load(x + i), v = part.load(x + n + i);
      if (a.bias != nullptr) {
        u = u + part.load(a.bias + i);
        v = v + part.load(a.bias + n + i);
      }
      const auto d = part.load(dy + i);
      const auto du = d * v * gelu_slope<T, kErf>(u), dv = d * gelu<T, kErf>(u);
      part.store(dx + i, du);
      part.store(dx + n + i, dv);
      if (dbias != nullptr) {
        part.store(dbias + i, part.load(dbias + i) + du);
        part.store(dbias + n + i, part.load(dbias + n + i) + dv);
      }
    });
  }
}

void geglu_fwd(const Geglu& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    (a.erf ? geglu_fwd_rows<T, true> : geglu_fwd_rows<T, false>)(a, begin, end);
  });
}

void geglu_bwd(const Geglu& a, int64_t begin, int64_t end, float* dbias) {
  with_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    (a.erf ? geglu_bwd_rows<T, true> : geglu_bwd_rows<T, false>)(a, begin, end, dbias);
  });
}
