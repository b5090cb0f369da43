"""Disentangled attention over packed sequences in plain PyTorch: the specification of
`disentangled_attention`.

Letters: T packed rows, N heads, D head dim, L rows of one sequence, R rows of a position table
(buckets of relative distance), M half the width of the bucket table.

One sequence at a time, its scores cut along the queries as attention's reference cuts them.
"""

import math

import torch

from fastbert.reference.attention import (
    KeepMask,
    _length,
    _mask,
    _sequences,
    _tiles,
)
from fastbert.reference.philox import dropout_scale
from fastbert.reference.precision import accumulation_dtype


def relative_buckets(
    position_buckets: int, max_relative_positions: int, device: torch.device | None = None
) -> torch.Tensor:
    """The row of a position table for each distance i - j.

    He et al. 2020, "DeBERTa", eq. 3: distances clipped to `max_relative_positions` on each side.
    With `position_buckets` those beyond half of it share buckets of logarithmic width (the
    authors' DeBERTa-v2; computed in fp32 as transformers does, so that the borders agree).

    Args:
        position_buckets: buckets to each side; below 1 for one a distance.
        max_relative_positions: distances told apart to each side.

    Returns:
        `(2·M + 1,)` int32 with M = max_relative_positions: of the distances -M to M. A distance
        beyond has the bucket of the end on its side.
    """
    distance = torch.arange(-max_relative_positions, max_relative_positions + 1, device=device)
    span = max_relative_positions
    if position_buckets > 0:
        span, middle = position_buckets, position_buckets // 2
        reach = torch.tensor((max_relative_positions - 1) / middle, device=device).log()
        far = distance.abs().clamp(min=middle)
        bucket = torch.ceil(torch.log(far / middle) / reach * (middle - 1)) + middle
        distance = torch.where(distance.abs() <= middle, distance, bucket.long() * distance.sign())
    return (distance + span).clamp(0, 2 * span - 1).int()


def disentangled_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    buckets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    softmax_scale: float,
    threshold: int,
    keep_mask: KeepMask | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = dropout(softmax(softmax_scale · A)) v within each sequence, where
    A[i, j] = q[i]·k[j] + q[i]·position_key[b] + k[j]·position_query[b], b the bucket of i - j.

    He et al. 2020, "DeBERTa", eq. 4 without its last term. Probabilities are rounded to the dtype
    of q before they meet v, the softmax is fp32.

    Args:
        q, k, v: `(T, N, D)`.
        position_key, position_query: `(R, N, D)`, or None without that term.
        buckets: `(2·M + 1,)` of `relative_buckets`.
        cu_seqlens: `(B+1,)` first row of each sequence; read by the host.
        threshold, keep_mask: dropout of the probabilities.

    Returns:
        out: `(T, N, D)`, 0 behind the last sequence.
        softmax_lse: `(N, T)` fp32, log Σ exp of the scaled scores, -inf there.
    """
    num_heads = q.shape[1]
    out = q.new_zeros(q.shape)
    lse = q.new_full((num_heads, q.shape[0]), -math.inf, dtype=accumulation_dtype(q.dtype))
    for sequence, rows_of_all, _ in _sequences(cu_seqlens, cu_seqlens):
        keep = _mask(keep_mask, sequence, rows_of_all, rows_of_all)
        key, value = (t[rows_of_all].transpose(0, 1) for t in (k, v))
        by_key = _products(key, position_query)
        for rows, local, _ in _tiles(rows_of_all, rows_of_all, num_heads, None):
            query = q[rows].transpose(0, 1)
            bucket = _buckets(buckets, local, _length(rows_of_all))
            scores = _scores(query, key, position_key, by_key, bucket).mul_(softmax_scale)
            lse[:, rows] = scores.logsumexp(-1)
            weights = torch.softmax(scores, -1)
            if keep is not None:
                weights = torch.where(keep[:, local], weights, 0).mul_(dropout_scale(threshold))
            out[rows] = torch.bmm(weights.to(q.dtype), value).transpose(0, 1)
    return out, lse


def disentangled_attention_bwd_reference(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    softmax_lse: torch.Tensor,
    buckets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    softmax_scale: float,
    threshold: int,
    keep_mask: KeepMask | None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `disentangled_attention_reference`, probabilities recomputed from softmax_lse.

    With dS the gradient of the scaled scores as in attention's reference, each term of a score
    hands softmax_scale · dS on to its two factors; a position's row sums over all pairs of its
    bucket, in fp32.

    Returns:
        dq, dk, dv: `(T, N, D)`, 0 in rows no sequence holds. dposition_key, dposition_query:
        `(R, N, D)`, of no elements where there is none.
    """
    num_heads = q.shape[1]
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dkey_table, dquery_table = (_table_sums(t, q) for t in (position_key, position_query))
    scale = dropout_scale(threshold)
    for sequence, rows_of_all, _ in _sequences(cu_seqlens, cu_seqlens):
        keep = _mask(keep_mask, sequence, rows_of_all, rows_of_all)
        key, value = (t[rows_of_all].transpose(0, 1) for t in (k, v))
        by_key = _products(key, position_query)
        dby_key = None if by_key is None else torch.zeros_like(by_key)
        for rows, local, _ in _tiles(rows_of_all, rows_of_all, num_heads, None):
            query, gradient = q[rows].transpose(0, 1), dout[rows].transpose(0, 1)
            bucket = _buckets(buckets, local, _length(rows_of_all))
            scores = _scores(query, key, position_key, by_key, bucket).mul_(softmax_scale)
            weights = scores.sub_(softmax_lse[:, rows, None]).exp_()
            dweights = torch.bmm(gradient, value.transpose(1, 2)).to(weights.dtype)
            dropped = weights
            if keep is not None:
                dropped = torch.where(keep[:, local], weights, 0).mul_(scale)
                dweights = torch.where(keep[:, local], dweights, 0).mul_(scale)
            dscores = torch.ops.aten._softmax_backward_data.default(
                dweights, weights, -1, weights.dtype
            )
            dscores = dscores.mul_(softmax_scale)
            rounded, dropped = dscores.to(q.dtype), dropped.to(q.dtype)
            dquery = torch.bmm(rounded, key)
            dk[rows_of_all] += torch.bmm(rounded.transpose(1, 2), query).transpose(0, 1)
            dv[rows_of_all] += torch.bmm(dropped.transpose(1, 2), gradient).transpose(0, 1)
            if position_key is not None:
                index = bucket.expand(num_heads, -1, -1)
                sums = dscores.new_zeros(*query.shape[:2], len(position_key))
                sums = sums.scatter_add_(-1, index, dscores).to(q.dtype)
                dquery = dquery + torch.bmm(sums, position_key.transpose(0, 1))
                dkey_table += torch.bmm(sums.transpose(1, 2), query)
            if position_query is not None:
                index = bucket.t().expand(num_heads, -1, -1)
                dby_key.scatter_add_(-1, index, dscores.transpose(1, 2))
            dq[rows] = dquery.transpose(0, 1)
        if position_query is not None:
            sums = dby_key.to(q.dtype)
            dk[rows_of_all] += torch.bmm(sums, position_query.transpose(0, 1)).transpose(0, 1)
            dquery_table += torch.bmm(sums.transpose(1, 2), key)
    tables = (t.transpose(0, 1).to(q.dtype).contiguous() for t in (dkey_table, dquery_table))
    dposition_key, dposition_query = (t if t.numel() else q.new_empty(0) for t in tables)
    return dq, dk, dv, dposition_key, dposition_query


def _buckets(buckets: torch.Tensor, local: slice, length: int) -> torch.Tensor:
    """`(rows, L)` int64: the bucket of each query and key, both counted within the sequence."""
    queries = torch.arange(local.start, local.stop, device=buckets.device)
    distance = queries[:, None] - torch.arange(length, device=buckets.device)
    middle = len(buckets) // 2
    return buckets.long()[distance.clamp(-middle, middle) + middle]


def _products(heads: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor | None:
    """`(N, rows, R)` of `(N, rows, D)` and a table, in the accumulation dtype."""
    if table is None:
        return None
    products = torch.bmm(heads, table.permute(1, 2, 0))
    return products.to(accumulation_dtype(heads.dtype))


def _scores(query, key, position_key, by_key, bucket) -> torch.Tensor:
    """`(N, rows, L)` in the accumulation dtype, not scaled."""
    scores = torch.bmm(query, key.transpose(1, 2)).to(accumulation_dtype(query.dtype))
    if position_key is not None:
        by_query = _products(query, position_key)
        scores = scores + by_query.gather(-1, bucket.expand(len(scores), -1, -1))
    if by_key is not None:
        index = bucket.t().expand(len(scores), -1, -1)
        scores = scores + by_key.gather(-1, index).transpose(1, 2)
    return scores


def _table_sums(table: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Zeros `(N, R, D)` in the accumulation dtype; nothing without a table."""
    dtype = accumulation_dtype(like.dtype)
    if table is None:
        return like.new_zeros((0, 0, 0), dtype=dtype)
    return like.new_zeros(table.transpose(0, 1).shape, dtype=dtype)
