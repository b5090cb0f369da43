"""What the launchers share: block sizes, the device of a launch, sums of partial results."""

import contextlib

import torch
import triton
import triton.language as tl

from . import cache


def block_of(size: int, largest: int) -> int:
    """The smallest power of two that holds `size`, at most `largest`."""
    return min(largest, triton.next_power_of_2(max(1, size)))


def on_device(tensor: torch.Tensor):
    """A context in which kernels are launched on `tensor`'s device and compiled into a cache that
    can be written.

    Triton launches on the current device; on another one of a machine with several it would read
    memory that is not there (NVIDIA/apex#770). The stream is that device's current one.
    """
    if tensor.device.type != "cuda":
        return contextlib.nullcontext()
    cache.ensure_writable()
    return torch.cuda.device(tensor.device)


# --- gradients of vectors: every program sums some rows, then the programs' sums are added ---

MOST_PARTS = 256


def rows_per_part(num_rows: int, step: int) -> int:
    """Rows one program sums, a multiple of `step`: about `MOST_PARTS` programs fill a GPU, and the
    number depends on nothing but the rows, so that sums are the same in every run."""
    return step * triton.cdiv(max(1, num_rows), step * MOST_PARTS)


@triton.jit
def _sum_parts_kernel(
    partial_ptr,  # fp32 (VECTORS, parts, F)
    first_ptr,  # (F,)
    second_ptr,  # (F,), unwritten with one vector
    third_ptr,  # (F,), unwritten with two
    parts,
    num_cols,
    VECTORS: tl.constexpr,
    PARTS: tl.constexpr,
    COLS: tl.constexpr,
):
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = column < num_cols
    for vector in tl.static_range(VECTORS):
        sums = tl.zeros([PARTS, COLS], tl.float32)
        for first in range(0, parts, PARTS):
            part = first + tl.arange(0, PARTS)
            row = (vector * parts + part).to(tl.int64)
            here = (part < parts)[:, None] & inside[None, :]
            at = partial_ptr + row[:, None] * num_cols + column[None, :]
            sums += tl.load(at, mask=here, other=0.0)
        total = tl.sum(sums, 0)
        if vector == 0:
            tl.store(first_ptr + column, total.to(first_ptr.dtype.element_ty), mask=inside)
        elif vector == 1:
            tl.store(second_ptr + column, total.to(second_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(third_ptr + column, total.to(third_ptr.dtype.element_ty), mask=inside)


def sum_parts(partial: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    """Sums `partial`, fp32 `(vectors, parts, F)`, over the parts into that many `(F,)` outputs."""
    vectors, parts, num_cols = partial.shape
    cols = 32
    with on_device(partial):
        _sum_parts_kernel[(triton.cdiv(num_cols, cols),)](
            partial,
            *(outputs[min(i, vectors - 1)] for i in range(3)),
            parts,
            num_cols,
            VECTORS=vectors,
            PARTS=64,
            COLS=cols,
            num_warps=4,
        )
