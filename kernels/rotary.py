"""Rotary position embedding in Triton. Letters: T rows, N heads, D head dim, P rows of the tables.

A program turns all heads of some rows' queries or keys, whose angles it keeps in registers, or
copies their values.
"""

import torch
import triton
import triton.language as tl

from .common import block_of, on_device


@triton.jit
def _rotary_kernel(
    qkv_ptr,  # (T, 3, N, D)
    cos_ptr,  # fp32 (P, D / 2)
    sin_ptr,  # fp32 (P, D / 2)
    index_ptr,  # int64 (T,)
    out_ptr,  # (T, 3, N, D)
    num_rows,
    num_heads,
    num_angles,  # P
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    inside = (row < num_rows)[:, None] & (column < HALF)[None, :]
    index = tl.load(index_ptr + row, mask=row < num_rows, other=-1)
    known = ((index >= 0) & (index < num_angles))[:, None] & (column < HALF)[None, :]
    angle = index[:, None] * HALF + column[None, :]
    cos = tl.load(cos_ptr + angle, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + angle, mask=known, other=float("nan"))
    if INVERSE:
        sin = -sin
    start = (row.to(tl.int64) * 3 + part)[:, None] * (num_heads * 2 * HALF) + column[None, :]
    for head in range(num_heads):
        at = start + head * 2 * HALF
        u = tl.load(qkv_ptr + at, mask=inside, other=0.0)
        v = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0)
        if part < 2:
            wide_u, wide_v = u.to(tl.float32), v.to(tl.float32)
            u = (wide_u * cos - wide_v * sin).to(out_ptr.dtype.element_ty)
            v = (wide_v * cos + wide_u * sin).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, u, mask=inside)
        tl.store(out_ptr + at + HALF, v, mask=inside)


def blocks(half_dim: int) -> dict[str, int]:
    """Rows and columns of a program's tile, about 1,024 elements."""
    cols = triton.next_power_of_2(half_dim)
    return {"ROWS": block_of(1024 // min(cols, 1024), 1024), "COLS": cols, "num_warps": 4}


def rotary(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    inverse: bool,
) -> torch.Tensor:
    """Launches it; arguments and result as `rotary_reference`."""
    out = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if qkv.numel() == 0:
        return out
    num_rows, half_dim = qkv.shape[0], qkv.shape[1] // (6 * num_heads)
    tile = blocks(half_dim)
    with on_device(qkv):
        _rotary_kernel[(triton.cdiv(num_rows, tile["ROWS"]), 3)](
            qkv.contiguous(),
            cos.float().contiguous(),
            sin.float().contiguous(),
            index.contiguous(),
            out,
            num_rows,
            num_heads,
            cos.shape[0],
            INVERSE=inverse,
            HALF=half_dim,
            **tile,
        )
    return out
