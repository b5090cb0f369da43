"""GELU of a biased input, forward and backward: the specification of `bias_gelu`.

Hendrycks & Gimpel 2016, "Gaussian Error Linear Units", section 2: GELU(u) = u·Φ(u) = u/2·(1 +
erf(u/√2)), and its tanh form u/2·(1 + tanh(√(2/π)·(u + 0.044715·u³))).
"""

import math

import torch
import torch.nn.functional as F

from fastbert.reference.precision import accumulation_dtype

APPROXIMATIONS = ("none", "tanh")


def bias_gelu_fwd_reference(
    x: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> torch.Tensor:
    """y = GELU(x + bias).

    8 bytes an element in fp32 (read x, write y), about 30 FLOPs.

    Args:
        x: `(..., F)`, fp64/fp32/bf16/fp16.
        bias: `(F,)` or None.
        approximate: `none` for the exact erf form, `tanh` for the tanh form.

    Returns:
        y: `(..., F)`, the dtype of x, rounded once.
    """
    return F.gelu(_preactivation(x, bias), approximate=approximate).to(x.dtype)


def bias_gelu_bwd_reference(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = dy·GELU'(x + bias), dbias = Σ_rows dx before its rounding.

    12 bytes an element in fp32 (read dy and x, write dx).

    Returns:
        dx: `(..., F)` in x's dtype. dbias: `(F,)` in the bias's dtype; `(0,)` without a bias.
    """
    preactivation = _preactivation(x, bias)
    gradient = torch.ops.aten.gelu_backward.default(
        dy.to(preactivation.dtype), preactivation, approximate=approximate
    )
    if bias is None:
        return gradient.to(x.dtype), x.new_empty(0)
    rows = gradient.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return gradient.to(x.dtype), rows.sum(0).to(bias.dtype)


def _preactivation(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    u = x.to(accumulation_dtype(x.dtype))
    return u if bias is None else u + bias.to(u.dtype)
