"""A linear layer in plain PyTorch: the specification of `linear`.

Letters: T rows, C inputs, F outputs.
"""

import torch
import torch.nn.functional as F

from fastbert.reference.precision import accumulation_dtype


def linear_reference(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x [W ...]ᵀ + [b ...] in the dtype of x; 2·T·C·F FLOPs.

    Args:
        x: `(T, C)`. weights: each `(F_i, C)`, may be wider than x.
        biases: each `(F_i,)`, or none at all.
        packed: all weights stacked in the dtype of x; another dtype is passed over.

    Returns:
        `(T, F)`, F the sum of all F_i.
    """
    weight = packed
    if packed is None or packed.dtype != x.dtype:
        weight = torch.cat([w.to(x.dtype) for w in weights])
    return F.linear(x, weight, torch.cat([b.to(x.dtype) for b in biases]) if biases else None)


def linear_bwd_reference(
    dy: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    need_dx: bool,
    need_dweights: bool,
    dresidual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of `linear_reference`, by products in the dtype of x.

    Args:
        dresidual: `(T, C)`, what else flows back into x; None: nothing. The others as in forward.

    Returns:
        dx: dy W + dresidual `(T, C)`, in the dtype of dresidual where there is one, `(0,)` where
        not wanted. dweights, dbiases: like the weights and biases, in
        their dtypes; none where not wanted.
    """
    dy = dy.to(x.dtype)
    sizes = [w.shape[0] for w in weights]
    dx = x.new_empty(0)
    if need_dx:
        weight = torch.cat([w.to(x.dtype) for w in weights])
        if dresidual is None:
            dx = dy @ weight
        elif dresidual.dtype == x.dtype:
            dx = torch.addmm(dresidual, dy, weight)
        else:
            dx = dresidual + dy @ weight
    dweights = []
    if need_dweights:
        parts = (dy.t() @ x).split(sizes)
        dweights = [p.to(w.dtype, copy=True) for p, w in zip(parts, weights, strict=True)]
    dbiases = []
    if biases:
        parts = dy.sum(0, dtype=accumulation_dtype(dy.dtype)).split(sizes)
        dbiases = [p.to(b.dtype, copy=True) for p, b in zip(parts, biases, strict=True)]
    return dx, dweights, dbiases
