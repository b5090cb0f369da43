"""`attention_reference` for devices that must not be waited for.

Letters: Tq query rows, Tk key rows, N heads, D head dim; b sequences at a time, S padded length.

The loop over sequences reads their lengths on the host and launches a handful of small kernels for
each. On a GPU one stall and hundreds of launches a layer would cost more than padding: here
sequences are padded to the bound the caller knows, inside the op, and results are written back
through row indices computed on the device.
"""

import math
from collections.abc import Iterator

import torch

from fastbert.reference.attention import KeepMask
from fastbert.reference.philox import dropout_scale
from fastbert.reference.precision import accumulation_dtype

MAX_SCORES = 1 << 27


def attention_padded_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: tuple[int, int] | None,
    threshold: int,
    keep_mask: KeepMask | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse of `attention_reference`; no value is read by the host."""
    num_heads = q.shape[1]
    # One row more than there are: idle places write there.
    out = q.new_zeros((q.shape[0] + 1, *q.shape[1:]))
    lse = q.new_full((q.shape[0] + 1, num_heads), -math.inf, dtype=accumulation_dtype(q.dtype))
    for first, last in _chunks(cu_seqlens_q, num_heads, max_seqlen_q, max_seqlen_k):
        rows_q = _rows(cu_seqlens_q[first : last + 1], max_seqlen_q, q.shape[0])
        rows_k = _rows(cu_seqlens_k[first : last + 1], max_seqlen_k, k.shape[0])
        query, key, value = _gather(q, rows_q), _gather(k, rows_k), _gather(v, rows_k)
        scores = _scores(query, key, rows_k < k.shape[0], softmax_scale, window)
        peak = scores.amax(-1, keepdim=True)
        unseen = peak == -math.inf
        weights = torch.softmax(scores, -1).masked_fill_(unseen, 0)
        tile_lse = (peak - weights.amax(-1, keepdim=True).log_()).masked_fill_(unseen, -math.inf)
        if threshold:
            keep = keep_mask(first, last, max_seqlen_q, max_seqlen_k)
            weights = torch.where(keep, weights, 0).mul_(dropout_scale(threshold))
        tile = torch.matmul(weights.to(q.dtype), value)
        out[rows_q] = tile.transpose(1, 2)
        lse[rows_q] = tile_lse.squeeze(-1).transpose(1, 2)
    return out[:-1], lse[:-1].t().contiguous()


def attention_padded_bwd_reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: tuple[int, int] | None,
    threshold: int,
    keep_mask: KeepMask | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of `attention_bwd_reference`; no value is read by the host."""
    gradients = [x.new_zeros((x.shape[0] + 1, *x.shape[1:])) for x in (q, k, v)]
    scale = dropout_scale(threshold)
    for first, last in _chunks(cu_seqlens_q, q.shape[1], max_seqlen_q, max_seqlen_k):
        rows_q = _rows(cu_seqlens_q[first : last + 1], max_seqlen_q, q.shape[0])
        rows_k = _rows(cu_seqlens_k[first : last + 1], max_seqlen_k, k.shape[0])
        query, key, value = _gather(q, rows_q), _gather(k, rows_k), _gather(v, rows_k)
        gradient = _gather(dout, rows_q)
        scores = _scores(query, key, rows_k < k.shape[0], softmax_scale, window)
        lse = _gather(softmax_lse.t()[..., None], rows_q)
        weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0)).exp_()
        dweights = torch.matmul(gradient, value.transpose(2, 3)).to(weights.dtype)
        dropped = weights
        if threshold:
            keep = keep_mask(first, last, max_seqlen_q, max_seqlen_k)
            dropped = torch.where(keep, weights, 0).mul_(scale)
            dweights = torch.where(keep, dweights, 0).mul_(scale)
        dscores = torch.ops.aten._softmax_backward_data.default(
            dweights, weights, -1, weights.dtype
        )
        dscores = dscores.mul_(softmax_scale).to(q.dtype)
        tiles = (
            torch.matmul(dscores, key),
            torch.matmul(dscores.transpose(2, 3), query),
            torch.matmul(dropped.to(q.dtype).transpose(2, 3), gradient),
        )
        for whole, rows, tile in zip(gradients, (rows_q, rows_k, rows_k), tiles, strict=True):
            whole[rows] = tile.transpose(1, 2)
    dq, dk, dv = (g[:-1] for g in gradients)
    return dq, dk, dv


def _chunks(cu_seqlens, num_heads, max_seqlen_q, max_seqlen_k) -> Iterator[tuple[int, int]]:
    """First and last of the sequences whose padded scores are held at once."""
    total = cu_seqlens.shape[0] - 1
    if max_seqlen_q == 0 or max_seqlen_k == 0:
        return
    step = max(1, MAX_SCORES // (num_heads * max_seqlen_q * max_seqlen_k))
    for first in range(0, total, step):
        yield first, min(first + step, total)


def _rows(cu_seqlens: torch.Tensor, max_seqlen: int, idle: int) -> torch.Tensor:
    """`(b, S)` packed row of each padded place; `idle`, one past the last row, where there is
    none."""
    starts = cu_seqlens[:-1, None].long()
    place = torch.arange(max_seqlen, device=cu_seqlens.device)
    return torch.where(place < cu_seqlens.diff()[:, None], starts + place, idle)


def _gather(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`(b, N, S, D)`, zeros at idle places, whatever idle rows hold."""
    if x.shape[0] == 0:
        return x.new_zeros((*rows.shape, *x.shape[1:])).transpose(1, 2)
    real = (rows < x.shape[0])[..., None, None]
    return torch.where(real, x[rows.clamp(max=x.shape[0] - 1)], 0).transpose(1, 2)


def _scores(query, key, real_keys, softmax_scale, window) -> torch.Tensor:
    """`(b, N, Sq, Sk)` scaled scores in the accumulation dtype, -inf where nothing may be seen."""
    scores = torch.matmul(query, key.transpose(2, 3))
    scores = scores.to(accumulation_dtype(query.dtype)).mul_(softmax_scale)
    seen = real_keys[:, None, None, :]
    if window is not None:
        left, right = window
        device = scores.device
        offset = torch.arange(scores.shape[-1], device=device) - torch.arange(
            scores.shape[-2], device=device
        ).unsqueeze(1)
        if left >= 0:
            seen = seen & (offset >= -left)
        if right >= 0:
            seen = seen & (offset <= right)
    return scores.masked_fill_(~seen, -math.inf)
