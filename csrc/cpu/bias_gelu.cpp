// GELU(x + bias) and its gradient: blocks of kBlock floats, converted from and to the tensors'
// dtypes around arithmetic in fp32. dbias is summed per block of kRowsPerPart rows and the parts
// in their order, so it does not depend on the number of threads.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "cpu/parallel.h"
#include "cpu/vec.h"

namespace fastbert {
namespace {

constexpr float kInvSqrtTwoPi = 0.39894228040143268f;
constexpr float kTanhScale = 0.79788456080286536f;  // sqrt(2 / pi)
constexpr float kTanhCubic = 0.044715f;
constexpr int64_t kRowsPerPart = 64;
constexpr int64_t kGrain = 1 << 14;  // elements a thread should get at least

}  // namespace

FASTBERT_EACH_ISA void gelu_erf_block(const float* u, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = u[i];
    y[i] = v * normal_cdf(v, exp_negative(-0.5f * v * v));
  }
}

// (1 + tanh z) / 2 and its complement, each accurate where it is small.
struct Halves {
  float of_tanh, complement;
};

FASTBERT_INLINE Halves tanh_halves(float z) {
  const float e = exp_negative(-2.0f * std::fabs(z));
  const float large = 1.0f / (1.0f + e), small = e * large;
  return {z < 0.0f ? small : large, z < 0.0f ? large : small};
}

FASTBERT_EACH_ISA void gelu_tanh_block(const float* u, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = u[i];
    y[i] = v * tanh_halves(kTanhScale * (v + kTanhCubic * v * v * v)).of_tanh;
  }
}

// dx = dy (Phi(u) + u phi(u))
FASTBERT_EACH_ISA void gelu_erf_grad_block(const float* dy, const float* u, float* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = u[i];
    const float e = exp_negative(-0.5f * v * v);
    dx[i] = dy[i] * (normal_cdf(v, e) + v * kInvSqrtTwoPi * e);
  }
}

FASTBERT_EACH_ISA void gelu_tanh_grad_block(const float* dy, const float* u, float* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = u[i];
    const float z = kTanhScale * (v + kTanhCubic * v * v * v);
    const Halves s = tanh_halves(z);
    const float dz = kTanhScale * (1.0f + 3.0f * kTanhCubic * v * v);
    dx[i] = dy[i] * (s.of_tanh + v * 2.0f * s.of_tanh * s.complement * dz);
  }
}

FASTBERT_EACH_ISA void add_block(const float* a, float* into, int64_t n) {
  for (int64_t i = 0; i < n; ++i) into[i] += a[i];
}

FASTBERT_EACH_ISA void bf16_to_float_block(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
    std::memcpy(&y[i], &bits, 4);
  }
}

// To nearest, ties to even; NaN stays NaN.
FASTBERT_EACH_ISA void float_to_bf16_block(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x[i], 4);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    y[i] = static_cast<uint16_t>(x[i] != x[i] ? 0x7FC0u : rounded);
  }
}

#if defined(__FLT16_MAX__)
using Float16 = _Float16;
#else
using Float16 = at::Half;
#endif

FASTBERT_EACH_ISA void fp16_to_float_block(const Float16* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(x[i]);
}

FASTBERT_EACH_ISA void float_to_fp16_block(const float* x, Float16* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<Float16>(x[i]);
}

namespace {

void read_block(const float* x, float* y, int64_t n) { std::memcpy(y, x, n * sizeof(float)); }
void read_block(const at::BFloat16* x, float* y, int64_t n) {
  bf16_to_float_block(reinterpret_cast<const uint16_t*>(x), y, n);
}
void read_block(const at::Half* x, float* y, int64_t n) {
  fp16_to_float_block(reinterpret_cast<const Float16*>(x), y, n);
}

void write_block(const float* x, float* y, int64_t n) { std::memcpy(y, x, n * sizeof(float)); }
void write_block(const float* x, at::BFloat16* y, int64_t n) {
  float_to_bf16_block(x, reinterpret_cast<uint16_t*>(y), n);
}
void write_block(const float* x, at::Half* y, int64_t n) {
  float_to_fp16_block(x, reinterpret_cast<Float16*>(y), n);
}

// u = x + bias over columns [column, column + n) of one row; bias may be null.
template <typename T>
void preactivation_block(const T* x, const float* bias, int64_t column, float* u, int64_t n) {
  read_block(x + column, u, n);
  if (bias != nullptr) add_block(bias + column, u, n);
}

template <typename T>
void bias_gelu_fwd_rows(const T* x, const float* bias, bool erf, int64_t columns, int64_t begin,
                        int64_t end, T* y) {
  float u[kBlock], out[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < columns; column += kBlock) {
      const int64_t n = std::min(kBlock, columns - column);
      const auto gelu = erf ? gelu_erf_block : gelu_tanh_block;
      const T* from = x + row * columns;
      T* to = y + row * columns + column;
      if constexpr (std::is_same_v<T, float>) {
        if (bias == nullptr) {
          gelu(from + column, to, n);
          continue;
        }
      }
      preactivation_block(from, bias, column, u, n);
      gelu(u, out, n);
      write_block(out, to, n);
    }
  }
}

// partial: column sums of dx over these rows, (columns,), or null.
template <typename T>
void bias_gelu_bwd_rows(const T* dy, const T* x, const float* bias, bool erf, int64_t columns,
                        int64_t begin, int64_t end, T* dx, float* partial) {
  float u[kBlock], gradient[kBlock], out[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < columns; column += kBlock) {
      const int64_t n = std::min(kBlock, columns - column);
      preactivation_block(x + row * columns, bias, column, u, n);
      read_block(dy + row * columns + column, gradient, n);
      (erf ? gelu_erf_grad_block : gelu_tanh_grad_block)(gradient, u, out, n);
      write_block(out, dx + row * columns + column, n);
      if (partial != nullptr) add_block(out, partial + column, n);
    }
  }
}

// body(T{}) with the C++ type of the dtypes the kernels take.
template <typename Body>
void for_dtype(at::ScalarType dtype, const Body& body) {
  switch (dtype) {
    case at::kFloat:
      return body(float{});
    case at::kBFloat16:
      return body(at::BFloat16{});
    case at::kHalf:
      return body(at::Half{});
    default:
      TORCH_CHECK_TYPE(false, "bias_gelu: the C++ kernel takes fp32, bf16 and fp16, got ", dtype);
  }
}

bool is_erf(std::string_view approximate) {
  TORCH_CHECK_VALUE(approximate == "none" || approximate == "tanh",
                    "bias_gelu: approximate must be 'none' or 'tanh', got '", approximate, "'");
  return approximate == "none";
}

at::Tensor float_bias(const std::optional<at::Tensor>& bias, int64_t columns) {
  if (!bias.has_value()) return {};
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->size(0) == columns,
                    "bias_gelu: bias must have shape (", columns, ",), got ", bias->sizes());
  return bias->to(at::kFloat).contiguous();
}

const float* data_or_null(const at::Tensor& t) {
  return t.defined() ? t.const_data_ptr<float>() : nullptr;
}

}  // namespace

at::Tensor bias_gelu_fwd_cpu(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                             std::string_view approximate) {
  const bool erf = is_erf(approximate);
  const at::Tensor input = x.contiguous();
  at::Tensor y = at::empty(x.sizes(), input.options());
  if (x.numel() == 0) return y;
  // Without a bias rows mean nothing, and one long row has no short tail.
  const int64_t columns = bias.has_value() ? x.size(-1) : kBlock;
  const at::Tensor bias_values = float_bias(bias, columns);
  const float* bias_data = data_or_null(bias_values);
  const int64_t rows = x.numel() / columns, tail = x.numel() % columns;
  for_dtype(x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    const scalar_t* in = input.const_data_ptr<scalar_t>();
    scalar_t* out = y.mutable_data_ptr<scalar_t>();
    for_each_range(rows, kGrain / columns, [&](int64_t begin, int64_t end) {
      bias_gelu_fwd_rows(in, bias_data, erf, columns, begin, end, out);
    });
    if (tail > 0) {
      const int64_t done = rows * columns;
      bias_gelu_fwd_rows(in + done, bias_data, erf, tail, 0, 1, out + done);
    }
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cpu(const at::Tensor& dy, const at::Tensor& x,
                                                     const std::optional<at::Tensor>& bias,
                                                     std::string_view approximate) {
  const bool erf = is_erf(approximate);
  TORCH_CHECK_VALUE(dy.sizes() == x.sizes(), "bias_gelu: dy must have the shape of x ", x.sizes(),
                    ", got ", dy.sizes());
  const at::Tensor input = x.contiguous();
  const at::Tensor gradient = dy.to(x.scalar_type()).contiguous();
  at::Tensor dx = at::empty(x.sizes(), input.options());
  const int64_t columns = x.size(-1);
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  const int64_t parts = ceil_div(rows, kRowsPerPart);
  const at::Tensor bias_values = float_bias(bias, columns);
  const float* bias_data = data_or_null(bias_values);
  at::Tensor partials;
  if (bias.has_value()) partials = at::zeros({parts, columns}, x.options().dtype(at::kFloat));
  float* partial_data = partials.defined() ? partials.mutable_data_ptr<float>() : nullptr;
  for_dtype(x.scalar_type(), [&](auto zero) {
    using scalar_t = decltype(zero);
    const scalar_t* in = input.const_data_ptr<scalar_t>();
    const scalar_t* grad = gradient.const_data_ptr<scalar_t>();
    scalar_t* out = dx.mutable_data_ptr<scalar_t>();
    for_each_range(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t first = part * kRowsPerPart;
        bias_gelu_bwd_rows(grad, in, bias_data, erf, columns, first,
                           std::min(rows, first + kRowsPerPart), out,
                           partial_data ? partial_data + part * columns : nullptr);
      }
    });
  });
  if (!bias.has_value()) return {dx, at::empty({0}, x.options())};
  at::Tensor dbias = at::zeros({columns}, x.options().dtype(at::kFloat));
  float* sum = dbias.mutable_data_ptr<float>();
  for (int64_t part = 0; part < parts; ++part) {
    add_block(partial_data + part * columns, sum, columns);
  }
  return {dx, dbias.to(bias->scalar_type())};
}

}  // namespace fastbert
