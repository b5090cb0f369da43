"""The dropout stream in plain PyTorch integers: the specification, docs/dropout.md.

Philox4x32-7, Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3; one
call gives eight elements sixteen bits each.
"""

import math

import torch

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF

SITE_EMBEDDING = 0xFFFFFFF8
SITE_SAMPLING = 0xFFFFFFF9
PLACE_ATTENTION = 0
PLACE_ATTENTION_OUTPUT = 1
PLACE_FFN_OUTPUT = 2
PLACE_FFN_INNER = 3
PLACE_POSITIONS = 4
PLACES = 8

QUERY_LIMIT = 131_072
KEY_LIMIT = 262_144
SEQUENCE_HEAD_LIMIT = 1 << 32

CALLS_PER_CHUNK = 1 << 19
"""Philox calls computed at once: about 32 MB of int64 words."""


def layer_site(layer: int, place: int) -> int:
    """The site of a dropout inside layer `layer` (from 0): layer·8 + place."""
    return layer * PLACES + place


def dropout_threshold(dropout_p: float) -> int:
    """t = floor(p·65536 + 0.5): an element is kept if its sixteen bits are at least t.

    Raises:
        ValueError: p is NaN or outside [0, 1].
    """
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    return math.floor(dropout_p * 65536 + 0.5)


def dropout_scale(threshold: int) -> float:
    """float32(65536 / (65536 - t)), what kept elements are multiplied by; 0 where none is kept."""
    if threshold == 65536:
        return 0.0
    return torch.tensor(65536 / (65536 - threshold), dtype=torch.float32).item()


def philox4x32(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS
) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words per counter, as int64 tensors.

    Args:
        counter: four int64 tensors with values below 2^32, broadcast against each other.
        key: two such tensors.
        rounds: 7 for the stream; 10 for the generator's published vectors.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap; both halves of the 64 bits are right all the same.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        hi0, hi1 = (p0 >> 32) & MASK32, (p1 >> 32) & MASK32
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, p1 & MASK32, hi0 ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def _halves(words: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`(..., 4, 2)`: the low and the high sixteen bits of each word."""
    stacked = torch.stack(words, dim=-1)
    return torch.stack((stacked & 0xFFFF, stacked >> 16), dim=-1)


def _key_and_offset(rng_state: torch.Tensor):
    seed, offset = rng_state[0], rng_state[1]
    return (seed & MASK32, (seed >> 32) & MASK32), offset & MASK32


def row_keep_mask_reference(
    rng_state: torch.Tensor, num_rows: int, num_cols: int, threshold: int, site: int
) -> torch.Tensor:
    """Keep mask of rows of features.

    Element (r, c) reads the call numbered r·ceil(C/8) + c//8 with counter (call low, call high,
    site, offset), its word (c % 8)//2, half c % 2.

    Args:
        rng_state: `(2,)` int64, (seed, offset).
        num_rows, num_cols: shape of the mask.
        threshold: of `dropout_threshold`.
        site: which dropout of the model.

    Returns:
        `(num_rows, num_cols)` bool.
    """
    if threshold in (0, 65536):
        return rng_state.new_full((num_rows, num_cols), threshold == 0, dtype=torch.bool)
    calls_per_row = (num_cols + 7) // 8
    key, offset = _key_and_offset(rng_state)
    site_word = torch.full_like(offset, site)
    rows = max(1, CALLS_PER_CHUNK // max(1, calls_per_row))
    chunks = [rng_state.new_empty((0, num_cols), dtype=torch.bool)]
    for start in range(0, num_rows, rows):
        stop = min(start + rows, num_rows)
        call = torch.arange(start * calls_per_row, stop * calls_per_row, device=rng_state.device)
        words = philox4x32((call & MASK32, call >> 32, site_word, offset), key)
        keep = _halves(words) >= threshold
        chunks.append(keep.view(stop - start, calls_per_row * 8)[:, :num_cols])
    return torch.cat(chunks)


def sampling_words(rng_state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Random bits for what is drawn once a row: the first word of the call with counter (row low,
    row high, site of sampling, offset).

    Args:
        rng_state: `(2,)` int64, (seed, offset).
        rows: `(P,)` int64, packed rows.

    Returns:
        `(P,)` int64 below 2^32.
    """
    key, offset = _key_and_offset(rng_state)
    site = torch.full_like(offset, SITE_SAMPLING)
    return philox4x32((rows & MASK32, rows >> 32, site, offset), key)[0]


def score_keep_mask_reference(
    rng_state: torch.Tensor,
    sequences: torch.Tensor,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    threshold: int,
    site: int,
) -> torch.Tensor:
    """Keep mask of attention scores.

    Score (r, c) of head n of sequence b, r and c counted within the sequence, reads the call with
    counter ((r//16·8 + r%8) << 16 | (c//16·4 + c%8//2), b·N + n, site, offset), its word
    2·(r%16//8) + c%16//8, half c % 2.

    Args:
        rng_state: `(2,)` int64, (seed, offset).
        sequences: `(b,)` int64.
        num_heads: N.
        seqlen_q, seqlen_k: rows and columns.
        threshold: of `dropout_threshold`.
        site: which dropout of the model.

    Returns:
        `(b, N, seqlen_q, seqlen_k)` bool.

    Raises:
        ValueError: a length beyond the stream's limits.
    """
    check_score_limits(sequences, num_heads, seqlen_q, seqlen_k)
    shape = (sequences.shape[0], num_heads, seqlen_q, seqlen_k)
    if threshold in (0, 65536):
        return rng_state.new_full(shape, threshold == 0, dtype=torch.bool)
    device = rng_state.device
    key, offset = _key_and_offset(rng_state)
    site_word = torch.full_like(offset, site)
    tiles_q, tiles_k = (seqlen_q + 15) // 16, (seqlen_k + 15) // 16
    call_q = torch.arange(tiles_q * 8, device=device)
    call_k = torch.arange(tiles_k * 4, device=device)
    place = (call_q[:, None] << 16) | call_k
    heads = torch.arange(num_heads, device=device)
    blocks = max(1, CALLS_PER_CHUNK // max(1, place.numel()))
    sequence_head = (sequences[:, None] * num_heads + heads).reshape(-1, 1, 1)
    chunks = [rng_state.new_empty((0, seqlen_q, seqlen_k), dtype=torch.bool)]
    for block in sequence_head.split(blocks):
        words = philox4x32((place, block, site_word, offset), key)
        # (heads, tile_q, r%8, tile_k, c%8//2, r%16//8, c%16//8, c%2) to rows and columns.
        keep = (_halves(words) >= threshold).view(block.shape[0], tiles_q, 8, tiles_k, 4, 2, 2, 2)
        keep = keep.permute(0, 1, 5, 2, 3, 6, 4, 7)
        keep = keep.reshape(block.shape[0], tiles_q * 16, tiles_k * 16)
        chunks.append(keep[:, :seqlen_q, :seqlen_k])
    return torch.cat(chunks).view(shape)


def check_score_limits(
    sequences: torch.Tensor, num_heads: int, seqlen_q: int, seqlen_k: int
) -> None:
    """Raises ValueError where the counter words of the score map would overflow."""
    for name, value, limit in (
        ("query index", seqlen_q, QUERY_LIMIT),
        ("key index", seqlen_k, KEY_LIMIT),
        ("sequences x heads", sequences.shape[0] * num_heads, SEQUENCE_HEAD_LIMIT),
    ):
        if value > limit:
            raise ValueError(
                f"dropout of attention probabilities: {name} must be below {limit}, got {value}; "
                "set attention_probs_dropout_prob to 0 or shorten the input"
            )
