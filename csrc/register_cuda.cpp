// Registrations of the CUDA kernels, and, compiled with FASTBERT_CUDA_ON_CPU, of the same kernels
// emulated for tests. The schemas are defined in Python (fastbert/dispatch.py).
#include <Python.h>
#include <torch/library.h>

#include <array>

#include "cuda/ops/tensors.h"

#if defined(FASTBERT_CUDA_ON_CPU)
#include "cuda_on_cpu/cuda_on_cpu.h"
#endif

namespace fastbert {

at::Tensor FASTBERT_CUDA_OP(bias_gelu_fwd)(const at::Tensor&, const std::optional<at::Tensor>&,
                                           std::string_view);
std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(bias_gelu_bwd)(const at::Tensor&,
                                                                   const at::Tensor&,
                                                                   const std::optional<at::Tensor>&,
                                                                   std::string_view);
at::Tensor FASTBERT_CUDA_OP(geglu_fwd)(const at::Tensor&, const std::optional<at::Tensor>&,
                                       std::string_view);
std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(geglu_bwd)(const at::Tensor&, const at::Tensor&,
                                                               const std::optional<at::Tensor>&,
                                                               std::string_view);
at::Tensor FASTBERT_CUDA_OP(rotary)(const at::Tensor&, int64_t, const at::Tensor&,
                                    const at::Tensor&, const at::Tensor&, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(add_layer_norm_fwd)(
    const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
    const at::Tensor&, const std::optional<at::Tensor>&, double, double, int64_t,
    const std::optional<at::Tensor>&, at::ScalarType, bool);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(
    add_layer_norm_bwd)(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                        const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                        const at::Tensor&, const std::optional<at::Tensor>&, double, int64_t,
                        const std::optional<at::Tensor>&, at::ScalarType);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(embed_layer_norm_fwd)(
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, double, const std::optional<at::Tensor>&, double, int64_t,
    const std::optional<at::Tensor>&, at::ScalarType, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(
    embed_layer_norm_bwd)(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                          std::optional<int64_t>, double, int64_t, const std::optional<at::Tensor>&,
                          std::array<bool, 3>);
std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_cross_entropy_fwd)(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
    int64_t, double, double, const std::optional<at::Tensor>&, int64_t);
std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_cross_entropy_bwd)(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const at::Tensor&, const at::Tensor&, int64_t, double, double, bool, bool, int64_t);
std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_distillation_fwd)(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, int64_t, double,
    const std::optional<at::Tensor>&, int64_t);
std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(mlm_distillation_bwd)(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const at::Tensor&, int64_t, double, bool, bool, int64_t);
std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(attention_fwd)(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    int64_t, int64_t, double, c10::OptionalArrayRef<int64_t>, double, int64_t,
    const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(attention_bwd)(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, double,
    c10::OptionalArrayRef<int64_t>, double, int64_t, const std::optional<at::Tensor>&);
at::Tensor FASTBERT_CUDA_OP(attention_packed_qkv_bwd)(const at::Tensor&, const at::Tensor&, int64_t,
                                                      const at::Tensor&, const at::Tensor&,
                                                      const at::Tensor&, int64_t, double,
                                                      c10::OptionalArrayRef<int64_t>, double,
                                                      int64_t, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor> FASTBERT_CUDA_OP(disentangled_attention_fwd)(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, int64_t, double, double,
    int64_t, const std::optional<at::Tensor>&);
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> FASTBERT_CUDA_OP(
    disentangled_attention_bwd)(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, const std::optional<at::Tensor>&,
                                const std::optional<at::Tensor>&, const at::Tensor&,
                                const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
                                double, double, int64_t, const std::optional<at::Tensor>&);
at::Tensor FASTBERT_CUDA_OP(unpad)(const at::Tensor&, const at::Tensor&);
at::Tensor FASTBERT_CUDA_OP(pad)(const at::Tensor&, const at::Tensor&, int64_t);
at::Tensor FASTBERT_CUDA_OP(row_keep_mask)(const at::Tensor&, int64_t, int64_t, int64_t, int64_t);
at::Tensor FASTBERT_CUDA_OP(score_keep_mask)(const at::Tensor&, const at::Tensor&, int64_t, int64_t,
                                             int64_t, int64_t, int64_t);

}  // namespace fastbert

#if defined(FASTBERT_CUDA_ON_CPU)
#define FASTBERT_CUDA_KEY CPU
#define FASTBERT_CUDA_SUFFIX "_cuda_emulated"
#define FASTBERT_CUDA_MODULE PyInit__C_emulated
#define FASTBERT_CUDA_MODULE_NAME "_C_emulated"
#else
#define FASTBERT_CUDA_KEY CUDA
#define FASTBERT_CUDA_SUFFIX "_cuda"
#define FASTBERT_CUDA_MODULE PyInit__C_cuda
#define FASTBERT_CUDA_MODULE_NAME "_C_cuda"
#endif

TORCH_LIBRARY_IMPL(fastbert, FASTBERT_CUDA_KEY, m) {
  const auto registered = [&](const char* name, auto* function) {
    m.impl((std::string(name) + FASTBERT_CUDA_SUFFIX).c_str(), function);
  };
  registered("bias_gelu_fwd", &fastbert::FASTBERT_CUDA_OP(bias_gelu_fwd));
  registered("bias_gelu_bwd", &fastbert::FASTBERT_CUDA_OP(bias_gelu_bwd));
  registered("geglu_fwd", &fastbert::FASTBERT_CUDA_OP(geglu_fwd));
  registered("geglu_bwd", &fastbert::FASTBERT_CUDA_OP(geglu_bwd));
  registered("rotary", &fastbert::FASTBERT_CUDA_OP(rotary));
  registered("add_layer_norm_fwd", &fastbert::FASTBERT_CUDA_OP(add_layer_norm_fwd));
  registered("add_layer_norm_bwd", &fastbert::FASTBERT_CUDA_OP(add_layer_norm_bwd));
  registered("embed_layer_norm_fwd", &fastbert::FASTBERT_CUDA_OP(embed_layer_norm_fwd));
  registered("embed_layer_norm_bwd", &fastbert::FASTBERT_CUDA_OP(embed_layer_norm_bwd));
  registered("mlm_cross_entropy_fwd", &fastbert::FASTBERT_CUDA_OP(mlm_cross_entropy_fwd));
  registered("mlm_cross_entropy_bwd", &fastbert::FASTBERT_CUDA_OP(mlm_cross_entropy_bwd));
  registered("mlm_distillation_fwd", &fastbert::FASTBERT_CUDA_OP(mlm_distillation_fwd));
  registered("mlm_distillation_bwd", &fastbert::FASTBERT_CUDA_OP(mlm_distillation_bwd));
  registered("attention_fwd", &fastbert::FASTBERT_CUDA_OP(attention_fwd));
  registered("attention_bwd", &fastbert::FASTBERT_CUDA_OP(attention_bwd));
  registered("attention_packed_qkv_bwd", &fastbert::FASTBERT_CUDA_OP(attention_packed_qkv_bwd));
  registered("disentangled_attention_fwd", &fastbert::FASTBERT_CUDA_OP(disentangled_attention_fwd));
  registered("disentangled_attention_bwd", &fastbert::FASTBERT_CUDA_OP(disentangled_attention_bwd));
  registered("unpad", &fastbert::FASTBERT_CUDA_OP(unpad));
  registered("pad", &fastbert::FASTBERT_CUDA_OP(pad));
  registered("row_keep_mask", &fastbert::FASTBERT_CUDA_OP(row_keep_mask));
  registered("score_keep_mask", &fastbert::FASTBERT_CUDA_OP(score_keep_mask));
}

#if defined(FASTBERT_CUDA_ON_CPU)
namespace {

int64_t set_schedule(int64_t seed) {
  return static_cast<int64_t>(fastbert::cuda_on_cpu::set_schedule(static_cast<uint64_t>(seed)));
}

}  // namespace

// The seed of the order in which emulated threads run (0: in order); returns the one before.
TORCH_LIBRARY_FRAGMENT(fastbert, m) {
  m.def("cuda_emulated_schedule(int seed) -> int", &set_schedule);
}
#endif

// An empty module: importing it runs the registrations above.
extern "C" PyObject* FASTBERT_CUDA_MODULE(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               FASTBERT_CUDA_MODULE_NAME,
                               nullptr,
                               -1,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
