// Registrations of the C++ kernels. The schemas are defined in Python (fastbert/dispatch.py), so an
// op exists without this file; here each gets its CPU implementation.
#include <ATen/ATen.h>
#include <Python.h>
#include <torch/library.h>

namespace fastbert {

at::Tensor row_keep_mask_cpu(const at::Tensor&, int64_t, int64_t, int64_t, int64_t);
at::Tensor score_keep_mask_cpu(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t,
                               int64_t, int64_t);
at::Tensor bias_gelu_fwd_cpu(const at::Tensor&, const std::optional<at::Tensor>&, std::string_view);
std::tuple<at::Tensor, at::Tensor> bias_gelu_bwd_cpu(const at::Tensor&, const at::Tensor&,
                                                     const std::optional<at::Tensor>&,
                                                     std::string_view);

}  // namespace fastbert

TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("row_keep_mask_cpu", &fastbert::row_keep_mask_cpu);
  m.impl("score_keep_mask_cpu", &fastbert::score_keep_mask_cpu);
  m.impl("bias_gelu_fwd_cpu", &fastbert::bias_gelu_fwd_cpu);
  m.impl("bias_gelu_bwd_cpu", &fastbert::bias_gelu_bwd_cpu);
}

// An empty module: importing it runs the registrations above.
extern "C" PyObject* PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
