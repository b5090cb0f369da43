// A decoder's product with labelled rows, which is PyTorch's, in chunks: logits exist for some rows
// at a time, in a buffer used again. Chunks are of rows, not of the vocabulary, so that each row's
// gradient is one product, rounded once.
#pragma once

#include <algorithm>

#include "cuda/ops/tensors.h"

namespace fastbert {

// The logits of chunks of rows, in the dtype of hidden. The rows of the buffer begin on 16-byte
// boundaries whatever the vocabulary.
class LogitChunks {
 public:
  LogitChunks(const at::Tensor& hidden, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias, int64_t most_logits)
      : hidden_(hidden), weight_(weight.to(hidden.scalar_type())), rows_(hidden.size(0)) {
    if (bias.has_value()) bias_ = bias->to(hidden.scalar_type());
    const int64_t vocabulary = weight.size(0), stride = (vocabulary + 7) / 8 * 8;
    size_ = std::min(std::max<int64_t>(1, most_logits / vocabulary), rows_);
    buffer_ = at::empty({size_, stride}, hidden.options()).narrow(1, 0, vocabulary);
  }

  // Calls f(first row, rows) chunk by chunk.
  template <typename F>
  void for_each(F f) const {
    for (int64_t first = 0; first < rows_; first += size_) {
      f(first, std::min(size_, rows_ - first));
    }
  }

  // Of `count` rows from `first`, in the place of those before them.
  at::Tensor logits(int64_t first, int64_t count) const {
    at::Tensor out = buffer_.narrow(0, 0, count);
    const at::Tensor rows = hidden_.narrow(0, first, count), transposed = weight_.t();
    if (bias_.defined()) {
      at::addmm_out(out, bias_, rows, transposed);
    } else {
      at::mm_out(out, rows, transposed);
    }
    return out;
  }

  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor hidden_, weight_, bias_, buffer_;
  int64_t rows_, size_;
};

// Sums up what gradients of logits come to behind the decoder.
class DecoderGradients {
 public:
  // Of `weight`, which the products read as `weight_of_products`, in the dtype of hidden.
  DecoderGradients(const at::Tensor& hidden, const at::Tensor& weight,
                   const at::Tensor& weight_of_products, const std::optional<at::Tensor>& bias,
                   bool need_dhidden, bool need_dweight)
      : hidden_(hidden),
        weight_(weight),
        weight_of_products_(weight_of_products),
        bias_(bias),
        need_dhidden_(need_dhidden),
        need_dweight_(need_dweight),
        dhidden_(need_dhidden ? at::empty(hidden.sizes(), hidden.options())
                              : at::empty({0}, hidden.options())) {}

  // Room for a kernel's sums over parts of rows, (1, parts, V), and where it lies; none without a
  // bias.
  at::Tensor partial(const Parts& parts, float*& data) const {
    data = nullptr;
    if (!bias_.has_value()) return {};
    at::Tensor sums =
        at::empty({1, parts.count, weight_.size(0)}, hidden_.options().dtype(at::kFloat));
    data = sums.mutable_data_ptr<float>();
    return sums;
  }

  // The gradients of the logits of the rows from `first`.
  void add(int64_t first, const at::Tensor& logits, const at::Tensor& partial, const char* op,
           Stream stream) {
    const int64_t count = logits.size(0);
    if (bias_.has_value()) {
      at::Tensor sums = at::empty({weight_.size(0)}, partial.options());
      sum_parts(partial, {sums}, op, stream);
      add_to(dbias_, sums);
    }
    if (need_dhidden_) {
      at::Tensor rows = dhidden_.narrow(0, first, count);
      at::mm_out(rows, logits, weight_of_products_);
    }
    if (need_dweight_) add_to(dweight_, at::mm(logits.t(), hidden_.narrow(0, first, count)));
  }

  // dhidden, dweight, dbias, each empty where it is not wanted.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> result() {
    if (!dweight_.defined()) {
      dweight_ = need_dweight_ ? at::zeros(weight_.sizes(), weight_.options())
                               : at::empty({0}, weight_.options());
    }
    if (!dbias_.defined()) {
      dbias_ = bias_.has_value() ? at::zeros(bias_->sizes(), bias_->options())
                                 : at::empty({0}, hidden_.options());
    }
    return {dhidden_, dweight_.to(weight_.scalar_type()),
            bias_.has_value() ? dbias_.to(bias_->scalar_type()) : dbias_};
  }

 private:
  // The first chunk's sum as it is, then in fp32.
  static void add_to(at::Tensor& sum, const at::Tensor& more) {
    sum = sum.defined() ? sum.to(at::kFloat).add_(more) : more;
  }

  at::Tensor hidden_, weight_, weight_of_products_;
  std::optional<at::Tensor> bias_;
  bool need_dhidden_, need_dweight_;
  at::Tensor dhidden_, dweight_, dbias_;
};

}  // namespace fastbert
