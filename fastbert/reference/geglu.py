"""GELU of one half of the features times the other, and its gradients: the specification of
`geglu`.

Shazeer 2020, "GLU Variants Improve Transformer", eq. 5: GEGLU = GELU(x W + b) ⊙ (x V + c), the
gated half first, as in transformers' ModernBERT.

Letters: T rows, F features.
"""

import torch
import torch.nn.functional as F

from fastbert.reference.precision import accumulation_dtype


def geglu_fwd_reference(
    x: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> torch.Tensor:
    """y = GELU(u)·v, (u, v) = x + bias.

    12 bytes an element of y in fp32 (read u and v, write y), about 31 FLOPs.

    Args:
        x: `(T, 2·F)`, fp64/fp32/bf16/fp16: u, then v.
        bias: `(2·F,)` or None.
        approximate: `none` for the exact erf form, `tanh` for the tanh form.

    Returns:
        y: `(T, F)`, the dtype of x, rounded once.
    """
    u, v = _halves(x, bias)
    return (F.gelu(u, approximate=approximate) * v).to(x.dtype)


def geglu_bwd_reference(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """du = dy·v·GELU'(u), dv = dy·GELU(u), dbias = Σ_rows of both before their rounding.

    Returns:
        dx: `(T, 2·F)` in x's dtype. dbias: `(2·F,)` in the bias's dtype; `(0,)` without a bias.
    """
    u, v = _halves(x, bias)
    dy = dy.to(u.dtype)
    du = torch.ops.aten.gelu_backward.default(dy * v, u, approximate=approximate)
    dx = torch.cat([du, dy * F.gelu(u, approximate=approximate)], dim=1)
    dbias = x.new_empty(0) if bias is None else dx.sum(0).to(bias.dtype)
    return dx.to(x.dtype), dbias


def _halves(x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(accumulation_dtype(x.dtype))
    return (wide if bias is None else wide + bias.to(wide.dtype)).chunk(2, dim=1)
