"""GELU(x + bias) and its gradients in Triton. Letters: R rows, F features.

The bias gradient is deterministic: each program sums a block of rows, a second kernel sums the
blocks in their order; no atomics.
"""

import torch
import triton
import triton.language as tl

from .common import block_of, on_device, rows_per_part, sum_parts


@triton.jit
def _tanh_halves(u):
    """(1 + tanh z) / 2 and its complement, each accurate where it is small."""
    z = 0.7978845608028654 * (u + 0.044715 * u * u * u)
    e = tl.exp(-2.0 * tl.abs(z))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(z < 0, small, large), tl.where(z < 0, large, small)


@triton.jit
def gelu(u, ERF: tl.constexpr):
    if ERF:
        return 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))
    s, _ = _tanh_halves(u)
    return u * s


@triton.jit
def gelu_grad(u, ERF: tl.constexpr):
    if ERF:
        cdf = 0.5 * (1.0 + tl.erf(u * 0.7071067811865476))
        return cdf + u * 0.3989422804014327 * tl.exp(-0.5 * u * u)
    s, complement = _tanh_halves(u)
    dz = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * u * u)
    return s + u * 2.0 * s * complement * dz


@triton.jit
def _preactivation(x_ptr, bias_ptr, offset, column, inside, HAS_BIAS: tl.constexpr):
    u = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
        u += bias.to(tl.float32)
    return u


@triton.jit
def _bias_gelu_fwd_kernel(
    x_ptr,  # (R, F)
    bias_ptr,  # (F,), unread without HAS_BIAS
    y_ptr,  # (R, F)
    num_cols,
    ERF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLS: tl.constexpr,
):
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < num_cols
    offset = tl.program_id(0).to(tl.int64) * num_cols + column
    u = _preactivation(x_ptr, bias_ptr, offset, column, inside, HAS_BIAS)
    tl.store(y_ptr + offset, gelu(u, ERF).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bias_gelu_bwd_kernel(
    dy_ptr,  # (R, F)
    x_ptr,  # (R, F)
    bias_ptr,  # (F,), unread without HAS_BIAS
    dx_ptr,  # (R, F)
    partial_ptr,  # fp32 (ceil(R / part_rows), F), unwritten without HAS_BIAS
    num_rows,
    num_cols,
    part_rows,
    ERF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < num_cols
    total = tl.zeros([COLS], tl.float32)
    for row in range(part * part_rows, tl.minimum(part * part_rows + part_rows, num_rows)):
        offset = tl.cast(row, tl.int64) * num_cols + column
        u = _preactivation(x_ptr, bias_ptr, offset, column, inside, HAS_BIAS)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        gradient = dy * gelu_grad(u, ERF)
        tl.store(dx_ptr + offset, gradient.to(dx_ptr.dtype.element_ty), mask=inside)
        total += gradient
    if HAS_BIAS:
        tl.store(partial_ptr + part * num_cols + column, total, mask=inside)


def bias_gelu_fwd(x: torch.Tensor, bias: torch.Tensor | None, approximate: str) -> torch.Tensor:
    """Launches the forward; arguments and result as `bias_gelu_fwd_reference`."""
    rows = x.contiguous().view(-1, x.shape[-1]) if x.numel() else x
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    num_rows, num_cols = rows.shape
    cols = block_of(num_cols, 1024)
    with on_device(x):
        _bias_gelu_fwd_kernel[(num_rows, triton.cdiv(num_cols, cols))](
            rows,
            x if bias is None else bias.contiguous(),
            y,
            num_cols,
            ERF=approximate == "none",
            HAS_BIAS=bias is not None,
            COLS=cols,
            num_warps=4,
        )
    return y


def bias_gelu_bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the backward; arguments and results as `bias_gelu_bwd_reference`."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias).contiguous()
    if x.numel() == 0:
        return dx, dbias.zero_()
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    cols = block_of(num_cols, 512)
    part_rows = rows_per_part(num_rows, 16)
    parts = triton.cdiv(num_rows, part_rows)
    partial = x.new_empty((1, parts if bias is not None else 0, num_cols), dtype=torch.float32)
    with on_device(x):
        _bias_gelu_bwd_kernel[(parts, triton.cdiv(num_cols, cols))](
            dy.contiguous(),
            x.contiguous(),
            x if bias is None else bias.contiguous(),
            dx,
            partial,
            num_rows,
            num_cols,
            part_rows,
            ERF=approximate == "none",
            HAS_BIAS=bias is not None,
            COLS=cols,
            num_warps=4,
        )
    if bias is not None:
        sum_parts(partial, [dbias])
    return dx, dbias
