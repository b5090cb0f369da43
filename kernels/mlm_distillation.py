"""The losses of a masked-LM student in Triton: what follows both decoders' matmuls.

Letters: P rows, C features of the student, D of the teacher, V vocabulary.

Logits of both exist for some rows at a time, as those of `mlm_cross_entropy`. Forward reads a row
of each once, with running maxima and sums; backward puts the gradient in the place of the student's
logits.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .common import block_of, on_device
from .mlm_cross_entropy import decoder_gradients, logit_chunks, split_logits


@triton.jit
def _beside(peak, new_peak, factor):
    """What exponentials beside `peak` are multiplied by beside a larger one, which may be -inf."""
    return tl.exp((peak - tl.where(new_peak == float("-inf"), 0.0, new_peak)) * factor)


@triton.jit
def _mlm_distillation_fwd_kernel(
    logits_ptr,  # (rows, V)
    teacher_logits_ptr,  # (rows, V)
    labels_ptr,  # int64 (rows,)
    loss_ptr,  # fp32 (rows,)
    soft_loss_ptr,  # fp32 (rows,)
    lse_ptr,  # fp32 (rows,)
    soft_lse_ptr,  # fp32 (rows,)
    teacher_lse_ptr,  # fp32 (rows,)
    vocab_size,
    ignore_index,
    temperature,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab_size
    teacher_start = teacher_logits_ptr + row * vocab_size
    lanes = tl.arange(0, COLS)
    cold = 1.0 / temperature
    peak = tl.full([COLS], float("-inf"), tl.float32)
    teacher_peak = tl.full([COLS], float("-inf"), tl.float32)
    total = tl.zeros([COLS], tl.float32)
    soft_total = tl.zeros([COLS], tl.float32)
    teacher_total = tl.zeros([COLS], tl.float32)
    apart = tl.zeros([COLS], tl.float32)
    for first in range(0, vocab_size, COLS):
        inside = first + lanes < vocab_size
        z = tl.load(start + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher_start + first + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        new_peak, new_teacher_peak = tl.maximum(peak, z), tl.maximum(teacher_peak, t)
        total = total * _beside(peak, new_peak, 1.0) + _beside(z, new_peak, 1.0)
        soft_total = soft_total * _beside(peak, new_peak, cold) + _beside(z, new_peak, cold)
        scale = _beside(teacher_peak, new_teacher_peak, cold)
        share = _beside(t, new_teacher_peak, cold)
        teacher_total = teacher_total * scale + share
        # A word that the teacher rules out has no part, whatever the student says of it.
        apart = apart * scale + tl.where(share > 0.0, (t - z) * share, 0.0)
        peak, teacher_peak = new_peak, new_teacher_peak
    whole, teacher_whole = tl.max(peak, 0), tl.max(teacher_peak, 0)
    all_soft = tl.sum(soft_total * _beside(peak, whole, cold), 0)
    scale = _beside(teacher_peak, teacher_whole, cold)
    all_teacher = tl.sum(teacher_total * scale, 0)
    lse = whole + tl.log(tl.sum(total * _beside(peak, whole, 1.0), 0))
    label = tl.load(labels_ptr + row)
    counted = label != ignore_index
    target = tl.load(start + tl.where(counted, label, 0)).to(tl.float32)
    difference = tl.sum(apart * scale, 0) / all_teacher - (teacher_whole - whole)
    # One logarithm in place of the two lse: where these are alike their rounding would be left.
    soft = temperature * (difference + temperature * tl.log(all_soft / all_teacher))
    tl.store(loss_ptr + row, tl.where(counted, lse - target, 0.0))
    tl.store(soft_loss_ptr + row, tl.where(counted, soft, 0.0))
    tl.store(lse_ptr + row, lse)
    tl.store(soft_lse_ptr + row, whole * cold + tl.log(all_soft))
    tl.store(teacher_lse_ptr + row, teacher_whole * cold + tl.log(all_teacher))


@triton.jit
def _mlm_distillation_bwd_kernel(
    logits_ptr,  # (rows, V): replaced by their gradients
    teacher_logits_ptr,  # (rows, V)
    labels_ptr,  # int64 (rows,)
    lse_ptr,  # fp32 (rows,)
    soft_lse_ptr,  # fp32 (rows,)
    teacher_lse_ptr,  # fp32 (rows,)
    dloss_ptr,  # fp32 (rows,)
    dsoft_loss_ptr,  # fp32 (rows,)
    partial_ptr,  # fp32 (parts, V), unwritten without HAS_BIAS
    num_rows,
    vocab_size,
    part_rows,
    ignore_index,
    temperature,
    HAS_BIAS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = column < vocab_size
    cold = 1.0 / temperature
    sums = tl.zeros([COLS], tl.float32)
    for row in range(part * part_rows, tl.minimum((part + 1) * part_rows, num_rows)):
        label = tl.load(labels_ptr + row)
        counted = label != ignore_index
        dloss = tl.where(counted, tl.load(dloss_ptr + row), 0.0)
        factor = tl.where(counted, tl.load(dsoft_loss_ptr + row), 0.0) * temperature
        place = tl.cast(row, tl.int64) * vocab_size + column
        z = tl.load(logits_ptr + place, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(teacher_logits_ptr + place, mask=inside, other=0.0).to(tl.float32)
        q = tl.exp(z * cold - tl.load(soft_lse_ptr + row))
        p = tl.exp(t * cold - tl.load(teacher_lse_ptr + row))
        gradient = dloss * tl.exp(z - tl.load(lse_ptr + row)) + factor * (q - p)
        gradient -= tl.where(column == label, dloss, 0.0)
        tl.store(logits_ptr + place, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
        sums += gradient
    if HAS_BIAS:
        tl.store(partial_ptr + part * vocab_size + column, sums, mask=inside)


def mlm_distillation_fwd(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    ignore_index: int,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the forward; arguments and results as `mlm_distillation_reference`."""
    loss, soft_loss = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(2))
    lse = loss.new_empty((3, hidden.shape[0]))
    labels = labels.contiguous()
    student = logit_chunks(hidden, weight, bias)
    teacher = logit_chunks(teacher_hidden, teacher_weight, teacher_bias)
    for (rows, logits), (_, teacher_logits) in zip(student, teacher, strict=True):
        with on_device(hidden):
            _mlm_distillation_fwd_kernel[(logits.shape[0],)](
                logits,
                teacher_logits,
                labels[rows],
                loss[rows],
                soft_loss[rows],
                *(values[rows] for values in lse),
                logits.shape[1],
                ignore_index,
                temperature,
                COLS=block_of(logits.shape[1], 1024),
                num_warps=4,
            )
    return loss, soft_loss, lse


def mlm_distillation_bwd(
    dloss: torch.Tensor,
    dsoft_loss: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    lse: torch.Tensor,
    ignore_index: int,
    temperature: float,
    need_dhidden: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the backward; arguments and results as `mlm_distillation_bwd_reference`."""
    dloss, dsoft_loss = (d.float().contiguous() for d in (dloss, dsoft_loss))
    labels = labels.contiguous()

    def gradients() -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        student = logit_chunks(hidden, weight, bias)
        teacher = logit_chunks(teacher_hidden, teacher_weight, teacher_bias)
        for (rows, logits), (_, teacher_logits) in zip(student, teacher, strict=True):
            split = split_logits(logits, bias is not None)
            with on_device(hidden):
                _mlm_distillation_bwd_kernel[split.grid](
                    logits,
                    teacher_logits,
                    labels[rows],
                    *(values[rows] for values in lse),
                    dloss[rows],
                    dsoft_loss[rows],
                    split.partial,
                    *logits.shape,
                    split.part_rows,
                    ignore_index,
                    temperature,
                    HAS_BIAS=bias is not None,
                    COLS=split.cols,
                    num_warps=4,
                )
            yield rows, logits, split.column_sums()

    return decoder_gradients(gradients(), hidden, weight, bias, need_dhidden, need_dweight)
