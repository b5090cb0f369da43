"""Keep masks of dropout, the stream of docs/dropout.md.

The masks are what every dropout in fastbert multiplies by; fused kernels compute the same bits in
registers. As ops they serve the reference implementations, which so run as fast as the fastest
implementation of the stream, and the tests.
"""

import torch

from fastbert import dispatch
from fastbert.dispatch import register_op
from fastbert.reference.philox import (
    dropout_threshold,
    row_keep_mask_reference,
    score_keep_mask_reference,
)


def _row_keep_mask_fake(rng_state, num_rows, num_cols, threshold, site):
    return rng_state.new_empty((num_rows, num_cols), dtype=torch.bool)


def _score_keep_mask_fake(rng_state, sequences, num_heads, seqlen_q, seqlen_k, threshold, site):
    shape = (sequences.shape[0], num_heads, seqlen_q, seqlen_k)
    return rng_state.new_empty(shape, dtype=torch.bool)


row_keep_mask_op = register_op(
    "row_keep_mask",
    "(Tensor rng_state, SymInt num_rows, SymInt num_cols, int threshold, int site) -> Tensor",
    room="philox",
    fake=_row_keep_mask_fake,
    reference=row_keep_mask_reference,
    triton="fastbert.kernels.philox:row_keep_mask",
    cpu=True,
    cuda=True,
)
score_keep_mask_op = register_op(
    "score_keep_mask",
    "(Tensor rng_state, Tensor sequences, int num_heads, SymInt seqlen_q, SymInt seqlen_k, "
    "int threshold, int site) -> Tensor",
    room="philox",
    fake=_score_keep_mask_fake,
    reference=score_keep_mask_reference,
    triton="fastbert.kernels.philox:score_keep_mask",
    cpu=True,
    cuda=True,
)


def _draw_rng_state(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=like.device).random_()


# An op of its own: Dynamo does not trace random_, and the tag keeps draws from being merged.
dispatch.LIBRARY.define(
    "draw_rng_state(Tensor like) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
dispatch.LIBRARY.impl("draw_rng_state", _draw_rng_state, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fastbert::draw_rng_state",
    lambda like: like.new_empty(2, dtype=torch.int64),
    lib=dispatch.LIBRARY,
)


def draw_rng_state(like: torch.Tensor) -> torch.Tensor:
    """`(2,)` int64 (seed, offset) by `random_()` from torch's generator of `like`'s device."""
    return torch.ops.fastbert.draw_rng_state.default(like)


def check_rng_state(name: str, rng_state: torch.Tensor | None, device: torch.device) -> None:
    """Raises unless `rng_state` is an int64 `(2,)` tensor (seed, offset) on `device`."""
    if rng_state is None:
        raise ValueError(
            f"{name}: rng_state is required where dropout_p > 0; pass an int64 tensor of shape "
            "(2,), for instance torch.empty(2, dtype=torch.int64).random_()"
        )
    if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
        raise ValueError(
            f"{name}: rng_state must be int64 of shape (2,), got {rng_state.dtype} of shape "
            f"{tuple(rng_state.shape)}"
        )
    if rng_state.device != device:
        raise ValueError(
            f"{name}: rng_state must be on {device}, got {rng_state.device}; move it there"
        )


def row_keep_mask(
    rng_state: torch.Tensor, num_rows: int, num_cols: int, *, dropout_p: float, site: int
) -> torch.Tensor:
    """Keep mask over rows of features, the row map of docs/dropout.md.

    Args:
        rng_state: `(2,)` int64, (seed, offset).
        num_rows: rows of the tensor; row r of the mask belongs to packed row r.
        num_cols: features per row.
        dropout_p: probability of dropping, in [0, 1].
        site: which dropout of the model, layer·8 + place.

    Returns:
        `(num_rows, num_cols)` bool, True where the element is kept.

    Raises:
        ValueError: dropout_p outside [0, 1], or a wrong rng_state.
    """
    threshold = dropout_threshold(dropout_p)
    check_rng_state("row_keep_mask", rng_state, rng_state.device)
    return row_keep_mask_op(rng_state, num_rows, num_cols, threshold, site)


def score_keep_mask(
    rng_state: torch.Tensor,
    sequences: torch.Tensor,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    dropout_p: float,
    site: int,
) -> torch.Tensor:
    """Keep mask over attention scores, the score map of docs/dropout.md.

    Args:
        rng_state: `(2,)` int64, (seed, offset).
        sequences: `(b,)` int64, index of each sequence into cu_seqlens_q.
        num_heads: attention heads N of the layer.
        seqlen_q: query rows, relative to the sequence.
        seqlen_k: key rows, relative to the sequence.
        dropout_p: probability of dropping, in [0, 1].
        site: which dropout of the model, layer·8 + place.

    Returns:
        `(b, N, seqlen_q, seqlen_k)` bool, True where the probability is kept.

    Raises:
        ValueError: dropout_p outside [0, 1], a wrong rng_state, or a length beyond the stream's
            limits.
    """
    threshold = dropout_threshold(dropout_p)
    check_rng_state("score_keep_mask", rng_state, sequences.device)
    return score_keep_mask_op(rng_state, sequences, num_heads, seqlen_q, seqlen_k, threshold, site)
