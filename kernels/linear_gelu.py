"""GELU(x Wᵀ + b), and the gradient that passes back through it, as matmuls with epilogues.

Letters: T rows, C inputs, F intermediate.

Programs stay and take tile after tile, groups of rows first, so that a weight's tiles are read
while they are in the L2 cache. On sm_90 and later operands are loaded through tensor descriptors
(TMA). The op calls a fused form where `tuned` says that it beats cuBLAS with `bias_gelu` behind it.
"""

import functools

import torch
import triton
import triton.language as tl

from .bias_gelu import gelu, gelu_grad
from .common import on_device, sum_parts


@triton.jit
def tile_at(number, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row and column of a tile, GROUP rows of tiles at a time."""
    in_group = GROUP * column_tiles
    first = number // in_group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + number % in_group % height, number % in_group // height


@triton.jit
def operand_tile(
    ptr, first_row, first_column, num_rows, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """A tile of a row-major matrix, zeros beyond it."""
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLS)
    inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    at = ptr + row.to(tl.int64)[:, None] * num_cols + column[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _linear_gelu_fwd_kernel(
    x_ptr,  # (T, C)
    weight_ptr,  # (F, C)
    bias_ptr,  # (F,), unread without HAS_BIAS
    y_ptr,  # (T, F)
    preact_ptr,  # (T, F), unwritten without KEEP_PREACT
    num_rows,
    num_cols,
    depth,
    ERF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP_PREACT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_cols, COLS)
    if DESCRIPTORS:
        x_tiles = tl.make_tensor_descriptor(x_ptr, [num_rows, depth], [depth, 1], [ROWS, DEPTH])
        weight_tiles = tl.make_tensor_descriptor(
            weight_ptr, [num_cols, depth], [depth, 1], [COLS, DEPTH]
        )
    for number in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(number, row_tiles, column_tiles, GROUP)
        first_row, first_column = row_tile * ROWS, column_tile * COLS
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for k in range(0, depth, DEPTH):
            if DESCRIPTORS:
                x = x_tiles.load([first_row, k])
                weight = weight_tiles.load([first_column, k])
            else:
                x = operand_tile(x_ptr, first_row, k, num_rows, depth, ROWS, DEPTH)
                weight = operand_tile(weight_ptr, first_column, k, num_cols, depth, COLS, DEPTH)
            sums = tl.dot(x, tl.trans(weight), sums, input_precision=PRECISION)
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        column = first_column + tl.arange(0, COLS)
        inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column, mask=column < num_cols, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        # Backward has the pre-activation in the dtype's precision, so forward has it too.
        preact = sums.to(y_ptr.dtype.element_ty)
        offset = row[:, None] * num_cols + column[None, :]
        if KEEP_PREACT:
            tl.store(preact_ptr + offset, preact, mask=inside)
        y = gelu(preact.to(tl.float32), ERF)
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_matmul_bwd_kernel(
    dout_ptr,  # (T, C)
    weight_ptr,  # (C, F)
    preact_ptr,  # (T, F)
    dpreact_ptr,  # (T, F)
    partial_ptr,  # fp32 (ceil(T / ROWS), F), unwritten without HAS_BIAS
    num_rows,
    num_cols,
    depth,
    ERF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_cols, COLS)
    if DESCRIPTORS:
        dout_tiles = tl.make_tensor_descriptor(
            dout_ptr, [num_rows, depth], [depth, 1], [ROWS, DEPTH]
        )
        weight_tiles = tl.make_tensor_descriptor(
            weight_ptr, [depth, num_cols], [num_cols, 1], [DEPTH, COLS]
        )
    for number in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = tile_at(number, row_tiles, column_tiles, GROUP)
        first_row, first_column = row_tile * ROWS, column_tile * COLS
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for k in range(0, depth, DEPTH):
            if DESCRIPTORS:
                dout = dout_tiles.load([first_row, k])
                weight = weight_tiles.load([k, first_column])
            else:
                dout = operand_tile(dout_ptr, first_row, k, num_rows, depth, ROWS, DEPTH)
                weight = operand_tile(weight_ptr, k, first_column, depth, num_cols, DEPTH, COLS)
            sums = tl.dot(dout, weight, sums, input_precision=PRECISION)
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        column = first_column + tl.arange(0, COLS)
        inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
        offset = row[:, None] * num_cols + column[None, :]
        preact = tl.load(preact_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dpreact = sums * gelu_grad(preact, ERF)
        tl.store(dpreact_ptr + offset, dpreact.to(dpreact_ptr.dtype.element_ty), mask=inside)
        if HAS_BIAS:
            at = partial_ptr + row_tile.to(tl.int64) * num_cols + column
            tl.store(at, tl.sum(tl.where(inside, dpreact, 0.0), 0), mask=column < num_cols)


def tiles(dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes, warps and stages; fp32 products run on ordinary cores, in smaller tiles."""
    if dtype == torch.float32:
        sizes = {"ROWS": 64, "COLS": 64, "DEPTH": 16, "num_warps": 8, "num_stages": 2}
    else:
        sizes = {"ROWS": 128, "COLS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}
    return {**sizes, "GROUP": 8}


@functools.cache
def _programs(device: torch.device) -> int:
    """As many as run at once: one to a multiprocessor; a few in the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(kernel, operands, others, shape, dtype, **constants) -> None:
    """Runs a matmul kernel over `shape` (rows, columns, depth)."""
    left = operands[0]
    num_rows, num_cols, _ = shape
    sizes = tiles(dtype)
    count = triton.cdiv(num_rows, sizes["ROWS"]) * triton.cdiv(num_cols, sizes["COLS"])
    descriptors = _take_descriptors(left.device) and all(
        t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in operands
    )
    with on_device(left):
        if descriptors:
            # Triton keeps it for one context, and autograd runs backward in threads of its own.
            triton.set_allocator(_workspace)
        kernel[(min(count, _programs(left.device)),)](
            *operands,
            *others,
            *shape,
            DESCRIPTORS=descriptors,
            PRECISION="ieee",
            **constants,
            **sizes,
        )


@functools.cache
def _take_descriptors(device: torch.device) -> bool:
    """Whether the device loads tiles by descriptors; the interpreter does."""
    if device.type != "cuda":
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9


def _workspace(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory on the device of the launch, where Triton keeps descriptors."""
    return torch.empty(size, device="cuda", dtype=torch.int8)


def fused_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    approximate: str,
    keep_preact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the forward; the weight in the dtype of x, results as the op `linear_gelu_fwd`."""
    (num_rows, depth), num_cols = x.shape, weight.shape[0]
    y = x.new_empty((num_rows, num_cols))
    preact = torch.empty_like(y) if keep_preact else x.new_empty(0)
    _launch(
        _linear_gelu_fwd_kernel,
        (x.contiguous(), weight.contiguous()),
        (x if bias is None else bias.contiguous(), y, preact if keep_preact else y),
        (num_rows, num_cols, depth),
        x.dtype,
        ERF=approximate == "none",
        HAS_BIAS=bias is not None,
        KEEP_PREACT=keep_preact,
    )
    return y, preact


def fused_bwd(
    dout: torch.Tensor,
    weight: torch.Tensor,
    preact: torch.Tensor,
    bias: torch.Tensor | None,
    approximate: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches (dout · weight)·gelu'(preact), and its column sums in the dtype of the bias.

    Args:
        dout: `(T, C)`. weight: `(C, F)`, in the dtype of dout. preact: `(T, F)`.
        bias: `(F,)`, or None: no sums, `(0,)`.
    """
    num_rows, num_cols = preact.shape
    dpreact = torch.empty_like(preact, memory_format=torch.contiguous_format)
    parts = triton.cdiv(num_rows, tiles(dout.dtype)["ROWS"]) if bias is not None else 0
    partial = dout.new_empty((1, parts, num_cols), dtype=torch.float32)
    _launch(
        _gelu_matmul_bwd_kernel,
        (dout.contiguous(), weight.contiguous()),
        (preact.contiguous(), dpreact, partial),
        (num_rows, num_cols, dout.shape[1]),
        dout.dtype,
        ERF=approximate == "none",
        HAS_BIAS=bias is not None,
    )
    dbias = dout.new_empty(0) if bias is None else torch.empty_like(bias)
    if bias is not None:
        sum_parts(partial, [dbias])
    return dpreact, dbias
