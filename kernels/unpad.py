"""Rows gathered by index and put back, in Triton. Letters: R rows of the padded tensor, T rows."""

import torch
import triton
import triton.language as tl

from .common import block_of, on_device

WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


@triton.jit
def _move_rows_kernel(
    x_ptr,  # (R, F), or (T, F) with SCATTER
    indices_ptr,  # int64 (T,), rows of the longer tensor
    y_ptr,  # (T, F), or zeros (R, F) with SCATTER
    num_cols,
    SCATTER: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < num_cols
    index = tl.load(indices_ptr + row)
    source, target = (row, index) if SCATTER else (index, row)
    values = tl.load(x_ptr + source * num_cols + column, mask=inside, other=0)
    tl.store(y_ptr + target * num_cols + column, values, mask=inside)


def _as_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Contiguous rows as integers of up to eight bytes: what they mean does not matter here."""
    flat = [t.contiguous().view(torch.uint8).view(t.shape[0], -1) for t in tensors]
    size, word = next((s, w) for s, w in WORDS if flat[0].shape[1] % s == 0)
    aligned = all(t.data_ptr() % size == 0 for t in flat)
    return [t.view(word) for t in flat] if aligned else flat


def _move(source, indices, target, scatter: bool) -> None:
    source, target = _as_words(source, target)
    cols = block_of(source.shape[1], 1024)
    with on_device(source):
        _move_rows_kernel[(indices.shape[0], triton.cdiv(source.shape[1], cols))](
            source,
            indices.contiguous(),
            target,
            source.shape[1],
            SCATTER=scatter,
            COLS=cols,
            num_warps=4,
        )


def unpad(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Launches the gather; arguments and result as `unpad_reference`."""
    y = x.new_empty((indices.shape[0], *x.shape[1:]))
    if y.numel() > 0:
        _move(x, indices, y, scatter=False)
    return y


def pad(x: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Launches the scatter; arguments and result as `pad_reference`."""
    y = x.new_zeros((num_rows, *x.shape[1:]))
    if x.numel() > 0:
        _move(x, indices, y, scatter=True)
    return y
