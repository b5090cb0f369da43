"""The fused ops, one module each: schema, fake, device functions, autograd, public function.

Importing any of them registers all, so that backends can be bound and listed by name.
"""

from fastbert.dispatch import use_backend
from fastbert.ops import (
    add_layer_norm,
    attention,
    bias_gelu,
    disentangled_attention,
    embed_layer_norm,
    encoder,
    geglu,
    linear,
    linear_gelu,
    mlm_cross_entropy,
    mlm_distillation,
    philox,
    rotary,
    unpad,
)

__all__ = [
    "add_layer_norm",
    "attention",
    "bias_gelu",
    "disentangled_attention",
    "embed_layer_norm",
    "encoder",
    "geglu",
    "linear",
    "linear_gelu",
    "mlm_cross_entropy",
    "mlm_distillation",
    "philox",
    "rotary",
    "unpad",
    "use_backend",
]
