"""Ops as plain PyTorch computes them, where tests and benchmarks share one."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fastbert.reference.disentangled_attention import relative_buckets


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


def plain_disentangled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    lengths: Sequence[int],
    positions: tuple[int, int],
    scale: float,
    keep: Sequence[torch.Tensor] | None = None,
    p: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`disentangled_attention` as dense attention of each sequence with gathered terms; idle rows
    are 0.

    Args:
        positions: position_buckets and max_relative_positions.
        keep: mask `(N, L, L)` of each sequence, probabilities dropped with p.
    """
    reach = positions[1]
    table = relative_buckets(*positions, q.device).long()
    out, lse, start = [], [], 0
    for index, length in enumerate(lengths):
        qs, ks, vs = (t[start:][:length] for t in (q, k, v))
        start += length
        place = torch.arange(length, device=q.device)
        bucket = table[(place[:, None] - place).clamp(-reach, reach) + reach]
        scores = torch.einsum("qnd,knd->nqk", qs, ks)
        if position_key is not None:
            scores = scores + torch.einsum("qnd,qknd->nqk", qs, position_key[bucket])
        if position_query is not None:
            scores = scores + torch.einsum("knd,qknd->nqk", ks, position_query[bucket])
        scores = scores * scale
        weights = scores.double() if scores.dtype == torch.float64 else scores.float()
        weights = weights.softmax(-1)
        if keep is not None:
            weights = weights * keep[index] / (1 - p)
        out.append(torch.einsum("nqk,knd->qnd", weights.to(vs.dtype), vs))
        lse.append(scores.logsumexp(-1))
    out.append(q[start:] * 0)
    lse.append(q.new_full((q.shape[1], q.shape[0] - start), -math.inf))
    lse = torch.cat(lse, 1)
    return torch.cat(out), lse if lse.dtype == torch.float64 else lse.float()
