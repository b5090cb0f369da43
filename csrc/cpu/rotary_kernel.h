// Queries and keys turned by their positions' angles; the two elements of a pair are half a head
// apart. Included inside a namespace.

template <typename T>
void rotary_rows(const Rotary& a, int64_t begin, int64_t end) {
  const int64_t half = a.half_dim, turned = 2 * a.num_heads * 2 * half, columns = turned / 2 * 3;
  const float sign = a.inverse ? -1.0f : 1.0f;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.qkv) + row * columns;
    T* y = static_cast<T*>(a.out) + row * columns;
    const float *cos = a.cos + a.index[row] * half, *sin = a.sin + a.index[row] * half;
    for_each_vec(half, [&](int64_t i, auto part) {
      const Vec c = part.load(cos + i), s = part.load(sin + i) * broadcast(sign);
      for (int64_t head = 0; head < turned; head += 2 * half) {
        const Vec u = part.load(x + head + i), v = part.load(x + head + half + i);
        part.store(y + head + i, u * c - v * s);
        part.store(y + head + half + i, v * c + u * s);
      }
    });
    __builtin_memcpy(y + turned, x + turned, (columns - turned) * sizeof(T));
  }
}

void rotary(const Rotary& a, int64_t begin, int64_t end) {
  with_dtype(a.dtype, [&](auto zero) { rotary_rows<decltype(zero)>(a, begin, end); });
}
