"""LayerNorm(residual + dropout(x + linear_bias)) and its gradients in Triton.

Letters: T rows, C features. A program holds whole rows in registers, a warp or two to each.
Gradients of the vectors are deterministic: each program sums its own rows in order, a second kernel
sums the programs; no atomics.
"""

import torch
import triton
import triton.language as tl

from .common import block_of, on_device, rows_per_part, sum_parts
from .philox import dropout_settings, keep_rows

MAX_COLUMNS = 8192
"""Widest row a program holds in registers."""


@triton.jit
def normalise(total, inside, num_cols, eps):
    """(total - mean)·rstd of whole rows `(ROWS, COLS)`, and the two statistics `(ROWS,)`."""
    mean = tl.sum(total, 1) / num_cols
    centred = tl.where(inside, total - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / num_cols + eps)
    return centred * rstd[:, None], mean, rstd


@triton.jit
def scale_and_shift(normal, weight_ptr, bias_ptr, column, HAS_BIAS: tl.constexpr, num_cols):
    """normal·weight + bias."""
    weight = tl.load(weight_ptr + column, mask=column < num_cols, other=0.0)
    y = normal * weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < num_cols, other=0.0)
        y += bias.to(tl.float32)[None, :]
    return y


@triton.jit
def saved_normal(h_ptr, mean_ptr, rstd_ptr, row, offset, inside, num_rows):
    """The normalised rows again from what forward saved, and their rstd."""
    h = tl.load(h_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + row, mask=row < num_rows, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)
    return tl.where(inside, (h - mean[:, None]) * rstd[:, None], 0.0), rstd


@triton.jit
def store_part(partial_ptr, VECTOR: tl.constexpr, sums, column, num_cols):
    """A program's sums of one vector, in fp32 (vectors, programs, C)."""
    part = (VECTOR * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    tl.store(partial_ptr + part * num_cols + column, tl.sum(sums, 0), mask=column < num_cols)


@triton.jit
def gradient_of_norm(dy, normal, rstd, weight_ptr, column, num_cols):
    """The gradient of the rows that were normalised, in fp32."""
    weight = tl.load(weight_ptr + column, mask=column < num_cols, other=0.0).to(tl.float32)
    weighted = dy * weight[None, :]
    mean = tl.sum(weighted, 1) / num_cols
    slope = tl.sum(weighted * normal, 1) / num_cols
    return rstd[:, None] * (weighted - mean[:, None] - normal * slope[:, None])


@triton.jit(do_not_specialize=["threshold", "site"])
def _add_layer_norm_fwd_kernel(
    x_ptr,  # (T, C)
    linear_bias_ptr,  # (C,), unread without HAS_LINEAR_BIAS
    residual_ptr,  # (T, C), unread without HAS_RESIDUAL
    weight_ptr,  # (C,)
    bias_ptr,  # (C,), unread without HAS_BIAS
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    y_ptr,  # (T, C)
    h_ptr,  # (T, C), unwritten without KEEP_SUM
    mean_ptr,  # fp32 (T,)
    rstd_ptr,  # fp32 (T,)
    num_rows,
    num_cols,
    eps,
    threshold,
    dropout_scale,
    site,
    HAS_LINEAR_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS).to(tl.int64) + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    offset = row[:, None] * num_cols + column[None, :]
    total = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_LINEAR_BIAS:
        linear_bias = tl.load(linear_bias_ptr + column, mask=column < num_cols, other=0.0)
        total += linear_bias.to(tl.float32)[None, :]
    if DROPOUT:
        keep = keep_rows(rng_state_ptr, row, 0, num_cols, threshold, site, ROWS, COLS)
        total = tl.where(keep, total * dropout_scale, 0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if KEEP_SUM:
        tl.store(h_ptr + offset, total.to(h_ptr.dtype.element_ty), mask=inside)
    normal, mean, rstd = normalise(total, inside, num_cols, eps)
    y = scale_and_shift(normal, weight_ptr, bias_ptr, column, HAS_BIAS, num_cols)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < num_rows)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)


@triton.jit(do_not_specialize=["threshold", "site"])
def _add_layer_norm_bwd_kernel(
    dy_ptr,  # (T, C)
    dh_ptr,  # (T, C), unread without HAS_DH
    h_ptr,  # (T, C)
    weight_ptr,  # (C,)
    mean_ptr,  # fp32 (T,)
    rstd_ptr,  # fp32 (T,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    dx_ptr,  # (T, C), unwritten without WRITE_DX
    dresidual_ptr,  # (T, C)
    partial_ptr,  # fp32 (3, parts, C): weight, bias, linear_bias
    num_rows,
    num_cols,
    part_rows,
    threshold,
    dropout_scale,
    site,
    HAS_DH: tl.constexpr,
    HAS_LINEAR_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    WRITE_DX: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLS)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    dlinear_bias = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(part * part_rows, tl.minimum((part + 1) * part_rows, num_rows), ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
        offset = row[:, None] * num_cols + column[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        normal, rstd = saved_normal(h_ptr, mean_ptr, rstd_ptr, row, offset, inside, num_rows)
        dweight += dy * normal
        dbias += dy
        dtotal = gradient_of_norm(dy, normal, rstd, weight_ptr, column, num_cols)
        if HAS_DH:
            dtotal += tl.load(dh_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual_ptr + offset, dtotal.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if DROPOUT:
            keep = keep_rows(rng_state_ptr, row, 0, num_cols, threshold, site, ROWS, COLS)
            dtotal = tl.where(keep, dtotal * dropout_scale, 0.0)
        if WRITE_DX:
            tl.store(dx_ptr + offset, dtotal.to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_LINEAR_BIAS:
            dlinear_bias += tl.where(inside, dtotal, 0.0)
    store_part(partial_ptr, 0, dweight, column, num_cols)
    store_part(partial_ptr, 1, dbias, column, num_cols)
    if HAS_LINEAR_BIAS:
        store_part(partial_ptr, 2, dlinear_bias, column, num_cols)


def row_block(num_cols: int) -> tuple[int, int, int]:
    """Rows and columns of a forward program's tile, and its warps: a warp to a row of up to 1024
    columns, more to wider ones."""
    cols = max(8, block_of(num_cols, MAX_COLUMNS))
    rows = max(1, min(4, 4096 // cols))
    return rows, cols, max(4, min(16, cols // 512))


def gradient_block(num_cols: int) -> tuple[int, int, int]:
    """The same of a backward program, whose sums take three more tiles of registers."""
    cols = max(8, block_of(num_cols, MAX_COLUMNS))
    rows = max(1, min(4, 2048 // cols))
    return rows, cols, max(4, min(16, cols // 256))


def add_layer_norm_fwd(
    x: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
    out_dtype: torch.dtype,
    keep_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the forward; arguments and results as the op `add_layer_norm_fwd`."""
    num_rows, num_cols = x.shape
    threshold, scale = dropout_settings(dropout_p)
    keep_sum = keep_sum and not (linear_bias is None and residual is None and threshold == 0)
    sum_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = x.new_empty(x.shape, dtype=out_dtype)
    h = x.new_empty(x.shape if keep_sum else 0, dtype=sum_dtype if keep_sum else x.dtype)
    mean, rstd = (x.new_empty((num_rows, 1), dtype=torch.float32) for _ in range(2))
    rows, cols, warps = row_block(num_cols)
    if num_rows == 0:
        return y, h, mean, rstd
    with on_device(x):
        _add_layer_norm_fwd_kernel[(triton.cdiv(num_rows, rows),)](
            x.contiguous(),
            x if linear_bias is None else linear_bias.contiguous(),
            x if residual is None else residual.contiguous(),
            weight.contiguous(),
            x if bias is None else bias.contiguous(),
            mean if rng_state is None else rng_state,
            y,
            h if keep_sum else y,
            mean,
            rstd,
            num_rows,
            num_cols,
            eps,
            threshold,
            scale,
            site,
            HAS_LINEAR_BIAS=linear_bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            DROPOUT=threshold > 0,
            KEEP_SUM=keep_sum,
            ROWS=rows,
            COLS=cols,
            num_warps=warps,
        )
    return y, h, mean, rstd


def add_layer_norm_bwd(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    linear_bias: torch.Tensor | None,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
    x_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the backward; arguments and results as the op `add_layer_norm_bwd`."""
    num_rows, num_cols = h.shape
    threshold, scale = dropout_settings(dropout_p)
    write_dx = threshold > 0 or x_dtype != h.dtype
    dx = h.new_empty(h.shape if write_dx else 0, dtype=x_dtype if write_dx else h.dtype)
    dresidual = torch.empty_like(h, memory_format=torch.contiguous_format)
    vectors = [torch.empty_like(weight), torch.empty_like(weight if bias is None else bias)]
    if linear_bias is not None:
        vectors.append(torch.empty_like(linear_bias))
    rows, cols, warps = gradient_block(num_cols)
    part_rows = rows_per_part(num_rows, rows)
    parts = triton.cdiv(num_rows, part_rows)
    partial = h.new_empty((len(vectors), parts, num_cols), dtype=torch.float32)
    if num_rows > 0:
        with on_device(h):
            _add_layer_norm_bwd_kernel[(parts,)](
                dy.contiguous(),
                dy if dh is None else dh.contiguous(),
                h.contiguous(),
                weight.contiguous(),
                mean,
                rstd,
                mean if rng_state is None else rng_state,
                dx if write_dx else dresidual,
                dresidual,
                partial,
                num_rows,
                num_cols,
                part_rows,
                threshold,
                scale,
                site,
                HAS_DH=dh is not None,
                HAS_LINEAR_BIAS=linear_bias is not None,
                DROPOUT=threshold > 0,
                WRITE_DX=write_dx,
                ROWS=rows,
                COLS=cols,
                num_warps=warps,
            )
    sum_parts(partial, vectors)
    empty = h.new_empty(0)
    return (
        dx,
        dresidual,
        vectors[0],
        empty if bias is None else vectors[1],
        empty.clone() if linear_bias is None else vectors[2],
    )
