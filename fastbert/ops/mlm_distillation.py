"""`mlm_distillation`: both losses of a masked-LM student, of labels and of a teacher, from the same
logits, of which no whole tensor exists.

Letters: P rows, C features of the student, D of the teacher, V vocabulary.
"""

import torch

from fastbert import dispatch
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.ops.linear import autocast_input
from fastbert.ops.mlm_cross_entropy import (
    bwd_cuda_extra,
    bwd_fake,
    check_rows,
    fwd_cuda_extra,
    within_vocabulary,
)
from fastbert.reference.mlm_distillation import (
    mlm_distillation_bwd_reference,
    mlm_distillation_reference,
)
from fastbert.reference.precision import accumulation_dtype


def _fwd_fake(hidden, *_):
    lse = hidden.new_empty((3, hidden.shape[0]), dtype=accumulation_dtype(hidden.dtype))
    return lse.new_empty(hidden.shape[0]), lse.new_empty(hidden.shape[0]), lse


def _bwd_fake(dloss, dsoft_loss, *others):
    return bwd_fake(dloss, *others)


def _fwd_checked(
    hidden,
    weight,
    bias,
    labels,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    ignore_index,
    temperature,
    *,
    implementation=mlm_distillation_reference,
):
    labels = within_vocabulary(labels, weight.shape[0], ignore_index)
    teacher = (teacher_hidden, teacher_weight, teacher_bias)
    return implementation(hidden, weight, bias, labels, *teacher, ignore_index, temperature)


def _bwd_checked(
    dloss,
    dsoft_loss,
    hidden,
    weight,
    bias,
    labels,
    teacher_hidden,
    teacher_weight,
    teacher_bias,
    lse,
    ignore_index,
    *options,
    implementation=mlm_distillation_bwd_reference,
):
    labels = within_vocabulary(labels, weight.shape[0], ignore_index)
    student = (hidden, weight, bias, labels)
    teacher = (teacher_hidden, teacher_weight, teacher_bias)
    return implementation(dloss, dsoft_loss, *student, *teacher, lse, ignore_index, *options)


def _fwd_triton(*args):
    from fastbert.kernels.mlm_distillation import mlm_distillation_fwd

    return _fwd_checked(*args, implementation=mlm_distillation_fwd)


def _bwd_triton(*args):
    from fastbert.kernels.mlm_distillation import mlm_distillation_bwd

    return _bwd_checked(*args, implementation=mlm_distillation_bwd)


def _fwd_kernel_reasons(hidden, weight, bias, labels, teacher_hidden, teacher_weight, *_):
    return dtype_reasons(hidden=hidden, weight=weight, teacher_weight=teacher_weight)


def _bwd_kernel_reasons(dloss, dsoft_loss, *tensors):
    return _fwd_kernel_reasons(*tensors)


_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, "
    "Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias"
)
_OPTIONS = "int ignore_index, float temperature"
mlm_distillation_fwd = dispatch.register_op(
    "mlm_distillation_fwd",
    f"({_TENSORS}, {_OPTIONS}) -> (Tensor loss, Tensor soft_loss, Tensor lse)",
    room="mlm_distillation",
    fake=_fwd_fake,
    reference=_fwd_checked,
    triton="fastbert.ops.mlm_distillation:_fwd_triton",
    cpu=True,
    cuda=True,
    cuda_extra=("Tensor? flag, int max_logits", fwd_cuda_extra),
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _fwd_kernel_reasons),
)
mlm_distillation_bwd = dispatch.register_op(
    "mlm_distillation_bwd",
    f"(Tensor dloss, Tensor dsoft_loss, {_TENSORS}, Tensor lse, {_OPTIONS}, "
    "bool need_dhidden, bool need_dweight) -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    room="mlm_distillation",
    fake=_bwd_fake,
    reference=_bwd_checked,
    triton="fastbert.ops.mlm_distillation:_bwd_triton",
    cpu=True,
    cuda=True,
    cuda_extra=("int max_logits", bwd_cuda_extra),
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _bwd_kernel_reasons),
)


class _MlmDistillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, teacher, options):
        loss, soft_loss, lse = mlm_distillation_fwd(
            hidden, weight, bias, labels, *teacher, *options
        )
        ctx.save_for_backward(hidden, weight, bias, labels, *teacher, lse)
        ctx.options = options
        ctx.binding = dispatch.current_binding()
        return loss, soft_loss

    @staticmethod
    def backward(ctx, dloss, dsoft_loss):
        dispatch.refuse_second_order("mlm_distillation")
        need_dhidden, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        with dispatch.bound(ctx.binding):
            dhidden, dweight, dbias = mlm_distillation_bwd(
                dloss, dsoft_loss, *ctx.saved_tensors, *ctx.options, need_dhidden, need_dweight
            )
        return (
            dhidden if need_dhidden else None,
            dweight if need_dweight else None,
            dbias if need_dbias else None,
            None,
            None,
            None,
        )


def mlm_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    *,
    temperature: float = 2.0,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy with the labels, and T²·KL(teacher ‖ student) at temperature T, per row.

    The masked-LM and the distillation loss of DistilBERT (Sanh et al. 2019, section 2), whose soft
    targets and factor T² are those of Hinton et al. 2015, section 2. Logits are hidden Wᵀ + bias,
    computed in the dtype of hidden (under autocast in autocast's), a chunk at a time on both sides;
    softmax and losses are fp32. The teacher's side gets no gradient. 4·P + P·(C + D) elements are
    saved.

    Args:
        hidden: `(P, C)`, fp32/bf16/fp16, of the student.
        weight: `(V, C)`. bias: `(V,)` or None.
        labels: `(P,)` int64 in [0, V), or ignore_index.
        teacher_hidden: `(P, D)`, in the dtype of hidden.
        teacher_weight: `(V, D)`. teacher_bias: `(V,)` or None.
        temperature: T, above 0, of both softmaxes of the second loss.
        ignore_index: label of rows that do not count, in neither loss.

    Returns:
        Two of `(P,)` fp32, 0 at ignored rows; sum and divide by the count that is meant.

    Raises:
        ValueError: shapes or dtypes that do not fit, on a CPU a label outside the vocabulary
            (elsewhere see fastbert.ops.index_flags), temperature not above 0.
        RuntimeError: in backward with create_graph=True.
    """
    hidden, teacher_hidden = autocast_input(hidden), autocast_input(teacher_hidden)
    check_rows("mlm_distillation", hidden, weight, bias, labels, ignore_index)
    _check_teacher(hidden, weight, teacher_hidden, teacher_weight, teacher_bias)
    if not temperature > 0:
        raise ValueError(f"mlm_distillation: temperature must be above 0, got {temperature}")
    teacher = (teacher_hidden, teacher_weight, teacher_bias)
    options = (ignore_index, float(temperature))
    if dispatch.needs_grad(hidden, weight, bias):
        return _MlmDistillation.apply(hidden, weight, bias, labels, teacher, options)
    return mlm_distillation_fwd(hidden, weight, bias, labels, *teacher, *options)[:2]


def _check_teacher(hidden, weight, teacher_hidden, teacher_weight, teacher_bias) -> None:
    num_rows, vocab_size = hidden.shape[0], weight.shape[0]
    fits = teacher_hidden.dim() == teacher_weight.dim() == 2
    if not fits or teacher_hidden.shape[1] != teacher_weight.shape[1]:
        raise ValueError(
            "mlm_distillation: teacher_hidden must be (P, D) and teacher_weight (V, D), got "
            f"{tuple(teacher_hidden.shape)} and {tuple(teacher_weight.shape)}"
        )
    if (teacher_hidden.shape[0], teacher_weight.shape[0]) != (num_rows, vocab_size):
        raise ValueError(
            f"mlm_distillation: the student has {num_rows} rows and {vocab_size} words, the "
            f"teacher {teacher_hidden.shape[0]} and {teacher_weight.shape[0]}; both must read the "
            "same rows with the same vocabulary"
        )
    if teacher_bias is not None and teacher_bias.shape != (vocab_size,):
        raise ValueError(
            f"mlm_distillation: teacher_bias must have shape ({vocab_size},), got "
            f"{tuple(teacher_bias.shape)}"
        )
    if teacher_hidden.dtype != hidden.dtype:
        raise ValueError(
            f"mlm_distillation: teacher_hidden must be {hidden.dtype} like hidden, got "
            f"{teacher_hidden.dtype}; convert it, or call both models under one autocast"
        )
