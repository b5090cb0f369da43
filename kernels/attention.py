"""Softmax attention over packed sequences in Triton, forward and backward.

Letters: Tq query rows, Tk key rows, N heads, D head dim, B sequences.

The forward is that of Dao 2023, "FlashAttention-2", section 3.1; the backward recomputes the
probabilities from softmax_lse (algorithm 2). No sum is made by atomics, so that every run gives the
same bits: for short sequences one program owns a head of a sequence, with all its gradients; for
others two kernels, one that owns queries and one that owns keys, make each tile of scores twice.

One launch serves sequences of any lengths, and the host never learns them. Sequence i takes the
slots from cu_seqlens[i] // BLOCK + i on; there are always enough of them for its blocks, since
floor(a + b) - floor(a) + 1 >= ceil(b), so the number of programs follows from the shapes alone.
Slots that are left over have nothing to do, and those behind the last sequence clear idle rows.
"""

import functools

import torch
import triton
import triton.language as tl

from .common import block_of, on_device
from .philox import dropout_settings, keep_scores

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NO_BOUND = 1 << 30
LONGEST_IN_ONE_PASS = 512
"""Up to here dq of a head, fp32, is at most 128 KiB and stays in L2 between blocks of keys."""
BLOCK_B = 256
"""Sequences looked at together when a program finds its own."""


@triton.jit
def rows_of(cu_seqlens_ptr, sequence, num_sequences, num_rows):
    """First row and number of rows of a sequence; of the idle rows where it is `num_sequences`."""
    start = tl.load(cu_seqlens_ptr + sequence)
    following = tl.load(cu_seqlens_ptr + tl.minimum(sequence + 1, num_sequences))
    return start, tl.where(sequence == num_sequences, num_rows, following) - start


@triton.jit
def find_block(cu_seqlens_ptr, num_sequences, num_rows, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr):
    """Of this program's slot: its sequence (`num_sequences`: the idle rows), that one's first row
    and length, and the block's first row within it."""
    slot = tl.program_id(0)
    sequence = 0
    for first in range(0, num_sequences, BLOCK_B):
        index = first + tl.arange(0, BLOCK_B) + 1
        end = tl.load(cu_seqlens_ptr + index, mask=index <= num_sequences, other=0)
        passed = (index <= num_sequences) & (end // BLOCK + index <= slot)
        sequence += tl.sum(passed.to(tl.int32), 0)
    start, length = rows_of(cu_seqlens_ptr, sequence, num_sequences, num_rows)
    first = (slot - start // BLOCK - sequence) * BLOCK
    return sequence, start, length, first


@triton.jit
def other_rows(cu_seqlens_ptr, sequence, num_sequences):
    """First row and length of the same sequence on the other side; none for idle rows."""
    start, length = 0, 0
    if sequence < num_sequences:
        start = tl.load(cu_seqlens_ptr + sequence)
        length = tl.load(cu_seqlens_ptr + sequence + 1) - start
    return start, length


@triton.jit
def rows_in_sight(
    first, length, before, after, WINDOW: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Where the loop over the other side begins, a multiple of STEP, and ends, for the rows
    [first, first + BLOCK): they see `before` and `after` beyond their own place."""
    low, high = 0, length
    if WINDOW:
        low = tl.maximum(0, first - before) // STEP * STEP
        high = tl.minimum(length, first + BLOCK + after)
    return low, high


@triton.jit
def sequence_head(sequence, num_heads):
    """The word of the dropout stream; made in the loop, for kept over it it costs registers."""
    return tl.cast(sequence, tl.int64) * num_heads + tl.program_id(1)


@triton.jit
def head_rows(ptr, start, row, length, row_step, head_step, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `start + row` of one head `(rows, BLOCK_D)`; zeros beyond the length and beyond D."""
    d = tl.arange(0, BLOCK_D)
    inside = (row < length)[:, None] & (d < D)[None, :]
    at = (start + row).to(tl.int64)[:, None] * row_step + tl.program_id(1) * head_step + d[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def store_head_rows(
    ptr, values, start, row, length, row_step, head_step, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    d = tl.arange(0, BLOCK_D)
    inside = (row < length)[:, None] & (d < D)[None, :]
    at = (start + row).to(tl.int64)[:, None] * row_step + tl.program_id(1) * head_step + d[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def seen(query, key, num_keys, left, right, WINDOW: tl.constexpr):
    """bool (queries, keys): which keys of the sequence a query sees."""
    # In the scores' shape at once: a row that is broadcast later spills registers on sm_80.
    visible = (key < num_keys)[None, :] & (query >= 0)[:, None]
    if WINDOW:
        distance = key[None, :] - query[:, None]
        visible = visible & (distance >= -left) & (distance <= right)
    return visible


@triton.jit(do_not_specialize=["threshold", "site"])
def _attention_fwd_kernel(
    q_ptr,  # (Tq, N, D)
    k_ptr,  # (Tk, N, D)
    v_ptr,  # (Tk, N, D)
    out_ptr,  # (Tq, N, D), contiguous
    lse_ptr,  # fp32 (N, Tq)
    cu_seqlens_q_ptr,  # int32 (B + 1,)
    cu_seqlens_k_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    num_sequences,
    num_rows_q,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    softmax_scale,
    left,
    right,
    threshold,
    dropout_scale,
    site,
    WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    sequence, start_q, num_queries, first = find_block(
        cu_seqlens_q_ptr, num_sequences, num_rows_q, BLOCK_Q, BLOCK_B
    )
    if first >= num_queries:
        return
    start_k, num_keys = other_rows(cu_seqlens_k_ptr, sequence, num_sequences)
    query = first + tl.arange(0, BLOCK_Q)
    q = head_rows(q_ptr, start_q, query, num_queries, q_row, q_head, D, BLOCK_D)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    out = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    low, high = rows_in_sight(first, num_keys, left, right, WINDOW, BLOCK_Q, BLOCK_K)
    for first_key in range(low, high, BLOCK_K):
        key = first_key + tl.arange(0, BLOCK_K)
        k = head_rows(k_ptr, start_k, key, num_keys, k_row, k_head, D, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (softmax_scale * LOG2_E)
        scores = tl.where(seen(query, key, num_keys, left, right, WINDOW), scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Rows that have seen no key yet keep finite exponents.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            place = sequence_head(sequence, num_heads)
            keep = keep_scores(
                rng_state_ptr, first, first_key, place, threshold, site, BLOCK_Q, BLOCK_K
            )
            weights = tl.where(keep, weights, 0.0)
        v = head_rows(v_ptr, start_k, key, num_keys, v_row, v_head, D, BLOCK_D)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        peak = new_peak
    blind = total == 0.0
    total = tl.where(blind, 1.0, total)
    factor = tl.where(blind, 0.0, dropout_scale / total)
    row_step = num_heads * D
    store_head_rows(
        out_ptr, out * factor[:, None], start_q, query, num_queries, row_step, D, D, BLOCK_D
    )
    lse = tl.where(blind, float("-inf"), (peak + tl.log2(total)) * LN_2)
    at = head.to(tl.int64) * num_rows_q + start_q + query
    tl.store(lse_ptr + at, lse, mask=query < num_queries)


@triton.jit
def probabilities(scores, lse, visible):
    """exp(scores - lse), scores and lse in powers of two; 0 where nothing is seen."""
    finite = tl.where(lse == float("-inf"), 0.0, lse)
    return tl.where(visible, tl.exp2(scores - finite[:, None]), 0.0)


@triton.jit
def tile_gradients(
    q,
    k,
    v,
    dout,
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
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of a tile (queries, keys): what multiplied v, and the gradient of the scores, unscaled."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (softmax_scale * LOG2_E)
    weights = probabilities(scores, lse, visible)
    dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    dropped = weights
    if DROPOUT:
        keep = keep_scores(
            rng_state_ptr, first, first_key, place, threshold, site, BLOCK_Q, BLOCK_K
        )
        dropped = tl.where(keep, weights * dropout_scale, 0.0)
        dweights = tl.where(keep, dweights * dropout_scale, 0.0)
    return dropped, weights * (dweights - delta[:, None])


@triton.jit(do_not_specialize=["threshold", "site"])
def _attention_bwd_dq_kernel(
    dout_ptr,  # (Tq, N, D), contiguous
    q_ptr,  # (Tq, N, D)
    k_ptr,  # (Tk, N, D)
    v_ptr,  # (Tk, N, D)
    out_ptr,  # (Tq, N, D), contiguous
    lse_ptr,  # fp32 (N, Tq)
    dq_ptr,  # (Tq, N, D)
    delta_ptr,  # fp32 (N, Tq): the row sums of P·dP, for the other kernel
    cu_seqlens_q_ptr,  # int32 (B + 1,)
    cu_seqlens_k_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    num_sequences,
    num_rows_q,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dq_row,
    dq_head,
    softmax_scale,
    left,
    right,
    threshold,
    dropout_scale,
    site,
    WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    sequence, start_q, num_queries, first = find_block(
        cu_seqlens_q_ptr, num_sequences, num_rows_q, BLOCK_Q, BLOCK_B
    )
    if first >= num_queries:
        return
    start_k, num_keys = other_rows(cu_seqlens_k_ptr, sequence, num_sequences)
    query = first + tl.arange(0, BLOCK_Q)
    row_step = num_heads * D
    q = head_rows(q_ptr, start_q, query, num_queries, q_row, q_head, D, BLOCK_D)
    dout = head_rows(dout_ptr, start_q, query, num_queries, row_step, D, D, BLOCK_D)
    out = head_rows(out_ptr, start_q, query, num_queries, row_step, D, D, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    at = head.to(tl.int64) * num_rows_q + start_q + query
    tl.store(delta_ptr + at, delta, mask=query < num_queries)
    lse = tl.load(lse_ptr + at, mask=query < num_queries, other=float("-inf")) * LOG2_E
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    low, high = rows_in_sight(first, num_keys, left, right, WINDOW, BLOCK_Q, BLOCK_K)
    for first_key in range(low, high, BLOCK_K):
        key = first_key + tl.arange(0, BLOCK_K)
        k = head_rows(k_ptr, start_k, key, num_keys, k_row, k_head, D, BLOCK_D)
        v = head_rows(v_ptr, start_k, key, num_keys, v_row, v_head, D, BLOCK_D)
        _, dscores = tile_gradients(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            seen(query, key, num_keys, left, right, WINDOW),
            rng_state_ptr,
            first,
            first_key,
            sequence_head(sequence, num_heads),
            softmax_scale,
            threshold,
            dropout_scale,
            site,
            DROPOUT,
            PRECISION,
            BLOCK_Q,
            BLOCK_K,
        )
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)
    store_head_rows(
        dq_ptr, dq * softmax_scale, start_q, query, num_queries, dq_row, dq_head, D, BLOCK_D
    )


@triton.jit(do_not_specialize=["threshold", "site"])
def _attention_bwd_dkv_kernel(
    dout_ptr,  # (Tq, N, D), contiguous
    q_ptr,  # (Tq, N, D)
    k_ptr,  # (Tk, N, D)
    v_ptr,  # (Tk, N, D)
    lse_ptr,  # fp32 (N, Tq)
    delta_ptr,  # fp32 (N, Tq)
    dk_ptr,  # (Tk, N, D)
    dv_ptr,  # (Tk, N, D)
    cu_seqlens_q_ptr,  # int32 (B + 1,)
    cu_seqlens_k_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    num_sequences,
    num_rows_q,
    num_rows_k,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dk_row,
    dk_head,
    softmax_scale,
    left,
    right,
    threshold,
    dropout_scale,
    site,
    WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    head = tl.program_id(1)
    sequence, start_k, num_keys, first_key = find_block(
        cu_seqlens_k_ptr, num_sequences, num_rows_k, BLOCK_K, BLOCK_B
    )
    if first_key >= num_keys:
        return
    start_q, num_queries = other_rows(cu_seqlens_q_ptr, sequence, num_sequences)
    key = first_key + tl.arange(0, BLOCK_K)
    k = head_rows(k_ptr, start_k, key, num_keys, k_row, k_head, D, BLOCK_D)
    v = head_rows(v_ptr, start_k, key, num_keys, v_row, v_head, D, BLOCK_D)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    # A key is seen by the queries that see it: the window the other way round.
    low, high = rows_in_sight(first_key, num_queries, right, left, WINDOW, BLOCK_K, BLOCK_Q)
    for first in range(low, high, BLOCK_Q):
        query = first + tl.arange(0, BLOCK_Q)
        q = head_rows(q_ptr, start_q, query, num_queries, q_row, q_head, D, BLOCK_D)
        dout = head_rows(dout_ptr, start_q, query, num_queries, num_heads * D, D, D, BLOCK_D)
        at = head.to(tl.int64) * num_rows_q + start_q + query
        lse = tl.load(lse_ptr + at, mask=query < num_queries, other=float("-inf")) * LOG2_E
        delta = tl.load(delta_ptr + at, mask=query < num_queries, other=0.0)
        dropped, dscores = tile_gradients(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            seen(query, key, num_keys, left, right, WINDOW),
            rng_state_ptr,
            first,
            first_key,
            sequence_head(sequence, num_heads),
            softmax_scale,
            threshold,
            dropout_scale,
            site,
            DROPOUT,
            PRECISION,
            BLOCK_Q,
            BLOCK_K,
        )
        dv = tl.dot(tl.trans(dropped.to(v.dtype)), dout, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(dscores.to(k.dtype)), q, dk, input_precision=PRECISION)
    store_head_rows(dk_ptr, dk * softmax_scale, start_k, key, num_keys, dk_row, dk_head, D, BLOCK_D)
    store_head_rows(dv_ptr, dv, start_k, key, num_keys, dk_row, dk_head, D, BLOCK_D)


@triton.jit(do_not_specialize=["threshold", "site"])
def _attention_bwd_kernel(
    dout_ptr,  # (Tq, N, D), contiguous
    q_ptr,  # (Tq, N, D)
    k_ptr,  # (Tk, N, D)
    v_ptr,  # (Tk, N, D)
    out_ptr,  # (Tq, N, D), contiguous
    lse_ptr,  # fp32 (N, Tq)
    dq_ptr,  # (Tq, N, D)
    dk_ptr,  # (Tk, N, D)
    dv_ptr,  # (Tk, N, D)
    delta_ptr,  # fp32 (N, Tq), workspace: the row sums of P·dP
    dq_sum_ptr,  # fp32 (Tq, N, D), workspace: dq of the key blocks so far
    cu_seqlens_q_ptr,  # int32 (B + 1,)
    cu_seqlens_k_ptr,  # int32 (B + 1,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    num_sequences,
    num_rows_q,
    num_rows_k,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dq_row,
    dq_head,
    dk_row,
    dk_head,
    softmax_scale,
    threshold,
    dropout_scale,
    site,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program has a head of a whole sequence (of the idle rows, the last), so each tile of the
    scores is made once. dq goes through memory that no other program reads, and stays in L2."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    start_q, num_queries = rows_of(cu_seqlens_q_ptr, sequence, num_sequences, num_rows_q)
    start_k, num_keys = rows_of(cu_seqlens_k_ptr, sequence, num_sequences, num_rows_k)
    seeing, row_step = num_queries, num_heads * D
    if sequence == num_sequences:
        seeing = 0
    for first in range(0, num_queries, BLOCK_Q):
        query = first + tl.arange(0, BLOCK_Q)
        if seeing == 0 or num_keys == 0:
            nothing = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            store_head_rows(
                dq_ptr, nothing, start_q, query, num_queries, dq_row, dq_head, D, BLOCK_D
            )
        else:
            dout = head_rows(dout_ptr, start_q, query, num_queries, row_step, D, D, BLOCK_D)
            out = head_rows(out_ptr, start_q, query, num_queries, row_step, D, D, BLOCK_D)
            delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
            at = head.to(tl.int64) * num_rows_q + start_q + query
            tl.store(delta_ptr + at, delta, mask=query < num_queries)
    for first_key in range(0, num_keys, BLOCK_K):
        # What the threads of this program wrote before is read by others of them below.
        tl.debug_barrier()
        key = first_key + tl.arange(0, BLOCK_K)
        k = head_rows(k_ptr, start_k, key, num_keys, k_row, k_head, D, BLOCK_D)
        v = head_rows(v_ptr, start_k, key, num_keys, v_row, v_head, D, BLOCK_D)
        dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        is_last = first_key + BLOCK_K >= num_keys
        for first in range(0, seeing, BLOCK_Q):
            query = first + tl.arange(0, BLOCK_Q)
            q = head_rows(q_ptr, start_q, query, num_queries, q_row, q_head, D, BLOCK_D)
            dout = head_rows(dout_ptr, start_q, query, num_queries, row_step, D, D, BLOCK_D)
            at = head.to(tl.int64) * num_rows_q + start_q + query
            lse = tl.load(lse_ptr + at, mask=query < num_queries, other=float("-inf")) * LOG2_E
            delta = tl.load(delta_ptr + at, mask=query < num_queries, other=0.0)
            dropped, dscores = tile_gradients(
                q,
                k,
                v,
                dout,
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
                DROPOUT,
                PRECISION,
                BLOCK_Q,
                BLOCK_K,
            )
            dv = tl.dot(tl.trans(dropped.to(v.dtype)), dout, dv, input_precision=PRECISION)
            dscores = dscores.to(k.dtype)
            dk = tl.dot(tl.trans(dscores), q, dk, input_precision=PRECISION)
            # Masked by their counts: nothing is read before the second block of keys, no sum is
            # kept after the last.
            had = tl.where(first_key > 0, num_queries, 0)
            kept = tl.where(is_last, 0, num_queries)
            given = num_queries - kept
            dq = head_rows(dq_sum_ptr, start_q, query, had, row_step, D, D, BLOCK_D)
            dq = tl.dot(dscores, k, dq, input_precision=PRECISION)
            store_head_rows(dq_sum_ptr, dq, start_q, query, kept, row_step, D, D, BLOCK_D)
            dq = dq * softmax_scale
            store_head_rows(dq_ptr, dq, start_q, query, given, dq_row, dq_head, D, BLOCK_D)
        dk = dk * softmax_scale
        store_head_rows(dk_ptr, dk, start_k, key, num_keys, dk_row, dk_head, D, BLOCK_D)
        store_head_rows(dv_ptr, dv, start_k, key, num_keys, dk_row, dk_head, D, BLOCK_D)


def blocks(head_dim: int, dtype: torch.dtype, kernel: str, major: int) -> dict[str, int]:
    """Tile sizes, warps and stages, such that nothing is spilled.

    Head dims are covered by the next power of two; fp32, whose products run on ordinary cores,
    takes smaller tiles.

    Args:
        kernel: `fwd`, `bwd` (of `fits_one_pass`), `bwd_dq` or `bwd_dkv`.
        major: compute capability. The tensor cores of 9 and 10 read shared memory themselves, which
            leaves registers for wider tiles.
    """
    block_d = max(16, block_of(head_dim, 128))
    small, wide = block_d <= 64, major in (9, 10)
    if dtype == torch.float32:
        tile = (32, 32, 1 if kernel == "bwd_dkv" else 2)
    elif kernel == "bwd":
        tile = (64 if wide else 32, 64, 1)
    elif kernel == "fwd":
        tile = (64, 64 if wide or small else 32, 3 if small else 2 if wide else 1)
    elif kernel == "bwd_dq":
        tile = (64, 64 if wide and small else 32, 2 if small else 1)
    else:
        tile = (64, 64, 2) if wide and small else (64, 32, 1)
    sizes = zip(("BLOCK_Q", "BLOCK_K", "num_stages"), tile, strict=True)
    warps = 8 if major == 10 and not small and kernel == "bwd_dkv" else 4
    search = {} if kernel == "bwd" else {"BLOCK_B": BLOCK_B}
    return {**dict(sizes), "num_warps": warps, "BLOCK_D": block_d, **search}


def fits_one_pass(q, num_sequences, max_seqlens, window) -> bool:
    """Whether a program for each head of a sequence makes the backward: where that is short, where
    there are enough of them to fill the device, and where the tiles spill nothing."""
    return (
        max(max_seqlens) <= LONGEST_IN_ONE_PASS
        and window is None
        and q.dtype != torch.float32
        and q.shape[-1] <= 64
        and num_sequences * q.shape[1] >= _processors(q.device)
    )


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _major(device: torch.device) -> int:
    """Compute capability; that of Hopper in the interpreter, 0 for AMD."""
    if device.type != "cuda":
        return 9
    return 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]


def _settings(q, softmax_scale, window, dropout_p, site, rng_state):
    """Scalars the three kernels share, and the compile-time constants of each by its name."""
    threshold, scale = dropout_settings(dropout_p)
    bounds = [NO_BOUND if side < 0 else min(side, NO_BOUND) for side in window or (-1, -1)]
    scalars = (softmax_scale, *bounds, threshold, scale, site)
    shared = {
        "WINDOW": window is not None and min(bounds) < NO_BOUND,
        "DROPOUT": threshold > 0,
        "PRECISION": "ieee",
        "D": q.shape[-1],
    }

    def constants(kernel: str) -> dict:
        return {**shared, **blocks(q.shape[-1], q.dtype, kernel, _major(q.device))}

    return scalars, constants


def slots_of(rows: torch.Tensor, block: int, num_sequences: int) -> int:
    """Programs that suffice for the blocks of all sequences, whose lengths are not known here."""
    return rows.shape[0] // block + num_sequences + 1


def with_near_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors `(rows, N, D)`, copied unless a head is contiguous and begins within 2^31
    elements of its row: the offset of a head is int32, for int64 spills registers."""
    return [
        t if t.stride(-1) == 1 and t.shape[1] * t.stride(1) < 2**31 else t.contiguous()
        for t in tensors
    ]


def steps_of(*tensors: torch.Tensor) -> list[int]:
    """The row and head strides of tensors `(rows, N, D)`, one tensor's after the other's."""
    return [t.stride(i) for t in tensors for i in range(2)]


def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: list[int] | None,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the forward; arguments and results as the op `attention_fwd`."""
    q, k, v = with_near_heads(q, k, v)
    num_rows, num_heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((num_heads, num_rows), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    scalars, constants = _settings(q, softmax_scale, window, dropout_p, site, rng_state)
    constants = constants("fwd")
    num_sequences = cu_seqlens_q.shape[0] - 1
    with on_device(q):
        _attention_fwd_kernel[(slots_of(q, constants["BLOCK_Q"], num_sequences), num_heads)](
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            cu_seqlens_q if rng_state is None else rng_state,
            num_sequences,
            num_rows,
            num_heads,
            *steps_of(q, k, v),
            *scalars,
            **constants,
        )
    return out, lse


def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    *options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the backward; arguments and results as the op `attention_bwd`."""
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, *options)
    return dq, dk, dv


def attention_packed_qkv_bwd(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    num_heads: int,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *options,
) -> torch.Tensor:
    """Launches the backward into one tensor; as the op `attention_packed_qkv_bwd`."""
    dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    parts = [t.unflatten(-1, (3, num_heads, -1)).unbind(1) for t in (qkv, dqkv)]
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    _backward(dout, *parts[0], out, softmax_lse, *parts[1], *lengths, *options)
    return dqkv


def _backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    window,
    dropout_p,
    site,
    rng_state,
):
    """Fills dq, dk and dv, of which the last two have the same strides."""
    if q.numel() == k.numel() == 0:
        return
    q, k, v = with_near_heads(q, k, v)
    dout, out = dout.contiguous(), out.contiguous()
    scalars, constants = _settings(q, softmax_scale, window, dropout_p, site, rng_state)
    num_sequences = cu_seqlens_q.shape[0] - 1
    lengths = (
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_q if rng_state is None else rng_state,
        num_sequences,
    )
    tensors = (dout, q, k, v, out, softmax_lse, dq, dk, dv, torch.empty_like(softmax_lse))
    short = fits_one_pass(q, num_sequences, (max_seqlen_q, max_seqlen_k), window)
    launch = _one_pass if short else _two_passes
    launch(*tensors, lengths, scalars, constants)


def _one_pass(dout, q, k, v, out, lse, dq, dk, dv, delta, lengths, scalars, constants):
    constants = constants("bwd")
    del constants["WINDOW"]
    softmax_scale, _, _, *dropout = scalars
    with on_device(q):
        _attention_bwd_kernel[(lengths[-1] + 1, q.shape[1])](
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            delta,
            torch.empty_like(out, dtype=torch.float32),
            *lengths,
            q.shape[0],
            k.shape[0],
            q.shape[1],
            *steps_of(q, k, v, dq, dk),
            softmax_scale,
            *dropout,
            **constants,
        )


def _two_passes(dout, q, k, v, out, lse, dq, dk, dv, delta, lengths, scalars, constants):
    num_heads, num_sequences = q.shape[1], lengths[-1]
    steps = steps_of(q, k, v)
    with on_device(q):
        if q.numel() > 0:
            dq_constants = constants("bwd_dq")
            slots = slots_of(q, dq_constants["BLOCK_Q"], num_sequences)
            _attention_bwd_dq_kernel[(slots, num_heads)](
                dout,
                q,
                k,
                v,
                out,
                lse,
                dq,
                delta,
                *lengths,
                q.shape[0],
                num_heads,
                *steps,
                *steps_of(dq),
                *scalars,
                **dq_constants,
            )
        if k.numel() > 0:
            dkv_constants = constants("bwd_dkv")
            slots = slots_of(k, dkv_constants["BLOCK_K"], num_sequences)
            _attention_bwd_dkv_kernel[(slots, num_heads)](
                dout,
                q,
                k,
                v,
                lse,
                delta,
                dk,
                dv,
                *lengths,
                q.shape[0],
                k.shape[0],
                num_heads,
                *steps,
                *steps_of(dk),
                *scalars,
                **dkv_constants,
            )
