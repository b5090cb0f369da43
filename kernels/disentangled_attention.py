"""Disentangled attention over packed sequences in Triton, forward and backward.

Letters: T packed rows, N heads, D head dim, B sequences, R rows of a position table, M half the
width of the bucket table.

As kernels/attention.py, with square tiles: the queries and keys of one meet at 2·BLOCK - 1
distances, whose rows of a table are gathered, multiplied by the tile's queries (or keys) and
brought to their pairs by a shift of each row. Gradients of a table are summed without atomics: a
program has all tiles at one offset from the diagonal, which share their distances, and another
kernel adds up the distances of each bucket.
"""

import torch
import triton
import triton.language as tl

from .attention import (
    BLOCK_B,
    LN_2,
    LOG2_E,
    find_block,
    head_rows,
    other_rows,
    probabilities,
    rows_of,
    seen,
    sequence_head,
    slots_of,
    steps_of,
    store_head_rows,
    with_near_heads,
)
from .common import block_of, on_device
from .philox import dropout_settings, keep_scores

STEP = 32
"""Distances of a bucket added up together."""
BLOCK_M = 256
"""Places of the bucket table looked at together."""


@triton.jit
def table_rows(
    ptr,
    buckets_ptr,
    distance,
    reach,
    row_step,
    head_step,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A table's rows `(distances, BLOCK_D)` of one head; zeros beyond D."""
    d = tl.arange(0, BLOCK_D)
    place = tl.minimum(tl.maximum(distance, -reach), reach) + reach
    bucket = tl.load(buckets_ptr + place).to(tl.int64)
    inside = (place >= 0)[:, None] & (d < D)[None, :]
    at = bucket[:, None] * row_step + tl.program_id(1) * head_step + d[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def position_tables(
    q,
    k,
    position_key_ptr,
    position_query_ptr,
    buckets_ptr,
    offset,
    reach,
    position_key_row,
    position_key_head,
    position_query_row,
    position_query_head,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Position keys and queries `(2·BLOCK, BLOCK_D)` of a tile whose first query is `offset` behind
    its first key; the distance of query and key falls along the keys and rises along the queries.
    q and k stand for tables that are not there."""
    step = tl.arange(0, 2 * BLOCK)
    key_table, query_table = q, k
    if HAS_KEY:
        key_table = table_rows(
            position_key_ptr,
            buckets_ptr,
            offset + BLOCK - step,
            reach,
            position_key_row,
            position_key_head,
            D,
            BLOCK_D,
        )
    if HAS_QUERY:
        query_table = table_rows(
            position_query_ptr,
            buckets_ptr,
            offset - BLOCK + step,
            reach,
            position_query_row,
            position_query_head,
            D,
            BLOCK_D,
        )
    return key_table, query_table


@triton.jit
def to_pairs(by_distance, BLOCK: tl.constexpr):
    """(BLOCK, 2·BLOCK) of rows and distances to rows and columns: column c of row r stands at
    c - r + BLOCK."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.gather(by_distance, column - row + BLOCK, 1)


@triton.jit
def to_distances(by_pair, BLOCK: tl.constexpr):
    """The way back, zeros where a row has no such distance."""
    row, distance = tl.arange(0, BLOCK)[:, None], tl.arange(0, 2 * BLOCK)[None, :]
    column = distance + row - BLOCK
    inside = (column >= 0) & (column < BLOCK)
    return tl.where(inside, tl.gather(by_pair, tl.where(inside, column, 0), 1), 0.0)


@triton.jit
def position_scores(
    q,
    k,
    key_table,
    query_table,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores (queries, keys) of a tile with the terms of positions, not scaled."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_KEY:
        by_query = tl.dot(q, tl.trans(key_table), input_precision=PRECISION)
        scores += to_pairs(by_query, BLOCK)
    if HAS_QUERY:
        by_key = tl.dot(k, tl.trans(query_table), input_precision=PRECISION)
        scores += tl.trans(to_pairs(by_key, BLOCK))
    return scores


@triton.jit(do_not_specialize=["threshold", "site"])
def _disentangled_attention_fwd_kernel(
    q_ptr,  # (T, N, D)
    k_ptr,  # (T, N, D)
    v_ptr,  # (T, N, D)
    position_key_ptr,  # (R, N, D), unread without HAS_KEY
    position_query_ptr,  # (R, N, D), unread without HAS_QUERY
    out_ptr,  # (T, N, D), contiguous
    lse_ptr,  # fp32 (N, T)
    buckets_ptr,  # int32 (2 M + 1,)
    cu_seqlens_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    reach,
    num_sequences,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    position_key_row,
    position_key_head,
    position_query_row,
    position_query_head,
    softmax_scale,
    threshold,
    dropout_scale,
    site,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    sequence, start, length, first = find_block(
        cu_seqlens_ptr, num_sequences, num_rows, BLOCK, BLOCK_B
    )
    if first >= length:
        return
    start_k, num_keys = other_rows(cu_seqlens_ptr, sequence, num_sequences)
    query = first + tl.arange(0, BLOCK)
    q = head_rows(q_ptr, start, query, length, q_row, q_head, D, BLOCK_D)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for first_key in range(0, num_keys, BLOCK):
        key = first_key + tl.arange(0, BLOCK)
        k = head_rows(k_ptr, start_k, key, num_keys, k_row, k_head, D, BLOCK_D)
        key_table, query_table = position_tables(
            q,
            k,
            position_key_ptr,
            position_query_ptr,
            buckets_ptr,
            first - first_key,
            reach,
            position_key_row,
            position_key_head,
            position_query_row,
            position_query_head,
            HAS_KEY,
            HAS_QUERY,
            D,
            BLOCK_D,
            BLOCK,
        )
        scores = position_scores(
            q, k, key_table, query_table, HAS_KEY, HAS_QUERY, PRECISION, BLOCK
        ) * (softmax_scale * LOG2_E)
        scores = tl.where(seen(query, key, num_keys, 0, 0, False), scores, float("-inf"))
        # There is a key in every block, so the peak is finite from the first on.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            place = sequence_head(sequence, num_heads)
            keep = keep_scores(
                rng_state_ptr, first, first_key, place, threshold, site, BLOCK, BLOCK
            )
            weights = tl.where(keep, weights, 0.0)
        v = head_rows(v_ptr, start_k, key, num_keys, v_row, v_head, D, BLOCK_D)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        peak = new_peak
    idle = total == 0.0
    total = tl.where(idle, 1.0, total)
    factor = tl.where(idle, 0.0, dropout_scale / total)
    store_head_rows(
        out_ptr, out * factor[:, None], start, query, length, num_heads * D, D, D, BLOCK_D
    )
    lse = tl.where(idle, float("-inf"), (peak + tl.log2(total)) * LN_2)
    at = head.to(tl.int64) * num_rows + start + query
    tl.store(lse_ptr + at, lse, mask=query < length)


@triton.jit
def tile_gradients(
    q,
    k,
    v,
    dout,
    key_table,
    query_table,
    lse,
    delta,
    visible,
    rng_state_ptr,
    first,
    first_key,
    place,
    softmax_scale,
    threshold,
    dropout_scale,
    site,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a tile (queries, keys): what multiplied v, and the gradient of the scores, unscaled."""
    scores = position_scores(q, k, key_table, query_table, HAS_KEY, HAS_QUERY, PRECISION, BLOCK)
    weights = probabilities(scores * (softmax_scale * LOG2_E), lse, visible)
    dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    dropped = weights
    if DROPOUT:
        keep = keep_scores(rng_state_ptr, first, first_key, place, threshold, site, BLOCK, BLOCK)
        dropped = tl.where(keep, weights * dropout_scale, 0.0)
        dweights = tl.where(keep, dweights * dropout_scale, 0.0)
    return dropped, weights * (dweights - delta[:, None])


@triton.jit(do_not_specialize=["threshold", "site"])
def _disentangled_attention_bwd_dq_kernel(
    dout_ptr,  # (T, N, D), contiguous
    q_ptr,  # (T, N, D)
    k_ptr,  # (T, N, D)
    v_ptr,  # (T, N, D)
    position_key_ptr,  # (R, N, D), unread without HAS_KEY
    position_query_ptr,  # (R, N, D), unread without HAS_QUERY
    out_ptr,  # (T, N, D), contiguous
    lse_ptr,  # fp32 (N, T)
    dq_ptr,  # (T, N, D), contiguous
    delta_ptr,  # fp32 (N, T): the row sums of P·dP, for the other kernels
    buckets_ptr,  # int32 (2 M + 1,)
    cu_seqlens_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    reach,
    num_sequences,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    position_key_row,
    position_key_head,
    position_query_row,
    position_query_head,
    softmax_scale,
    threshold,
    dropout_scale,
    site,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    sequence, start, length, first = find_block(
        cu_seqlens_ptr, num_sequences, num_rows, BLOCK, BLOCK_B
    )
    if first >= length:
        return
    start_k, num_keys = other_rows(cu_seqlens_ptr, sequence, num_sequences)
    query = first + tl.arange(0, BLOCK)
    row_step = num_heads * D
    q = head_rows(q_ptr, start, query, length, q_row, q_head, D, BLOCK_D)
    dout = head_rows(dout_ptr, start, query, length, row_step, D, D, BLOCK_D)
    out = head_rows(out_ptr, start, query, length, row_step, D, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = head.to(tl.int64) * num_rows + start + query
    tl.store(delta_ptr + at, delta, mask=query < length)
    lse = tl.load(lse_ptr + at, mask=query < length, other=float("inf")) * LOG2_E
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for first_key in range(0, num_keys, BLOCK):
        key = first_key + tl.arange(0, BLOCK)
        k = head_rows(k_ptr, start_k, key, num_keys, k_row, k_head, D, BLOCK_D)
        v = head_rows(v_ptr, start_k, key, num_keys, v_row, v_head, D, BLOCK_D)
        key_table, query_table = position_tables(
            q,
            k,
            position_key_ptr,
            position_query_ptr,
            buckets_ptr,
            first - first_key,
            reach,
            position_key_row,
            position_key_head,
            position_query_row,
            position_query_head,
            HAS_KEY,
            HAS_QUERY,
            D,
            BLOCK_D,
            BLOCK,
        )
        _, dscores = tile_gradients(
            q,
            k,
            v,
            dout,
            key_table,
            query_table,
            lse,
            delta,
            seen(query, key, num_keys, 0, 0, False),
            rng_state_ptr,
            first,
            first_key,
            sequence_head(sequence, num_heads),
            softmax_scale,
            threshold,
            dropout_scale,
            site,
            HAS_KEY,
            HAS_QUERY,
            DROPOUT,
            PRECISION,
            BLOCK,
        )
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
        if HAS_KEY:
            by_distance = to_distances(dscores, BLOCK).to(k.dtype)
            dq = tl.dot(by_distance, key_table, dq, input_precision=PRECISION)
    store_head_rows(dq_ptr, dq * softmax_scale, start, query, length, row_step, D, D, BLOCK_D)


@triton.jit(do_not_specialize=["threshold", "site"])
def _disentangled_attention_bwd_dkv_kernel(
    dout_ptr,  # (T, N, D), contiguous
    q_ptr,  # (T, N, D)
    k_ptr,  # (T, N, D)
    v_ptr,  # (T, N, D)
    position_key_ptr,  # (R, N, D), unread without HAS_KEY
    position_query_ptr,  # (R, N, D), unread without HAS_QUERY
    lse_ptr,  # fp32 (N, T)
    delta_ptr,  # fp32 (N, T)
    dk_ptr,  # (T, N, D), contiguous
    dv_ptr,  # (T, N, D), contiguous
    buckets_ptr,  # int32 (2 M + 1,)
    cu_seqlens_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    reach,
    num_sequences,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    position_key_row,
    position_key_head,
    position_query_row,
    position_query_head,
    softmax_scale,
    threshold,
    dropout_scale,
    site,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    sequence, start, length, first_key = find_block(
        cu_seqlens_ptr, num_sequences, num_rows, BLOCK, BLOCK_B
    )
    if first_key >= length:
        return
    start_q, num_queries = other_rows(cu_seqlens_ptr, sequence, num_sequences)
    key = first_key + tl.arange(0, BLOCK)
    row_step = num_heads * D
    k = head_rows(k_ptr, start, key, length, k_row, k_head, D, BLOCK_D)
    v = head_rows(v_ptr, start, key, length, v_row, v_head, D, BLOCK_D)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for first in range(0, num_queries, BLOCK):
        query = first + tl.arange(0, BLOCK)
        q = head_rows(q_ptr, start_q, query, num_queries, q_row, q_head, D, BLOCK_D)
        dout = head_rows(dout_ptr, start_q, query, num_queries, row_step, D, D, BLOCK_D)
        at = head.to(tl.int64) * num_rows + start_q + query
        # Queries that are not there have scores all the same, of the keys beside position_query.
        lse = tl.load(lse_ptr + at, mask=query < num_queries, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + at, mask=query < num_queries, other=0.0)
        key_table, query_table = position_tables(
            q,
            k,
            position_key_ptr,
            position_query_ptr,
            buckets_ptr,
            first - first_key,
            reach,
            position_key_row,
            position_key_head,
            position_query_row,
            position_query_head,
            HAS_KEY,
            HAS_QUERY,
            D,
            BLOCK_D,
            BLOCK,
        )
        dropped, dscores = tile_gradients(
            q,
            k,
            v,
            dout,
            key_table,
            query_table,
            lse,
            delta,
            seen(query, key, length, 0, 0, False),
            rng_state_ptr,
            first,
            first_key,
            sequence_head(sequence, num_heads),
            softmax_scale,
            threshold,
            dropout_scale,
            site,
            HAS_KEY,
            HAS_QUERY,
            DROPOUT,
            PRECISION,
            BLOCK,
        )
        dv = tl.dot(tl.trans(dropped.to(v.dtype)), dout, dv, input_precision=PRECISION)
        turned = tl.trans(dscores)
        dk = tl.dot(turned.to(k.dtype), q, dk, input_precision=PRECISION)
        if HAS_QUERY:
            by_distance = to_distances(turned, BLOCK).to(k.dtype)
            dk = tl.dot(by_distance, query_table, dk, input_precision=PRECISION)
    store_head_rows(dk_ptr, dk * softmax_scale, start, key, length, row_step, D, D, BLOCK_D)
    store_head_rows(dv_ptr, dv, start, key, length, row_step, D, D, BLOCK_D)


@triton.jit(do_not_specialize=["threshold", "site"])
def _disentangled_attention_bwd_positions_kernel(
    dout_ptr,  # (T, N, D), contiguous
    q_ptr,  # (T, N, D)
    k_ptr,  # (T, N, D)
    v_ptr,  # (T, N, D)
    position_key_ptr,  # (R, N, D), unread without HAS_KEY
    position_query_ptr,  # (R, N, D), unread without HAS_QUERY
    lse_ptr,  # fp32 (N, T)
    delta_ptr,  # fp32 (N, T)
    sums_ptr,  # fp32 (diagonals, 2 BLOCK, N, D)
    buckets_ptr,  # int32 (2 M + 1,)
    cu_seqlens_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    reach,
    num_sequences,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    position_key_row,
    position_key_head,
    position_query_row,
    position_query_head,
    softmax_scale,
    threshold,
    dropout_scale,
    site,
    OF_KEYS: tl.constexpr,
    HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of one table, for both at once do not fit the registers. A program has the tiles of all
    sequences whose queries' block is `diagonal` blocks behind the keys': they share their rows of
    the tables."""
    head = tl.program_id(1)
    diagonal = tl.program_id(0) - tl.num_programs(0) // 2
    row_step, offset = num_heads * D, diagonal * BLOCK
    sums = tl.zeros([2 * BLOCK, BLOCK_D], tl.float32)
    key_table, query_table = position_tables(
        sums,
        sums,
        position_key_ptr,
        position_query_ptr,
        buckets_ptr,
        offset,
        reach,
        position_key_row,
        position_key_head,
        position_query_row,
        position_query_head,
        HAS_KEY,
        HAS_QUERY,
        D,
        BLOCK_D,
        BLOCK,
    )
    for sequence in range(0, num_sequences):
        start, length = rows_of(cu_seqlens_ptr, sequence, num_sequences, num_rows)
        blocks = tl.cdiv(length, BLOCK)
        for block in range(tl.maximum(diagonal, 0), tl.minimum(blocks, blocks + diagonal)):
            first, first_key = block * BLOCK, block * BLOCK - offset
            query, key = first + tl.arange(0, BLOCK), first_key + tl.arange(0, BLOCK)
            q = head_rows(q_ptr, start, query, length, q_row, q_head, D, BLOCK_D)
            k = head_rows(k_ptr, start, key, length, k_row, k_head, D, BLOCK_D)
            v = head_rows(v_ptr, start, key, length, v_row, v_head, D, BLOCK_D)
            dout = head_rows(dout_ptr, start, query, length, row_step, D, D, BLOCK_D)
            at = head.to(tl.int64) * num_rows + start + query
            lse = tl.load(lse_ptr + at, mask=query < length, other=float("inf")) * LOG2_E
            delta = tl.load(delta_ptr + at, mask=query < length, other=0.0)
            _, dscores = tile_gradients(
                q,
                k,
                v,
                dout,
                key_table,
                query_table,
                lse,
                delta,
                seen(query, key, length, 0, 0, False),
                rng_state_ptr,
                first,
                first_key,
                sequence_head(sequence, num_heads),
                softmax_scale,
                threshold,
                dropout_scale,
                site,
                HAS_KEY,
                HAS_QUERY,
                DROPOUT,
                PRECISION,
                BLOCK,
            )
            if OF_KEYS:
                by_distance = tl.trans(to_distances(dscores, BLOCK).to(q.dtype))
                sums = tl.dot(by_distance, q, sums, input_precision=PRECISION)
            else:
                by_distance = tl.trans(to_distances(tl.trans(dscores), BLOCK).to(k.dtype))
                sums = tl.dot(by_distance, k, sums, input_precision=PRECISION)
    row = tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    d = tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * num_heads + head)[:, None] * D + d[None, :]
    tl.store(sums_ptr + at, sums * softmax_scale, mask=(row >= 0)[:, None] & (d < D)[None, :])


@triton.jit
def _sum_distances_kernel(
    sums_ptr,  # fp32 (diagonals, 2 BLOCK, N, D)
    dposition_ptr,  # (R, N, D), contiguous
    buckets_ptr,  # int32 (2 M + 1,), rising
    reach,
    num_blocks,
    num_heads,
    FALLING: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A program has a bucket and a head; the distances of a bucket are neighbours. Each distance
    stands in the sums of two diagonals."""
    bucket, head = tl.program_id(0), tl.program_id(1)
    below, up_to = -reach, -reach - 1
    for first in range(0, 2 * reach + 1, BLOCK_M):
        place = first + tl.arange(0, BLOCK_M)
        inside = place < 2 * reach + 1
        found = tl.load(buckets_ptr + place, mask=inside, other=0)
        below += tl.sum((inside & (found < bucket)).to(tl.int32), 0)
        up_to += tl.sum((inside & (found <= bucket)).to(tl.int32), 0)
    furthest = num_blocks * BLOCK - 1
    # The buckets at the ends have all distances beyond them too.
    low = tl.where(below == -reach, -furthest, tl.maximum(below, -furthest))
    high = tl.where(up_to == reach, furthest, tl.minimum(up_to, furthest))
    high = tl.where(up_to < below, low - 1, high)
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([STEP, BLOCK_D], tl.float32)
    for first in range(low, high + 1, STEP):
        distance = first + tl.arange(0, STEP)
        # Rounded down, also below 0.
        block = (distance + num_blocks * BLOCK) // BLOCK - num_blocks
        rest = distance - block * BLOCK
        for upper in tl.static_range(2):
            diagonal = block + upper + num_blocks - 1
            row = rest + BLOCK - upper * BLOCK
            if FALLING:
                row = BLOCK - rest + upper * BLOCK
            inside = (distance <= high) & (diagonal >= 0) & (diagonal < 2 * num_blocks - 1)
            inside = inside & ((rest > 0) | (upper == 0))
            at = ((diagonal * 2 * BLOCK + row).to(tl.int64) * num_heads + head)[:, None] * D
            mask = inside[:, None] & (d < D)[None, :]
            total += tl.load(sums_ptr + at + d[None, :], mask=mask, other=0.0)
    at = (bucket.to(tl.int64) * num_heads + head) * D + d
    value = tl.sum(total, 0).to(dposition_ptr.dtype.element_ty)
    tl.store(dposition_ptr + at, value, mask=d < D)


def blocks(head_dim: int, dtype: torch.dtype, kernel: str, amd: bool) -> dict[str, int]:
    """Tile size, warps, stages and most registers, such that nothing is spilled: the shifts hold
    three tiles at once, the sums of positions another of twice the rows.

    Args:
        kernel: `fwd`, `bwd_dq`, `bwd_dkv` or `bwd_positions`.
        amd: on AMD four warps may have twice the registers each that eight have.
    """
    sizes = {"BLOCK_D": max(16, block_of(head_dim, 128)), "num_stages": 1}
    single, sums = dtype == torch.float32, kernel == "bwd_positions"
    sizes["BLOCK"] = 16 if single or sums else 32
    if amd:
        return {**sizes, "num_warps": 4}
    wide = kernel == "bwd_dkv" or (single and kernel != "fwd")
    # Where no limit is named, ptxas spills a few to get another program onto an SM.
    return {**sizes, "num_warps": 8 if wide else 4, "maxnreg": 168 if sums else 255}


def _settings(q, position_key, position_query, softmax_scale, dropout_p, site):
    """Scalars the kernels share, and the compile-time constants of each by its name."""
    threshold, scale = dropout_settings(dropout_p)
    shared = {
        "HAS_KEY": position_key is not None,
        "HAS_QUERY": position_query is not None,
        "DROPOUT": threshold > 0,
        "PRECISION": "ieee",
        "D": q.shape[-1],
    }

    def constants(kernel: str) -> dict:
        sizes = blocks(q.shape[-1], q.dtype, kernel, torch.version.hip is not None)
        search = {} if kernel == "bwd_positions" else {"BLOCK_B": BLOCK_B}
        return {**shared, **sizes, **search}

    return (softmax_scale, threshold, scale, site), constants


def disentangled_attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    buckets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the forward; arguments and results as the op `disentangled_attention_fwd`."""
    scalars, constants = _settings(q, position_key, position_query, softmax_scale, dropout_p, site)
    tables = (q if t is None else t for t in (position_key, position_query))
    q, k, v, *tables = with_near_heads(q, k, v, *tables)
    num_rows, num_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((num_heads, num_rows), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    num_sequences, constants = cu_seqlens.shape[0] - 1, constants("fwd")
    grid = (slots_of(q, constants["BLOCK"], num_sequences), num_heads)
    with on_device(q):
        _disentangled_attention_fwd_kernel[grid](
            q,
            k,
            v,
            *tables,
            out,
            lse,
            buckets,
            cu_seqlens,
            cu_seqlens if rng_state is None else rng_state,
            buckets.shape[0] // 2,
            num_sequences,
            num_rows,
            num_heads,
            *steps_of(q, k, v, *tables),
            *scalars,
            **constants,
        )
    return out, lse


def disentangled_attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    buckets: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    softmax_scale: float,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Launches the backward; arguments and results as the op `disentangled_attention_bwd`."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    given = (position_key, position_query)
    if q.numel() == 0:
        return dq, dk, dv, *(q.new_zeros((0,) if t is None else t.shape) for t in given)
    scalars, constants = _settings(q, *given, softmax_scale, dropout_p, site)
    q, k, v, *tables = with_near_heads(q, k, v, *(q if t is None else t for t in given))
    dout, out = dout.contiguous(), out.contiguous()
    delta = torch.empty_like(softmax_lse)
    num_rows, num_heads, head_dim = q.shape
    num_sequences, reach = cu_seqlens.shape[0] - 1, buckets.shape[0] // 2
    block = constants("bwd_positions")["BLOCK"]
    num_blocks = max(1, triton.cdiv(max_seqlen, block))
    inputs = (dout, q, k, v, *tables)
    shared = (
        buckets,
        cu_seqlens,
        cu_seqlens if rng_state is None else rng_state,
        reach,
        num_sequences,
        num_rows,
        num_heads,
        *steps_of(q, k, v, *tables),
        *scalars,
    )

    def slots(kernel: str) -> tuple[int, int]:
        return slots_of(q, constants(kernel)["BLOCK"], num_sequences), num_heads

    with on_device(q):
        _disentangled_attention_bwd_dq_kernel[slots("bwd_dq")](
            *inputs, out, softmax_lse, dq, delta, *shared, **constants("bwd_dq")
        )
        _disentangled_attention_bwd_dkv_kernel[slots("bwd_dkv")](
            *inputs, softmax_lse, delta, dk, dv, *shared, **constants("bwd_dkv")
        )
        gradients = [q.new_empty(0), q.new_empty(0)]
        for i, table in enumerate(given):
            if table is None:
                continue
            diagonals = 2 * num_blocks - 1
            shape = (diagonals, 2 * block, num_heads, head_dim)
            sums = q.new_empty(shape, dtype=torch.float32)
            _disentangled_attention_bwd_positions_kernel[(diagonals, num_heads)](
                *inputs,
                softmax_lse,
                delta,
                sums,
                *shared,
                OF_KEYS=i == 0,
                **constants("bwd_positions"),
            )
            gradients[i] = _sum_distances(table, sums, buckets, num_blocks, block, i == 0)
    return dq, dk, dv, *gradients


def _sum_distances(table, sums, buckets, num_blocks, block, falling) -> torch.Tensor:
    """The gradient of a table's rows from sums by diagonal and distance."""
    gradient = torch.empty_like(table, memory_format=torch.contiguous_format)
    rows, num_heads, head_dim = table.shape
    with on_device(table):
        _sum_distances_kernel[(rows, num_heads)](
            sums,
            gradient,
            buckets,
            buckets.shape[0] // 2,
            num_blocks,
            num_heads,
            FALLING=falling,
            D=head_dim,
            BLOCK_D=max(16, block_of(head_dim, 128)),
            BLOCK=block,
            STEP=STEP,
            BLOCK_M=BLOCK_M,
        )
    return gradient
