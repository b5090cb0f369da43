// Registrations of the C++ kernels. The schemas are defined in Python (fastbert/dispatch.py), so an
// op exists without this file; here each gets its CPU implementation.
#include <Python.h>
#include <torch/library.h>

#include "cpu/identities.h"
#include "cpu/ops.h"

TORCH_LIBRARY_IMPL(fastbert, CPU, m) {
  m.impl("row_keep_mask_cpu", &fastbert::row_keep_mask_cpu);
  m.impl("score_keep_mask_cpu", &fastbert::score_keep_mask_cpu);
  m.impl("bias_gelu_fwd_cpu", &fastbert::bias_gelu_fwd_cpu);
  m.impl("bias_gelu_bwd_cpu", &fastbert::bias_gelu_bwd_cpu);
  m.impl("geglu_fwd_cpu", &fastbert::geglu_fwd_cpu);
  m.impl("geglu_bwd_cpu", &fastbert::geglu_bwd_cpu);
  m.impl("rotary_cpu", &fastbert::rotary_cpu);
  m.impl("add_layer_norm_fwd_cpu", &fastbert::add_layer_norm_fwd_cpu);
  m.impl("add_layer_norm_bwd_cpu", &fastbert::add_layer_norm_bwd_cpu);
  m.impl("embed_layer_norm_fwd_cpu", &fastbert::embed_layer_norm_fwd_cpu);
  m.impl("embed_layer_norm_bwd_cpu", &fastbert::embed_layer_norm_bwd_cpu);
  m.impl("linear_fwd_cpu", &fastbert::linear_fwd_cpu);
  m.impl("linear_bwd_cpu", &fastbert::linear_bwd_cpu);
  m.impl("linear_gelu_fwd_cpu", &fastbert::linear_gelu_fwd_cpu);
  m.impl("linear_gelu_bwd_cpu", &fastbert::linear_gelu_bwd_cpu);
  m.impl("gelu_mlp_bwd_cpu", &fastbert::gelu_mlp_bwd_cpu);
  m.impl("attention_fwd_cpu", &fastbert::attention_fwd_cpu);
  m.impl("attention_bwd_cpu", &fastbert::attention_bwd_cpu);
  m.impl("attention_packed_qkv_bwd_cpu", &fastbert::attention_packed_qkv_bwd_cpu);
  m.impl("encoder_fwd_cpu", &fastbert::encoder_fwd_cpu);
  m.impl("disentangled_attention_fwd_cpu", &fastbert::disentangled_attention_fwd_cpu);
  m.impl("disentangled_attention_bwd_cpu", &fastbert::disentangled_attention_bwd_cpu);
  m.impl("mlm_cross_entropy_fwd_cpu", &fastbert::mlm_cross_entropy_fwd_cpu);
  m.impl("mlm_cross_entropy_bwd_cpu", &fastbert::mlm_cross_entropy_bwd_cpu);
  m.impl("mlm_distillation_fwd_cpu", &fastbert::mlm_distillation_fwd_cpu);
  m.impl("mlm_distillation_bwd_cpu", &fastbert::mlm_distillation_bwd_cpu);
  m.impl("unpad_cpu", &fastbert::unpad_cpu);
  m.impl("pad_cpu", &fastbert::pad_cpu);
}

TORCH_LIBRARY_FRAGMENT(fastbert, m) {
  m.def("pack_linear_weights(Tensor[] weights, ScalarType dtype) -> Tensor");
  m.impl("pack_linear_weights", c10::DispatchKey::CPU, &fastbert::pack_linear_weights);
  m.def("quantize_linear_weights(Tensor[] weights, bool dynamic) -> Tensor");
  m.impl("quantize_linear_weights", c10::DispatchKey::CPU, &fastbert::quantize_linear_weights);
  m.def("empty_pool() -> ()", &fastbert::empty_pool);
  m.def("samples_match(Tensor[] views, Tensor[] samples) -> bool");
  m.impl("samples_match", c10::DispatchKey::CPU, &fastbert::samples_match);
}

// Importing the module runs the registrations above.
extern "C" PyObject* PyInit__C(void) {
  static PyMethodDef functions[] = {
      {"same_identities", fastbert::same_identities, METH_VARARGS, "See csrc/cpu/identities.h."},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
