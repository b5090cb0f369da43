"""`mlm_cross_entropy`: the decoder's matmul and the softmax loss of labelled rows in one.

Letters: P rows, C features, V vocabulary.
"""

import torch

from fastbert import dispatch
from fastbert.ops import index_flags
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.ops.linear import autocast_input
from fastbert.reference.mlm_cross_entropy import (
    mlm_cross_entropy_bwd_reference,
    mlm_cross_entropy_reference,
)
from fastbert.reference.precision import accumulation_dtype

MAX_LOGITS = 1 << 26
"""Logits the CUDA kernels keep at a time; more rows are taken in chunks."""


def _fwd_fake(hidden, *_):
    loss = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    return loss, torch.empty_like(loss)


def bwd_fake(dloss, hidden, weight, bias, *others):
    """The gradients of any op behind the decoder whose last arguments say which are wanted."""
    *_, need_dhidden, need_dweight = others
    return (
        hidden.new_empty(hidden.shape if need_dhidden else 0),
        weight.new_empty(weight.shape if need_dweight else 0),
        hidden.new_empty(0) if bias is None else torch.empty_like(bias),
    )


def within_vocabulary(labels, vocab_size, ignore_index):
    """The labels as kernels may use them: checked already on a CPU, clamped elsewhere."""
    if not index_flags.must_not_wait(labels):
        return labels
    ignored = labels == ignore_index
    return index_flags.clamped(labels.masked_fill(ignored, 0), vocab_size).masked_fill(
        ignored, ignore_index
    )


def _fwd_checked(
    hidden,
    weight,
    bias,
    labels,
    ignore_index,
    *options,
    implementation=mlm_cross_entropy_reference,
):
    labels = within_vocabulary(labels, weight.shape[0], ignore_index)
    return implementation(hidden, weight, bias, labels, ignore_index, *options)


def _bwd_checked(
    dloss,
    hidden,
    weight,
    bias,
    labels,
    lse,
    ignore_index,
    *options,
    implementation=mlm_cross_entropy_bwd_reference,
):
    labels = within_vocabulary(labels, weight.shape[0], ignore_index)
    return implementation(dloss, hidden, weight, bias, labels, lse, ignore_index, *options)


def _fwd_triton(*args):
    from fastbert.kernels.mlm_cross_entropy import mlm_cross_entropy_fwd

    return _fwd_checked(*args, implementation=mlm_cross_entropy_fwd)


def _bwd_triton(*args):
    from fastbert.kernels.mlm_cross_entropy import mlm_cross_entropy_bwd

    return _bwd_checked(*args, implementation=mlm_cross_entropy_bwd)


def fwd_cuda_extra(hidden, *_) -> tuple:
    """What the CUDA kernels behind the decoder take besides: `Tensor? flag, int max_logits`."""
    return index_flags.flag_for(hidden), MAX_LOGITS


def bwd_cuda_extra(*_) -> tuple:
    """The same of their backward: `int max_logits`."""
    return (MAX_LOGITS,)


def _fwd_kernel_reasons(hidden, weight, *_) -> list[str]:
    return dtype_reasons(hidden=hidden, weight=weight)


def _bwd_kernel_reasons(dloss, hidden, weight, *_) -> list[str]:
    return dtype_reasons(hidden=hidden, weight=weight)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss"
mlm_cross_entropy_fwd = dispatch.register_op(
    "mlm_cross_entropy_fwd",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {_OPTIONS}) "
    "-> (Tensor loss, Tensor lse)",
    room="mlm_cross_entropy",
    fake=_fwd_fake,
    reference=_fwd_checked,
    triton="fastbert.ops.mlm_cross_entropy:_fwd_triton",
    cpu=True,
    cuda=True,
    cuda_extra=("Tensor? flag, int max_logits", fwd_cuda_extra),
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _fwd_kernel_reasons),
)
mlm_cross_entropy_bwd = dispatch.register_op(
    "mlm_cross_entropy_bwd",
    "(Tensor dloss, Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, "
    f"{_OPTIONS}, bool need_dhidden, bool need_dweight) "
    "-> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    room="mlm_cross_entropy",
    fake=bwd_fake,
    reference=_bwd_checked,
    triton="fastbert.ops.mlm_cross_entropy:_bwd_triton",
    cpu=True,
    cuda=True,
    cuda_extra=("int max_logits", bwd_cuda_extra),
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _bwd_kernel_reasons),
)


class _MlmCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, options):
        loss, lse = mlm_cross_entropy_fwd(hidden, weight, bias, labels, *options)
        ctx.save_for_backward(hidden, weight, bias, labels, lse)
        ctx.options = options
        ctx.binding = dispatch.current_binding()
        return loss

    @staticmethod
    def backward(ctx, dloss):
        dispatch.refuse_second_order("mlm_cross_entropy")
        need_dhidden, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        with dispatch.bound(ctx.binding):
            dhidden, dweight, dbias = mlm_cross_entropy_bwd(
                dloss, *ctx.saved_tensors, *ctx.options, need_dhidden, need_dweight
            )
        return (
            dhidden if need_dhidden else None,
            dweight if need_dweight else None,
            dbias if need_dbias else None,
            None,
            None,
        )


def mlm_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy of softmax(hidden Wᵀ + bias) per row, without keeping the logits.

    Devlin et al. 2019, section 3.1 (masked LM); label smoothing of Szegedy et al. 2016, section 7;
    z-loss of Chowdhery et al. 2022, section 5. Logits are computed in the dtype of hidden (under
    autocast in autocast's), the softmax and the loss in fp32. P + P·C elements are saved.

    Args:
        hidden: `(P, C)`, fp32/bf16/fp16.
        weight: `(V, C)`. bias: `(V,)` or None.
        labels: `(P,)` int64 in [0, V), or ignore_index.
        ignore_index: label of rows that do not count.
        label_smoothing: in [0, 1).
        z_loss: factor of the squared log-partition, 0 for none.

    Returns:
        `(P,)` fp32, 0 at ignored rows; sum and divide by the count that is meant.

    Raises:
        ValueError: shapes that do not fit, on a CPU a label outside the vocabulary (elsewhere see
            fastbert.ops.index_flags), label_smoothing outside [0, 1).
        RuntimeError: in backward with create_graph=True.
    """
    check_rows("mlm_cross_entropy", hidden, weight, bias, labels, ignore_index)
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(
            f"mlm_cross_entropy: label_smoothing must be in [0, 1), got {label_smoothing}"
        )
    hidden = autocast_input(hidden)
    options = (ignore_index, label_smoothing, z_loss)
    if dispatch.needs_grad(hidden, weight, bias):
        return _MlmCrossEntropy.apply(hidden, weight, bias, labels, options)
    return mlm_cross_entropy_fwd(hidden, weight, bias, labels, *options)[0]


def check_rows(op: str, hidden, weight, bias, labels, ignore_index: int) -> None:
    """What an op that scores labelled rows demands of them.

    Raises:
        ValueError: shapes that do not fit, on a CPU a label outside the vocabulary.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: hidden must be (P, C) and weight (V, C), got "
            f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
    if labels.dtype != torch.int64 or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"{op}: labels must be int64 of shape ({hidden.shape[0]},), got "
            f"{labels.dtype} of shape {tuple(labels.shape)}"
        )
    if dispatch.is_checkable(labels):
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= weight.shape[0]))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"{op}: label {int(labels[row])} at row {row} is outside the "
                f"vocabulary of {weight.shape[0]}; use {ignore_index} for rows without a label"
            )
