// Matrix products over packed operands. Which arithmetic runs depends on the instruction set, the
// dtype, the precision setting and the weight alone, and each element of a product is summed in one
// order, so a row's results do not depend on the rows around it or on the number of threads.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/workspace.h"

namespace fastbert {

// bf16 by bf16 products where the machine has them; fp32 by three or six bf16 products of split
// operands where it has AMX (torch.set_float32_matmul_precision: "highest" six, else three;
// FASTBERT_SPLIT_FP32=0 none); everything else in fp32.
Arithmetic arithmetic_for(at::ScalarType dtype);

// The same, or fp32 where the splits cannot hold a value of the sources.
Arithmetic ordinary_arithmetic(const std::vector<Source>& sources, Arithmetic wanted);

// The product of blocks of which all 32 rows are wanted, or the upper 16.
Multiply multiply_for(Arithmetic arithmetic, bool tall = true);

// Gives this thread the tile registers for as long as it lives, where they are needed.
class Tiles {
 public:
  explicit Tiles(Arithmetic arithmetic);
  ~Tiles();
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  bool configured_;
};

// A row-major matrix of a tensor with contiguous rows.
Source source_of(const at::Tensor& matrix, const char* op);

// Matrices under one another, and the tensors that hold their memory.
struct Stack {
  std::vector<at::Tensor> held;
  std::vector<Source> sources;
};

// A right operand (k by columns) packed for products: [column / 32][k / 32] blocks (k / 64 in
// int8). It is made of one matrix, or of several under one another whose heights are multiples of
// 32; transposed, those are (columns, k), as the weights of linear layers are.
class PackedRight {
 public:
  PackedRight(Stack stack, bool transposed, Arithmetic arithmetic);
  // One packed before, by `to_tensor`.
  PackedRight(Stack stack, bool transposed, const at::Tensor& packed);
  // The same without the matrices it was made of, transposed ones. In int8 they are never there.
  explicit PackedRight(const at::Tensor& packed);

  // The blocks with a header that says what they are.
  at::Tensor to_tensor() const { return blocks_; }

  Arithmetic arithmetic() const { return arithmetic_; }
  int64_t depth() const { return depth_; }
  int64_t columns() const { return columns_; }
  const char* panel(int64_t column) const;
  // Of int8 columns, from this one on; null where blocks have their own.
  const float* units(int64_t column) const;
  // The product of a row and a column in plain fp32, for rows that the splits cannot hold.
  float plain_product(const float* row, int64_t column) const;

 private:
  const char* data() const;
  void measure(float* units) const;
  void pack(char* blocks) const;
  void pack_block(int64_t k, int64_t column, char* block) const;
  float value_at(int64_t k, int64_t column) const;

  std::vector<at::Tensor> held_;
  std::vector<Source> sources_;
  bool transposed_;
  int64_t depth_, columns_;
  Arithmetic arithmetic_;
  at::Tensor blocks_;
};

// What is left to do for the rows [begin, end) of a product once all their columns are finished, by
// a thread that still has them in cache where it made them alone.
using FinishRows = std::function<void(int64_t begin, int64_t end)>;

// finish(left · right), left read as its transpose where that is said.
void multiply(const Source& left, bool transposed, const PackedRight& right, const Finish& finish,
              const FinishRows& finish_rows = {});

// --- the products of a linear layer ---

at::Tensor with_contiguous_rows(const at::Tensor& matrix);

// The weights (columns, k) of y = x [W ...]ᵀ, taken from `packed` where that is what it says.
// Without weights `packed` must be; in int8 it serves any dtype and machine.
PackedRight packed_weights(at::TensorList weights, at::ScalarType dtype,
                           const std::optional<at::Tensor>& packed, const char* op);

// The same in int8. `dynamic`: for products with rows of x in int8 too, a unit for each output;
// else with rows in bf16 or fp32, a unit for each 64 weights of an output.
PackedRight quantized_weights(at::TensorList weights, bool dynamic, const char* op);

// dy [W ...], in the dtype of x; `finish` where the gradient is not the end of it.
void input_gradient(const Source& dy, at::TensorList weights, at::ScalarType dtype,
                    const Finish& finish, const char* op);
// The same plus dresidual, the other gradient of x, in its dtype where there is one.
at::Tensor input_gradient(const Source& dy, const at::Tensor& x, at::TensorList weights,
                          const char* op, const std::optional<at::Tensor>& dresidual = {});

// dyᵀ gelu(x), in the dtype of the weight.
at::Tensor weight_gradient(const Source& dy, const at::Tensor& x, Gelu gelu,
                           const at::Tensor& weight, const char* op);

// The sums of a matrix's columns, fp32.
at::Tensor sum_columns(const Source& source);

}  // namespace fastbert
