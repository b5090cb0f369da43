"""Attention over packed sequences in plain PyTorch: the specification of `attention`.

Letters: Tq query rows, Tk key rows, N heads, D head dim; Lq, Lk rows of one sequence.

One sequence at a time on strided views, so nothing is padded and nothing is copied; its score tile
is cut along the queries to `MAX_SCORES`, beyond which every temporary would be fresh pages. With a
window a tile has the keys that its queries see.
"""

import math
from collections.abc import Callable, Iterator

import torch

from fastbert.reference.philox import dropout_scale
from fastbert.reference.precision import accumulation_dtype

MAX_SCORES = 1 << 22
WINDOW_QUERIES = 256
"""Least queries of a tile with a window: fewer would see the same keys again and again."""

KeepMask = Callable[[int, int, int, int], torch.Tensor]
"""(first, last, Lq, Lk) to the `(last - first, N, Lq, Lk)` bool keep masks of those sequences."""


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    window: tuple[int, int] | None,
    threshold: int,
    keep_mask: KeepMask | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = dropout(softmax(q kᵀ · softmax_scale)) v within each sequence.

    Vaswani et al. 2017, eq. 1; 4·Lq·Lk·N·D FLOPs a sequence. Probabilities are rounded to the
    dtype of q before they meet v, the softmax is fp32.

    Args:
        q: `(Tq, N, D)`. k, v: `(Tk, N, D)`; last dim contiguous.
        cu_seqlens_q, cu_seqlens_k: `(B+1,)` first row of each sequence; read by the host.
        window: (left, right): query i sees keys i-left to i+right of its sequence, -1 for no
            bound; None for all keys.
        threshold, keep_mask: dropout of the probabilities.

    Returns:
        out: `(Tq, N, D)`, 0 where there is no key and behind the last sequence.
        softmax_lse: `(N, Tq)` fp32, log Σ exp of the scaled scores, -inf there.
    """
    # In half precision torch's kernel does not round scores as the backward below will.
    if threshold == 0 and window is None and q.dtype == accumulation_dtype(q.dtype):
        return _without_dropout(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
    num_heads = q.shape[1]
    out = q.new_zeros(q.shape)
    lse = q.new_full((num_heads, q.shape[0]), -math.inf, dtype=accumulation_dtype(q.dtype))
    for sequence, queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        keep = _mask(keep_mask, sequence, queries, keys)
        for rows, local, in_sight in _tiles(queries, keys, num_heads, window):
            key, value = (t[keys][in_sight].transpose(0, 1) for t in (k, v))
            scores = _scores(q[rows], key, softmax_scale, window, local, in_sight)
            peak = scores.amax(-1, keepdim=True)
            weights = torch.softmax(scores, -1)
            # The largest probability is 1 / Σ exp(score - peak).
            tile_lse = peak - weights.amax(-1, keepdim=True).log_()
            if window is not None:
                unseen = peak == -math.inf
                weights.masked_fill_(unseen, 0)
                tile_lse.masked_fill_(unseen, -math.inf)
            lse[:, rows] = tile_lse.squeeze(-1)
            if keep is not None:
                kept = keep[:, local, in_sight]
                weights = torch.where(kept, weights, 0).mul_(dropout_scale(threshold))
            out[rows] = torch.bmm(weights.to(q.dtype), value).transpose(0, 1)
    return out, lse


def _without_dropout(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale):
    """The same by torch's own CPU kernel, one call for each run of sequences of equal lengths."""
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=accumulation_dtype(q.dtype))
    for count, queries, keys in _equal_runs(cu_seqlens_q, cu_seqlens_k):
        tile, tile_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            *(
                x[rows].unflatten(0, (count, -1)).transpose(1, 2)
                for x, rows in ((q, queries), (k, keys), (v, keys))
            ),
            scale=softmax_scale,
        )
        tile, tile_lse = tile.transpose(1, 2).flatten(0, 1), tile_lse.transpose(0, 1).flatten(1)
        if _length(queries) == q.shape[0]:
            return tile, tile_lse
        out[queries] = tile
        lse[:, queries] = tile_lse
    return out, lse


def attention_bwd_reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    window: tuple[int, int] | None,
    threshold: int,
    keep_mask: KeepMask | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `attention_reference`, probabilities recomputed from softmax_lse.

    Dao et al. 2022, "FlashAttention", appendix B.2: with P the probabilities, Z the dropout's
    factors and dP = Z·(dout vᵀ), dv = (P·Z)ᵀ dout and dS = P·(dP - rowsum(P·dP)). The row sum is
    that of the rounded dP, not dout·out: where a row has one key the two terms must cancel.

    Returns:
        dq: `(Tq, N, D)`. dk, dv: `(Tk, N, D)`; 0 in rows no sequence holds.
    """
    num_heads = q.shape[1]
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    scale = dropout_scale(threshold)
    for sequence, queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        keep = _mask(keep_mask, sequence, queries, keys)
        for rows, local, in_sight in _tiles(queries, keys, num_heads, window):
            query, gradient = q[rows].transpose(0, 1), dout[rows].transpose(0, 1)
            key, value = (t[keys][in_sight].transpose(0, 1) for t in (k, v))
            scores = _scores(q[rows], key, softmax_scale, window, local, in_sight)
            lse = softmax_lse[:, rows, None]
            weights = scores.sub_(lse.masked_fill(lse == -math.inf, 0)).exp_()
            dweights = torch.bmm(gradient, value.transpose(1, 2)).to(weights.dtype)
            dropped = weights
            if keep is not None:
                kept = keep[:, local, in_sight]
                dropped = torch.where(kept, weights, 0).mul_(scale)
                dweights = torch.where(kept, dweights, 0).mul_(scale)
            dscores = torch.ops.aten._softmax_backward_data.default(
                dweights, weights, -1, weights.dtype
            )
            dscores = dscores.mul_(softmax_scale).to(q.dtype)
            dq[rows] = torch.bmm(dscores, key).transpose(0, 1)
            dropped = dropped.to(q.dtype)
            dk[keys][in_sight] += torch.bmm(dscores.transpose(1, 2), query).transpose(0, 1)
            dv[keys][in_sight] += torch.bmm(dropped.transpose(1, 2), gradient).transpose(0, 1)
    return dq, dk, dv


def _sequences(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """Index, query rows and key rows of each sequence that has both."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for sequence in range(len(starts_q) - 1):
        queries = slice(starts_q[sequence], starts_q[sequence + 1])
        keys = slice(starts_k[sequence], starts_k[sequence + 1])
        if _length(queries) > 0 and _length(keys) > 0:
            yield sequence, queries, keys


def _equal_runs(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """Number, query rows and key rows of neighbouring sequences with the same two lengths."""
    run = None
    for _, queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        lengths = _length(queries), _length(keys)
        if run is not None and (*lengths, queries.start, keys.start) == run[1:]:
            run = (run[0] + 1, *lengths, queries.stop, keys.stop)
            continue
        if run is not None:
            yield _rows_of(run)
        run = (1, *lengths, queries.stop, keys.stop)
    if run is not None:
        yield _rows_of(run)


def _rows_of(run: tuple[int, int, int, int, int]) -> tuple[int, slice, slice]:
    count, length_q, length_k, stop_q, stop_k = run
    return (
        count,
        slice(stop_q - count * length_q, stop_q),
        slice(stop_k - count * length_k, stop_k),
    )


def _mask(keep_mask: KeepMask | None, sequence: int, queries: slice, keys: slice):
    if keep_mask is None:
        return None
    return keep_mask(sequence, sequence + 1, _length(queries), _length(keys))[0]


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def _tiles(
    queries: slice, keys: slice, num_heads: int, window
) -> Iterator[tuple[slice, slice, slice]]:
    """Pieces of a sequence's queries: rows of the packed tensor, rows within the sequence, and the
    keys within the sequence that any of them sees."""
    length, num_keys = _length(queries), _length(keys)
    step = max(1, MAX_SCORES // (num_heads * num_keys))
    left, right = window or (-1, -1)
    if min(left, right) >= 0:
        step = min(step, max(WINDOW_QUERIES, left + right))
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = 0 if left < 0 else min(max(0, start - left), num_keys - 1)
        last = num_keys if right < 0 else min(stop + right, num_keys)
        rows = slice(queries.start + start, queries.start + stop)
        yield rows, slice(start, stop), slice(first, max(first + 1, last))


def _scores(q, key, softmax_scale, window, local: slice, in_sight: slice) -> torch.Tensor:
    """`(N, rows, Lk)` scaled scores in the accumulation dtype, -inf outside the window."""
    scores = torch.bmm(q.transpose(0, 1), key.transpose(1, 2))
    scores = scores.to(accumulation_dtype(q.dtype)).mul_(softmax_scale)
    if window is not None:
        scores = scores.masked_fill_(~_in_window(window, local, in_sight, q.device), -math.inf)
    return scores


def _in_window(window, local: slice, in_sight: slice, device) -> torch.Tensor:
    left, right = window
    offset = torch.arange(in_sight.start, in_sight.stop, device=device) - torch.arange(
        local.start, local.stop, device=device
    ).unsqueeze(1)
    inside = torch.ones_like(offset, dtype=torch.bool)
    if left >= 0:
        inside &= offset >= -left
    if right >= 0:
        inside &= offset <= right
    return inside
