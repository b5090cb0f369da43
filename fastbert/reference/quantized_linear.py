"""A linear layer whose weights are in int8, in plain PyTorch: the specification of what `linear`
does with quantised weights.

Letters: T rows, C inputs, F outputs.
"""

import torch

MOST = 127
"""The largest whole number; rounding is symmetric."""
DEPTH = 64
"""Inputs that share a unit where the weights alone are quantised."""
OUTLIERS = 2
"""Elements of a row of x, the largest, that are not quantised."""


def quantized_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mode: str,
    *,
    rounds_to_bf16: bool,
    sums: torch.dtype = torch.float64,
) -> torch.Tensor:
    """y = x Wᵀ + b with W, and for `dynamic` x, in whole numbers.

    Every number is the nearest multiple of a unit, its group's largest magnitude / 127: with
    `weight_only` 64 inputs of an output are a group, whose unit is rounded up to bf16; with
    `dynamic` all inputs of an output, and of a row of x. A row's two largest elements are left as
    they are, unless there is a third as large (the outliers of Dettmers et al. 2022, "LLM.int8()",
    section 4), and are none of the group.

    Args:
        x: `(T, C)`. weight: `(F, C)`. bias: `(F,)`. All without infinities and NaN.
        mode: `weight_only` or `dynamic`.
        rounds_to_bf16: whether the machine multiplies bf16, to which `weight_only` rounds x and
            the multiples of the units.
        sums: dtype of the products and sums.

    Returns:
        `(T, F)`, in `sums`.
    """
    x, weight = x.float(), weight.float()
    if mode == "weight_only":
        groups = weight.split(DEPTH, 1)
        weight = torch.cat([_multiples(w, _bf16_unit(w), torch.float32) for w in groups], 1)
        if rounds_to_bf16:
            x, weight = x.bfloat16(), weight.bfloat16()
        return x.to(sums) @ weight.to(sums).t() + bias.to(sums)
    weight = _multiples(weight, weight.abs().amax(1, keepdim=True) / MOST, sums)
    magnitudes = x.abs().sort(1, descending=True).values
    third = magnitudes[:, OUTLIERS : OUTLIERS + 1] if x.shape[1] > OUTLIERS else x[:, :1] * 0
    outlier = x.abs() > third
    unit = third / MOST
    rest = _multiples(x.masked_fill(outlier, 0), unit, sums)
    return torch.where(outlier, x.to(sums), rest) @ weight.t() + bias.to(sums)


def _multiples(values: torch.Tensor, unit: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest ones; 0 where the unit is too small to divide by."""
    per_unit = torch.where(unit > 2.0**-100, 1 / unit, 0.0)
    return torch.round(values * per_unit).clamp(-MOST, MOST).to(dtype) * unit


def _bf16_unit(weight: torch.Tensor) -> torch.Tensor:
    """The unit of each row, rounded up."""
    bits = (weight.abs().amax(1, keepdim=True) / MOST).view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)
