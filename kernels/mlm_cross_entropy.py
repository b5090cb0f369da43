"""The masked-LM loss in Triton: what follows the decoder's matmul, forward and backward.

Letters: P rows, C features, V vocabulary.

Logits exist for some rows at a time, in a buffer used again; cuBLAS fills it. Forward reads a row
once, with a running maximum and sum (Milakov and Gimelshein 2018, "Online normalizer calculation
for softmax", algorithm 3); backward puts the gradient in the logits' place. Chunks are of rows, not
of the vocabulary, so that each row's gradient is one product, rounded once.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .common import block_of, on_device, rows_per_part, sum_parts

MAX_LOGITS = 1 << 26


@triton.jit
def _mlm_cross_entropy_fwd_kernel(
    logits_ptr,  # (rows, V)
    labels_ptr,  # int64 (rows,)
    loss_ptr,  # fp32 (rows,)
    lse_ptr,  # fp32 (rows,)
    vocab_size,
    ignore_index,
    label_smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab_size
    lanes = tl.arange(0, COLS)
    peak = tl.full([COLS], float("-inf"), tl.float32)
    total = tl.zeros([COLS], tl.float32)
    every = tl.zeros([COLS], tl.float32)
    for first in range(0, vocab_size, COLS):
        inside = first + lanes < vocab_size
        z = tl.load(start + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, z)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.exp(z - base)
        peak = new_peak
        if SMOOTH:
            every += tl.where(inside, z, 0.0)
    whole = tl.max(peak, 0)
    lse = whole + tl.log(tl.sum(total * tl.exp(peak - whole), 0))
    label = tl.load(labels_ptr + row)
    counted = label != ignore_index
    target = tl.load(start + tl.where(counted, label, 0)).to(tl.float32)
    loss = lse - target
    if SMOOTH:
        mean = tl.sum(every, 0) / vocab_size
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - mean)
    loss += z_loss * lse * lse
    tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _mlm_cross_entropy_bwd_kernel(
    logits_ptr,  # (rows, V): replaced by their gradients
    labels_ptr,  # int64 (rows,)
    lse_ptr,  # fp32 (rows,)
    dloss_ptr,  # fp32 (rows,)
    partial_ptr,  # fp32 (parts, V), unwritten without HAS_BIAS
    num_rows,
    vocab_size,
    part_rows,
    ignore_index,
    label_smoothing,
    z_loss,
    HAS_BIAS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < vocab_size
    sums = tl.zeros([COLS], tl.float32)
    for row in range(part * part_rows, tl.minimum((part + 1) * part_rows, num_rows)):
        label = tl.load(labels_ptr + row)
        lse = tl.load(lse_ptr + row)
        dloss = tl.where(label == ignore_index, 0.0, tl.load(dloss_ptr + row))
        at = logits_ptr + tl.cast(row, tl.int64) * vocab_size + column
        z = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        gradient = dloss * (1.0 + 2.0 * z_loss * lse) * tl.exp(z - lse)
        gradient -= dloss * label_smoothing / vocab_size
        gradient -= tl.where(column == label, dloss * (1.0 - label_smoothing), 0.0)
        tl.store(at, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
        sums += gradient
    if HAS_BIAS:
        tl.store(partial_ptr + part * vocab_size + column, sums, mask=inside)


def logit_chunks(hidden, weight, bias) -> Iterator[tuple[slice, torch.Tensor]]:
    """Row slices and their logits, in a buffer the next chunk overwrites."""
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    num_rows, vocab_size = hidden.shape[0], weight.shape[0]
    chunks = max(1, triton.cdiv(num_rows * vocab_size, MAX_LOGITS))
    size = triton.cdiv(num_rows, chunks)
    buffer = hidden.new_empty((size, vocab_size))
    for start in range(0, num_rows, max(1, size)):
        rows = slice(start, min(start + size, num_rows))
        logits = buffer[: rows.stop - rows.start]
        if bias is None:
            torch.mm(hidden[rows], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[rows], weight.t(), out=logits)
        yield rows, logits


def mlm_cross_entropy_fwd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the forward; arguments and results as `mlm_cross_entropy_reference`."""
    loss, lse = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    labels = labels.contiguous()
    for rows, logits in logit_chunks(hidden, weight, bias):
        with on_device(hidden):
            _mlm_cross_entropy_fwd_kernel[(logits.shape[0],)](
                logits,
                labels[rows],
                loss[rows],
                lse[rows],
                logits.shape[1],
                ignore_index,
                label_smoothing,
                z_loss,
                SMOOTH=label_smoothing > 0,
                COLS=block_of(logits.shape[1], 2048),
                num_warps=4,
            )
    return loss, lse


def mlm_cross_entropy_bwd(
    dloss: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    need_dhidden: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the backward; arguments and results as `mlm_cross_entropy_bwd_reference`."""
    dloss, labels = dloss.float().contiguous(), labels.contiguous()

    def gradients() -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        for rows, logits in logit_chunks(hidden, weight, bias):
            split = split_logits(logits, bias is not None)
            with on_device(hidden):
                _mlm_cross_entropy_bwd_kernel[split.grid](
                    logits,
                    labels[rows],
                    lse[rows],
                    dloss[rows],
                    split.partial,
                    *logits.shape,
                    split.part_rows,
                    ignore_index,
                    label_smoothing,
                    z_loss,
                    HAS_BIAS=bias is not None,
                    COLS=split.cols,
                    num_warps=4,
                )
            yield rows, logits, split.column_sums()

    return decoder_gradients(gradients(), hidden, weight, bias, need_dhidden, need_dweight)


class SplitLogits(NamedTuple):
    """A grid over logits `(rows, V)`: parts of rows by blocks of columns.

    Attributes:
        grid: of the launch. part_rows: rows of a part. cols: columns of a block.
        partial: fp32 `(1, parts, V)`, a part's sum of each column; no parts without a bias.
    """

    grid: tuple[int, int]
    part_rows: int
    cols: int
    partial: torch.Tensor

    def column_sums(self) -> torch.Tensor:
        """`(V,)` fp32, `(0,)` without a bias."""
        _, parts, vocab_size = self.partial.shape
        sums = self.partial.new_empty(vocab_size if parts else 0)
        if parts:
            sum_parts(self.partial, [sums])
        return sums


def split_logits(logits: torch.Tensor, has_bias: bool) -> SplitLogits:
    """The grid of a backward kernel."""
    num_rows, vocab_size = logits.shape
    cols = block_of(vocab_size, 1024)
    part_rows = rows_per_part(num_rows, 16)
    parts = triton.cdiv(num_rows, part_rows)
    size = (1, parts if has_bias else 0, vocab_size)
    partial = logits.new_empty(size, dtype=torch.float32)
    return SplitLogits((parts, triton.cdiv(vocab_size, cols)), part_rows, cols, partial)


def decoder_gradients(
    gradients: Iterable[tuple[slice, torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    need_dhidden: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What gradients of logits come to behind the decoder.

    Args:
        gradients: row slices, gradients `(rows, V)` and their column sums where there is a bias.

    Returns:
        dhidden, dweight and dbias as `mlm_cross_entropy_bwd_reference`.
    """
    dhidden = hidden.new_empty(hidden.shape if need_dhidden else 0)
    dweight = dbias = None
    for rows, gradient, sums in gradients:
        if bias is not None:
            dbias = sums if dbias is None else dbias.add_(sums)
        if need_dhidden:
            torch.mm(gradient, weight.to(hidden.dtype), out=dhidden[rows])
        if need_dweight:
            product = gradient.t() @ hidden[rows]
            dweight = product if dweight is None else dweight.float().add_(product)
    if dweight is None:
        dweight = weight.new_zeros(weight.shape if need_dweight else 0)
    if dbias is None:
        dbias = hidden.new_empty(0) if bias is None else torch.zeros_like(bias)
    return dhidden, dweight.to(weight.dtype), dbias if bias is None else dbias.to(bias.dtype)
