"""Dropout, residual sum and LayerNorm in plain PyTorch: the specification of `add_layer_norm`.

Letters: T rows, C features.
"""

import torch

from fastbert.reference.philox import dropout_scale
from fastbert.reference.precision import accumulation_dtype


def add_layer_norm_reference(
    x: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    threshold: int,
    keep_mask: torch.Tensor | None,
    out_dtype: torch.dtype,
    keep_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = residual + dropout(x + linear_bias); y = (h - mean)·rstd·weight + bias.

    Ba et al. 2016, "Layer Normalization", eq. 4, with rstd = 1/√(variance + eps); dropout of
    Srivastava et al. 2014, section 4, scaled while training. The statistics are those of h before
    it is rounded. 16 bytes an element in fp32 (read x and residual, write h and y).

    Args:
        x: `(T, C)`.
        linear_bias: `(C,)` or None. residual: `(T, C)` or None.
        weight: `(C,)`. bias: `(C,)` or None.
        threshold: of `dropout_threshold`; 0 without dropout.
        keep_mask: `(T, C)` bool where 0 < threshold.
        out_dtype: dtype of y.
        keep_sum: return h.

    Returns:
        y: `(T, C)`. h: `(T, C)` in the wider dtype of x and residual; `(0,)` where it is x itself
        or not kept.
        mean, rstd: `(T, 1)`, fp32.
    """
    accumulate = accumulation_dtype(x.dtype)
    total = x
    if linear_bias is not None:
        total = total.to(accumulate) + linear_bias.to(accumulate)
    if threshold > 0:
        total = torch.where(keep_mask, total, 0)
        scale = dropout_scale(threshold)
        if residual is None:
            total = total.to(accumulate) * scale
        else:
            total = torch.add(residual.to(accumulate), total, alpha=scale)
    elif residual is not None:
        total = residual.to(accumulate) + total
    total = total.to(accumulate)
    y, mean, rstd = torch.native_layer_norm(
        total,
        (x.shape[-1],),
        weight.to(accumulate),
        None if bias is None else bias.to(accumulate),
        eps,
    )
    h = x.new_empty(0)
    if keep_sum and not (linear_bias is None and residual is None and threshold == 0):
        h = total.to(x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    return y.to(out_dtype), h, mean, rstd


def add_layer_norm_bwd_reference(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    threshold: int,
    keep_mask: torch.Tensor | None,
    x_dtype: torch.dtype,
    linear_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `add_layer_norm_reference`; everything is summed in fp32.

    Args:
        dy: `(T, C)`. dh: `(T, C)`, gradient of h itself, or None.
        h: `(T, C)`, the saved sum. mean, rstd: `(T, 1)`.
        x_dtype: dtype of dx.

    Returns:
        dx: `(T, C)`; `(0,)` where it equals dresidual. dresidual: `(T, C)` in h's dtype.
        dweight: `(C,)`. dbias: `(C,)`; `(0,)` without bias. dlinear_bias: `(C,)`; `(0,)` without.
    """
    accumulate = accumulation_dtype(h.dtype)
    # Centred first: torch computes h·rstd - mean·rstd, which leaves a rest where h is its mean.
    dtotal, dweight, dbias = torch.ops.aten.native_layer_norm_backward.default(
        dy.to(accumulate),
        torch.sub(h, mean),
        (h.shape[-1],),
        torch.zeros_like(mean),
        rstd,
        weight.to(accumulate),
        None if bias is None else bias.to(accumulate),
        [True, True, bias is not None],
    )
    if dh is not None:
        dtotal = dtotal + dh
    dbranch = dtotal
    if threshold > 0:
        dbranch = torch.where(keep_mask, dtotal, 0).mul_(dropout_scale(threshold))
    empty = h.new_empty(0)
    dx = empty if threshold == 0 and x_dtype == h.dtype else dbranch.to(x_dtype)
    return (
        dx,
        dtotal.to(h.dtype),
        dweight.to(weight.dtype),
        empty if bias is None else dbias.to(bias.dtype),
        empty if linear_bias is None else dbranch.sum(0).to(linear_bias.dtype),
    )
