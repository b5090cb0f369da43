"""Ops as plain PyTorch computes them, where tests and benchmarks share one."""

import torch
import torch.nn.functional as F


def plain_mlm_distillation(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    teacher_bias: torch.Tensor | None,
    temperature: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mlm_distillation` from whole logits, of fp32 or wider."""
    logits = F.linear(hidden, weight, bias)
    with torch.no_grad():
        targets = F.linear(teacher_hidden, teacher_weight, teacher_bias)
    if logits.dtype != torch.float64:
        logits, targets = logits.float(), targets.float()
    divergence = F.kl_div(
        F.log_softmax(logits / temperature, -1),
        F.log_softmax(targets / temperature, -1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss, temperature**2 * divergence * (labels != -100)
