"""The losses of a masked-LM student in plain PyTorch: the specification of `mlm_distillation`.

Letters: P rows, C features of the student, D of the teacher, V vocabulary.

Logits of both exist for some rows at a time (fastbert/reference/mlm_cross_entropy.py).
"""

from collections.abc import Iterator

import torch

from fastbert.reference.mlm_cross_entropy import decoder_gradients, logit_chunks
from fastbert.reference.precision import accumulation_dtype


def mlm_distillation_reference(
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
    """loss = lse(z) - z_label, soft_loss = T²·Σ p·(log p - log q).

    z = hidden Wᵀ + bias are the student's logits, t the teacher's, T the temperature, and
    p = softmax(t/T), q = softmax(z/T); soft targets and the factor T² of Hinton et al. 2015,
    section 2. Logits are rounded to the dtype of hidden, as a linear layer gives them; everything
    after is fp32. 2·P·(C + D)·V FLOPs.

    Args:
        hidden: `(P, C)`. weight: `(V, C)`, may be wider than hidden. bias: `(V,)` or None.
        labels: `(P,)` int64.
        teacher_hidden: `(P, D)`. teacher_weight: `(V, D)`. teacher_bias: `(V,)` or None.
        ignore_index: label of rows that do not count, in neither loss.
        temperature: T.

    Returns:
        loss, soft_loss: `(P,)` fp32, 0 at ignored rows. lse: `(3, P)` fp32, log Σ exp of z, z/T
        and t/T.
    """
    lse = hidden.new_zeros((3, hidden.shape[0]), dtype=accumulation_dtype(hidden.dtype))
    loss, soft_loss = torch.zeros_like(lse[0]), torch.zeros_like(lse[0])
    counted = labels != ignore_index
    targets = labels.masked_fill(~counted, 0)
    student = logit_chunks(hidden, weight, bias)
    teacher = logit_chunks(teacher_hidden, teacher_weight, teacher_bias)
    for (rows, z), (_, t) in zip(student, teacher, strict=True):
        target = z.gather(1, targets[rows, None]).squeeze(1)
        lse[0, rows] = z.logsumexp(1)
        z, t = z.div_(temperature), t.div_(temperature)
        peak_z, peak_t = z.amax(1, keepdim=True), t.amax(1, keepdim=True)
        of_teacher = (t - peak_t).exp_()
        total_z, total_t = (z - peak_z).exp_().sum(1), of_teacher.sum(1)
        lse[1, rows] = peak_z.squeeze(1) + total_z.log()
        lse[2, rows] = peak_t.squeeze(1) + total_t.log()
        # A word that the teacher rules out has no part, whatever the student says of it.
        apart = t.sub_(z).masked_fill_(of_teacher == 0, 0).mul_(of_teacher).sum(1) / total_t
        # One logarithm in place of the two lse: where these are alike their rounding would be left.
        soft = apart - (peak_t - peak_z).squeeze(1) + (total_z / total_t).log()
        loss[rows] = torch.where(counted[rows], lse[0, rows] - target, 0)
        soft_loss[rows] = torch.where(counted[rows], temperature**2 * soft, 0)
    return loss, soft_loss, lse


def mlm_distillation_bwd_reference(
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
    """Gradients of `mlm_distillation_reference` for the student, logits recomputed chunk by chunk.

    dz = dloss·(softmax(z) - onehot(label)) + dsoft_loss·T·(q - p).

    Returns:
        dhidden: `(P, C)`. dweight: `(V, C)`. dbias: `(V,)`; `(0,)` where not wanted.
    """
    accumulate = accumulation_dtype(hidden.dtype)
    counted = labels != ignore_index
    targets = labels.masked_fill(~counted, 0)
    dloss = torch.where(counted, dloss.to(accumulate), 0)
    factor = torch.where(counted, dsoft_loss.to(accumulate) * temperature, 0)

    def gradients() -> Iterator[tuple[slice, torch.Tensor]]:
        student = logit_chunks(hidden, weight, bias)
        teacher = logit_chunks(teacher_hidden, teacher_weight, teacher_bias)
        for (rows, z), (_, t) in zip(student, teacher, strict=True):
            p = t.div_(temperature).sub_(lse[2, rows, None]).exp_()
            q = z.div(temperature).sub_(lse[1, rows, None]).exp_()
            gradient = z.sub_(lse[0, rows, None]).exp_().mul_(dloss[rows, None])
            gradient += q.sub_(p).mul_(factor[rows, None])
            yield rows, gradient.scatter_add_(1, targets[rows, None], -dloss[rows, None])

    return decoder_gradients(gradients(), hidden, weight, bias, need_dhidden, need_dweight)
