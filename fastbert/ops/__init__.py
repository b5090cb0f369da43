"""The fused ops, one module each: schema, fake, device functions, autograd, public function.

Importing any of them registers all, so that backends can be bound and listed by name.
"""

from fastbert.dispatch import use_backend
from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.ops.attention import attention, attention_packed_qkv
from fastbert.ops.bias_gelu import bias_gelu
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.ops.linear_gelu import gelu_mlp, linear_gelu
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.philox import row_keep_mask, score_keep_mask
from fastbert.ops.unpad import pad, unpad

__all__ = [
    "add_layer_norm",
    "attention",
    "attention_packed_qkv",
    "bias_gelu",
    "embed_layer_norm",
    "gelu_mlp",
    "linear_gelu",
    "mlm_cross_entropy",
    "pad",
    "row_keep_mask",
    "score_keep_mask",
    "unpad",
    "use_backend",
]
