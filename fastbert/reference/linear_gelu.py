"""GELU of a linear layer in plain PyTorch: the specification of `linear_gelu` and `gelu_mlp`."""

import torch
import torch.nn.functional as F


def linear_gelu_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, approximate: str
) -> torch.Tensor:
    """GELU(x Wᵀ + b); 2·T·C·F FLOPs.

    Args:
        x: `(T, C)`. weight: `(F, C)`. bias: `(F,)` or None.
        approximate: `none` or `tanh`.

    Returns:
        `(T, F)`.
    """
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def gelu_mlp_reference(
    x: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor | None,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor | None = None,
    *,
    approximate: str,
) -> torch.Tensor:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂; 4·T·C·F FLOPs.

    Args:
        x: `(T, C)`. weight_in: `(F, C)`. bias_in: `(F,)` or None.
        weight_out: `(C, F)`. bias_out: `(C,)` or None.
        approximate: `none` or `tanh`.

    Returns:
        `(T, C)`.
    """
    activated = linear_gelu_reference(x, weight_in, bias_in, approximate=approximate)
    return F.linear(activated, weight_out, bias_out)
