"""GELU(u)·v of the halves (u, v) of x + bias, and its gradients, in Triton.

Letters: T rows, F features of y. The bias gradient is summed as in bias_gelu: by parts of rows,
then part after part; no atomics.
"""

import torch
import triton
import triton.language as tl

from .bias_gelu import gelu, gelu_grad
from .common import block_of, on_device, rows_per_part, sum_parts


@triton.jit
def _halves(x_ptr, bias_ptr, row, num_cols, column, inside, HAS_BIAS: tl.constexpr):
    """u and v of some columns of a row, and where u is."""
    at = row * 2 * num_cols + column
    u = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x_ptr + at + num_cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        v += tl.load(bias_ptr + num_cols + column, mask=inside, other=0.0).to(tl.float32)
    return u, v, at


@triton.jit
def _geglu_fwd_kernel(
    x_ptr,  # (T, 2 F)
    bias_ptr,  # (2 F,), unread without HAS_BIAS
    y_ptr,  # (T, F)
    num_cols,
    ERF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < num_cols
    u, v, _ = _halves(x_ptr, bias_ptr, row, num_cols, column, inside, HAS_BIAS)
    y = (gelu(u, ERF) * v).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * num_cols + column, y, mask=inside)


@triton.jit
def _geglu_bwd_kernel(
    dy_ptr,  # (T, F)
    x_ptr,  # (T, 2 F)
    bias_ptr,  # (2 F,), unread without HAS_BIAS
    dx_ptr,  # (T, 2 F)
    partial_ptr,  # fp32 (2, parts, F), unwritten without HAS_BIAS
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
    total_u, total_v = tl.zeros([COLS], tl.float32), tl.zeros([COLS], tl.float32)
    for index in range(part * part_rows, tl.minimum(part * part_rows + part_rows, num_rows)):
        row = tl.cast(index, tl.int64)
        u, v, at = _halves(x_ptr, bias_ptr, row, num_cols, column, inside, HAS_BIAS)
        dy = tl.load(dy_ptr + row * num_cols + column, mask=inside, other=0.0).to(tl.float32)
        du, dv = dy * v * gelu_grad(u, ERF), dy * gelu(u, ERF)
        tl.store(dx_ptr + at, du.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + at + num_cols, dv.to(dx_ptr.dtype.element_ty), mask=inside)
        total_u += du
        total_v += dv
    if HAS_BIAS:
        parts = tl.num_programs(0)
        tl.store(partial_ptr + part * num_cols + column, total_u, mask=inside)
        tl.store(partial_ptr + (parts + part) * num_cols + column, total_v, mask=inside)


def geglu_fwd(x: torch.Tensor, bias: torch.Tensor | None, approximate: str) -> torch.Tensor:
    """Launches the forward; arguments and result as `geglu_fwd_reference`."""
    num_rows, num_cols = x.shape[0], x.shape[1] // 2
    y = x.new_empty((num_rows, num_cols))
    if y.numel() == 0:
        return y
    cols = block_of(num_cols, 1024)
    with on_device(x):
        _geglu_fwd_kernel[(num_rows, triton.cdiv(num_cols, cols))](
            x.contiguous(),
            x if bias is None else bias.contiguous(),
            y,
            num_cols,
            ERF=approximate == "none",
            HAS_BIAS=bias is not None,
            COLS=cols,
            num_warps=4,
        )
    return y


def geglu_bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the backward; arguments and results as `geglu_bwd_reference`."""
    num_rows, num_cols = x.shape[0], x.shape[1] // 2
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias).contiguous()
    if x.numel() == 0:
        return dx, dbias.zero_()
    cols = block_of(num_cols, 512)
    part_rows = rows_per_part(num_rows, 16)
    parts = triton.cdiv(num_rows, part_rows)
    partial = x.new_empty((2, parts if bias is not None else 0, num_cols), dtype=torch.float32)
    with on_device(x):
        _geglu_bwd_kernel[(parts, triton.cdiv(num_cols, cols))](
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
        sum_parts(partial, list(dbias.chunk(2)))
    return dx, dbias
