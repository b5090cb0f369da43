"""The masked-LM loss in plain PyTorch: the specification of `mlm_cross_entropy`.

Letters: P rows, C features, V vocabulary.

Logits exist for `rows_per_chunk` rows at a time, in two buffers used again for every chunk: the
full `(P, V)` tensor would be fresh pages in forward and again in backward.
"""

from collections.abc import Iterable, Iterator

import torch

from fastbert.reference.precision import accumulation_dtype

MAX_LOGITS = 1 << 23


def rows_per_chunk(num_rows: int, vocab_size: int) -> int:
    """Rows whose logits are held at once: chunks of equal size within `MAX_LOGITS`."""
    chunks = max(1, -(-num_rows * vocab_size // MAX_LOGITS))
    return max(1, -(-num_rows // chunks))


def mlm_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss = (1-ε)·(lse - z_label) + ε·(lse - mean(z)) + z_loss·lse², z = hidden Wᵀ + bias.

    Label smoothing of Szegedy et al. 2016, section 7; z-loss of Chowdhery et al. 2022, section 5.
    Logits are rounded to the dtype of hidden, as a linear layer gives them; everything after is
    fp32. 2·P·C·V FLOPs.

    Args:
        hidden: `(P, C)`. weight: `(V, C)`, may be wider than hidden. bias: `(V,)` or None.
        labels: `(P,)` int64.
        ignore_index: label of rows that do not count.
        label_smoothing: ε. z_loss: factor of lse².

    Returns:
        loss: `(P,)` fp32, 0 at ignored rows. lse: `(P,)` fp32, log Σ exp z.
    """
    accumulate = accumulation_dtype(hidden.dtype)
    loss = hidden.new_zeros(hidden.shape[0], dtype=accumulate)
    lse = torch.zeros_like(loss)
    counted = labels != ignore_index
    targets = labels.masked_fill(~counted, 0)
    for rows, logits in logit_chunks(hidden, weight, bias):
        target = logits.gather(1, targets[rows, None]).squeeze(1)
        mean = logits.mean(1) if label_smoothing else None
        peak = logits.amax(1, keepdim=True)
        total = logits.sub_(peak).exp_().sum(1)
        lse[rows] = peak.squeeze(1) + total.log()
        nll = lse[rows] - target
        if label_smoothing:
            nll = (1 - label_smoothing) * nll + label_smoothing * (lse[rows] - mean)
        if z_loss:
            nll = nll + z_loss * lse[rows].square()
        loss[rows] = torch.where(counted[rows], nll, 0)
    return loss, lse


def mlm_cross_entropy_bwd_reference(
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
    """Gradients of `mlm_cross_entropy_reference`, logits recomputed chunk by chunk.

    dz = dloss·((1 + 2·z_loss·lse)·softmax(z) - (1-ε)·onehot(label) - ε/V).

    Returns:
        dhidden: `(P, C)`. dweight: `(V, C)`. dbias: `(V,)`; `(0,)` where not wanted.
    """
    accumulate = accumulation_dtype(hidden.dtype)
    vocab_size = weight.shape[0]
    counted = labels != ignore_index
    targets = labels.masked_fill(~counted, 0)
    dloss = torch.where(counted, dloss.to(accumulate), 0)
    factor = dloss * (1 + 2 * z_loss * lse) if z_loss else dloss

    def gradients() -> Iterator[tuple[slice, torch.Tensor]]:
        for rows, logits in logit_chunks(hidden, weight, bias):
            gradient = logits.sub_(lse[rows, None]).exp_().mul_(factor[rows, None])
            if label_smoothing:
                gradient.sub_(dloss[rows, None] * (label_smoothing / vocab_size))
            hit = -(1 - label_smoothing) * dloss[rows, None]
            yield rows, gradient.scatter_add_(1, targets[rows, None], hit)

    return decoder_gradients(gradients(), hidden, weight, bias, need_dhidden, need_dweight)


def decoder_gradients(
    gradients: Iterable[tuple[slice, torch.Tensor]],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    need_dhidden: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What gradients of logits, row slices and fp32 `(rows, V)`, come to behind the decoder.

    Returns:
        dhidden: `(P, C)`. dweight: `(V, C)`. dbias: `(V,)`; `(0,)` where not wanted.
    """
    accumulate = accumulation_dtype(hidden.dtype)
    dhidden = hidden.new_zeros(hidden.shape if need_dhidden else 0)
    dweight = None
    dbias = torch.zeros(weight.shape[0], dtype=accumulate, device=hidden.device)
    for rows, gradient in gradients:
        if bias is not None:
            dbias += gradient.sum(0)
        gradient = gradient.to(hidden.dtype)
        if need_dhidden:
            torch.mm(gradient, weight.to(hidden.dtype), out=dhidden[rows])
        if need_dweight:
            product = gradient.t() @ hidden[rows]
            dweight = product if dweight is None else dweight.to(accumulate).add_(product)
    if dweight is None:
        dweight = weight.new_zeros(weight.shape if need_dweight else 0)
    dbias = hidden.new_empty(0) if bias is None else dbias.to(bias.dtype)
    return dhidden, dweight.to(weight.dtype), dbias


def logit_chunks(hidden, weight, bias) -> Iterator[tuple[slice, torch.Tensor]]:
    """Row slices and their fp32 logits, in a buffer the next chunk overwrites."""
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    num_rows, vocab_size = hidden.shape[0], weight.shape[0]
    accumulate = accumulation_dtype(hidden.dtype)
    size = rows_per_chunk(num_rows, vocab_size)
    rounded = hidden.new_empty((min(size, num_rows), vocab_size))
    wide = rounded if hidden.dtype == accumulate else rounded.to(accumulate)
    for start in range(0, num_rows, size):
        stop = min(start + size, num_rows)
        logits = rounded[: stop - start]
        if bias is None:
            torch.mm(hidden[start:stop], weight.t(), out=logits)
        else:
            torch.addmm(bias, hidden[start:stop], weight.t(), out=logits)
        if wide is not rounded:
            logits = wide[: stop - start].copy_(logits)
        yield slice(start, stop), logits
