"""The dropout stream of docs/dropout.md in Triton: device functions, and keep masks as tensors.

Philox4x32-7 (Salmon et al. 2011), one call for eight elements of sixteen bits. A kernel with a
row or score tile computes the calls of the tile and expands them in registers by
join/reshape/permute; it never calls once per element.
"""

import torch
import triton
import triton.language as tl

from .common import block_of, on_device


def dropout_settings(dropout_p: float) -> tuple[int, float]:
    """Threshold and scale of docs/dropout.md; (0, 1.0) without dropout."""
    threshold = int(dropout_p * 65536 + 0.5)
    return threshold, 65536 / max(1, 65536 - threshold)


@triton.jit
def philox4x32_7(c0, c1, c2, c3, k0, k1):
    """Four words per counter; all arguments uint32, of one shape."""
    for _ in tl.static_range(7):
        hi0 = tl.umulhi(tl.full(c0.shape, 0xD2511F53, tl.uint32), c0)
        lo0 = tl.full(c0.shape, 0xD2511F53, tl.uint32) * c0
        hi1 = tl.umulhi(tl.full(c2.shape, 0xCD9E8D57, tl.uint32), c2)
        lo1 = tl.full(c2.shape, 0xCD9E8D57, tl.uint32) * c2
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def stream_key(rng_state_ptr):  # int64 (2,): seed, offset
    """The two key words and the offset word."""
    seed = tl.load(rng_state_ptr).to(tl.uint64, bitcast=True)
    offset = tl.load(rng_state_ptr + 1).to(tl.uint64, bitcast=True)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32)


@triton.jit
def keep_rows(
    rng_state_ptr,  # int64 (2,)
    row,  # int64 (ROWS,), packed rows of the tile
    first_column,  # int, a multiple of 8
    num_cols,
    threshold,
    site,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """bool (ROWS, COLS): which elements of a tile of rows are kept; COLS a multiple of 8."""
    k0, k1, offset = stream_key(rng_state_ptr)
    calls_per_row = (num_cols + 7) // 8
    column_call = first_column // 8 + tl.arange(0, COLS // 8)
    call = row[:, None] * calls_per_row + column_call[None, :]
    low = call.to(tl.uint32)
    high = (call >> 32).to(tl.uint32)
    fixed = tl.zeros([ROWS, COLS // 8], tl.uint32)
    w0, w1, w2, w3 = philox4x32_7(low, high, fixed + site.to(tl.uint32), fixed + offset, k0, k1)
    # Element order within a call is (word, half): half varies fastest, then the word.
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # (ROWS, calls, word // 2, word % 2)
    halves = tl.join(pairs & 0xFFFF, pairs >> 16)  # (..., half)
    return tl.reshape(halves, [ROWS, COLS]) >= threshold.to(tl.uint32)


@triton.jit
def keep_scores(
    rng_state_ptr,  # int64 (2,)
    first_row,  # int, a multiple of 16, query index within the sequence
    first_column,  # int, a multiple of 16, key index within the sequence
    sequence_head,  # int64, sequence * heads + head
    threshold,
    site,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """bool (ROWS, COLS): which probabilities of a score tile are kept; both multiples of 16."""
    k0, k1, offset = stream_key(rng_state_ptr)
    place_row = first_row // 2 + tl.arange(0, ROWS // 2)
    place_column = first_column // 4 + tl.arange(0, COLS // 4)
    place = (place_row[:, None] << 16) | place_column[None, :]
    fixed = tl.zeros([ROWS // 2, COLS // 4], tl.uint32)
    w0, w1, w2, w3 = philox4x32_7(
        place.to(tl.uint32),
        fixed + sequence_head.to(tl.uint32),
        fixed + site.to(tl.uint32),
        fixed + offset,
        k0,
        k1,
    )
    # Word 2·lower + right: join puts its index last, so the axes behind the calls are lower,
    # right, half.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    split = tl.reshape(halves, [ROWS // 16, 8, COLS // 16, 4, 2, 2, 2])
    ordered = tl.permute(split, [0, 4, 1, 2, 5, 3, 6])
    return tl.reshape(ordered, [ROWS, COLS]) >= threshold.to(tl.uint32)


@triton.jit(do_not_specialize=["threshold", "site"])
def _row_keep_mask_kernel(
    rng_state_ptr,  # int64 (2,)
    mask_ptr,  # int8 (num_rows, num_cols)
    num_rows,
    num_cols,
    threshold,
    site,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS).to(tl.int64) + tl.arange(0, ROWS)
    first_column = tl.program_id(1) * COLS
    keep = keep_rows(rng_state_ptr, row, first_column, num_cols, threshold, site, ROWS, COLS)
    column = first_column + tl.arange(0, COLS)
    inside = (row[:, None] < num_rows) & (column[None, :] < num_cols)
    tl.store(mask_ptr + row[:, None] * num_cols + column[None, :], keep.to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["threshold", "site"])
def _score_keep_mask_kernel(
    rng_state_ptr,  # int64 (2,)
    sequences_ptr,  # int64 (b,)
    mask_ptr,  # int8 (b, num_heads, seqlen_q, seqlen_k)
    num_heads,
    seqlen_q,
    seqlen_k,
    threshold,
    site,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    first_column = tl.program_id(2) * COLS
    sequence = tl.load(sequences_ptr + block // num_heads)
    sequence_head = sequence * num_heads + block % num_heads
    keep = keep_scores(
        rng_state_ptr, first_row, first_column, sequence_head, threshold, site, ROWS, COLS
    )
    row = first_row.to(tl.int64) + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLS)
    inside = (row[:, None] < seqlen_q) & (column[None, :] < seqlen_k)
    start = mask_ptr + block * seqlen_q * seqlen_k
    tl.store(start + row[:, None] * seqlen_k + column[None, :], keep.to(tl.int8), mask=inside)


def row_keep_mask(
    rng_state: torch.Tensor, num_rows: int, num_cols: int, threshold: int, site: int
) -> torch.Tensor:
    """Launches the row map; arguments and result as `row_keep_mask_reference`."""
    mask = torch.empty((num_rows, num_cols), dtype=torch.bool, device=rng_state.device)
    if threshold in (0, 65536) or mask.numel() == 0:
        return mask.fill_(threshold == 0)
    cols = block_of(num_cols, 256)
    cols = max(cols, 8)
    rows = block_of(num_rows, max(1, 2048 // cols))
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_cols, cols))
    with on_device(rng_state):
        _row_keep_mask_kernel[grid](
            rng_state,
            mask.view(torch.int8),
            num_rows,
            num_cols,
            threshold,
            site,
            ROWS=rows,
            COLS=cols,
            num_warps=4,
        )
    return mask


def score_keep_mask(
    rng_state: torch.Tensor,
    sequences: torch.Tensor,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    threshold: int,
    site: int,
) -> torch.Tensor:
    """Launches the score map; arguments and result as `score_keep_mask_reference`.

    Raises:
        ValueError: a length beyond the stream's limits.
    """
    if seqlen_q > 131_072 or seqlen_k > 262_144:
        raise ValueError(
            "dropout of attention probabilities: at most 131072 queries and 262144 keys in a "
            f"sequence, got {seqlen_q} and {seqlen_k}"
        )
    shape = (sequences.shape[0], num_heads, seqlen_q, seqlen_k)
    mask = torch.empty(shape, dtype=torch.bool, device=rng_state.device)
    if threshold in (0, 65536) or mask.numel() == 0:
        return mask.fill_(threshold == 0)
    rows = max(16, block_of(seqlen_q, 64))
    cols = max(16, block_of(seqlen_k, 64))
    grid = (shape[0] * num_heads, triton.cdiv(seqlen_q, rows), triton.cdiv(seqlen_k, cols))
    with on_device(rng_state):
        _score_keep_mask_kernel[grid](
            rng_state,
            sequences,
            mask.view(torch.int8),
            num_heads,
            seqlen_q,
            seqlen_k,
            threshold,
            site,
            ROWS=rows,
            COLS=cols,
            num_warps=4,
        )
    return mask
