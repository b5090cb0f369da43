"""Masked language modelling: which tokens are predicted and what stands in their place.

Letters: N sequences, T tokens of all of them one after the other, P masked tokens, U units.

A unit is what is masked as a whole: a token, a word, or a span of tokens or words. All functions
are pure: the random bits come in as an array (`fastbert.data.noise`).

Sources: BERT, Devlin et al. 2019, section 3.1 and appendix A.1 (15 %, of these 80/10/10, a number
of predictions rounded per sequence); RoBERTa, Liu et al. 2019, section 4.1 (new masks at every
pass); SpanBERT, Joshi et al. 2020, section 3.1, and ALBERT, Lan et al. 2020, section 3.1 (lengths
of spans).
"""

from dataclasses import dataclass

import numpy as np

from fastbert.data.noise import ACTION, LENGTH, REPLACEMENT, SELECT
from fastbert.data.vocabulary import Vocabulary, word_starts
from fastbert.padding import IGNORE_INDEX, rows_beside

UNITS = ("token", "word", "span")
SELECTIONS = ("bernoulli", "rounded")
_FULL = 1 << 32


def inverse_lengths(longest: int = 3) -> tuple[float, ...]:
    """ALBERT's n-grams: p(n) proportional to 1/n for n = 1 to `longest` (section 3.1)."""
    weights = 1 / np.arange(1, longest + 1)
    return tuple(weights / weights.sum())


def geometric_lengths(p: float = 0.2, longest: int = 10) -> tuple[float, ...]:
    """SpanBERT's spans: Geo(p), lengths above `longest` left out and the rest scaled to 1."""
    weights = p * (1 - p) ** np.arange(longest)
    return tuple(weights / weights.sum())


@dataclass(frozen=True)
class RateSchedule:
    """A masking rate that goes linearly from `start` to `end` in `steps` steps, then stays."""

    start: float
    end: float
    steps: int

    def __post_init__(self):
        _check_share("start", self.start)
        _check_share("end", self.end)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class Masking:
    """How tokens are chosen and replaced.

    Attributes:
        rate: share of the maskable tokens that is predicted, or a `RateSchedule`.
        mask_share, random_share: of the chosen, the shares that become the mask token and a random
            ordinary token; the rest stays as it is.
        unit: "token", "word" (whole words) or "span" (`span_lengths` words where words are known,
            else tokens).
        selection: "bernoulli" chooses each unit on its own with probability `rate`, as RoBERTa and
            transformers do; "rounded" chooses max(1, round(rate · maskable)) tokens of each
            sequence, as BERT does, leaving out units that no longer fit.
        fixed_count: exactly so many tokens of the whole batch, shared out by length; `rate` and
            `selection` then play no part. Units must be tokens.
        span_lengths: probabilities of the lengths 1, 2, ...
        dupe_factor: static masking as in BERT: the masks of epoch e are those of e modulo this
            number. None: new masks in every epoch.

    Raises:
        ValueError: a share outside 0 to 1, an unknown word, settings that exclude each other.
    """

    rate: float | RateSchedule = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    unit: str = "token"
    selection: str = "bernoulli"
    fixed_count: int | None = None
    span_lengths: tuple[float, ...] = inverse_lengths()
    dupe_factor: int | None = None

    def __post_init__(self):
        if not isinstance(self.rate, RateSchedule):
            _check_share("rate", self.rate)
        _check_share("mask_share", self.mask_share)
        _check_share("random_share", self.random_share)
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise ValueError(
                f"mask_share + random_share must not exceed 1, got {self.mask_share} + "
                f"{self.random_share}"
            )
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {self.unit!r}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {SELECTIONS}, got {self.selection!r}")
        if self.fixed_count is not None and self.fixed_count < 1:
            raise ValueError(f"fixed_count must be at least 1, got {self.fixed_count}")
        if self.fixed_count is not None and self.unit != "token":
            raise ValueError(
                f"fixed_count needs unit='token', got {self.unit!r}: whole units need not add up "
                f"to it; use selection='rounded' and MaskedTokens.padded for a fixed size"
            )
        lengths = np.asarray(self.span_lengths, np.float64)
        if lengths.ndim != 1 or not lengths.size or (lengths < 0).any():
            raise ValueError(f"span_lengths must be probabilities, got {self.span_lengths}")
        if abs(lengths.sum() - 1) > 1e-6:
            raise ValueError(f"span_lengths must add up to 1, got {lengths.sum()}")
        if self.dupe_factor is not None and self.dupe_factor < 1:
            raise ValueError(f"dupe_factor must be at least 1, got {self.dupe_factor}")

    def rate_at(self, step: int) -> float:
        """The rate at an optimizer step."""
        return self.rate(step) if isinstance(self.rate, RateSchedule) else self.rate

    def epoch_of_masks(self, epoch: int) -> int:
        """The epoch whose noise is drawn: `epoch`, or where it falls among the duplicates."""
        return epoch if self.dupe_factor is None else epoch % self.dupe_factor


@dataclass(frozen=True)
class MaskedTokens:
    """The outcome.

    Attributes:
        input_ids: `(T,)` ids with replacements, of the dtype given.
        positions: `(P,)` int64, rising: the tokens to predict.
        labels: `(P,)` int64, their original ids.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray

    def dense_labels(self) -> np.ndarray:
        """`(T,)` int64, -100 where nothing is predicted."""
        dense = np.full(len(self.input_ids), IGNORE_INDEX, np.int64)
        dense[self.positions] = self.labels
        return dense

    def padded(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions and labels of length `count`; behind the masked tokens come others, with label
        -100, so that every position is there once.

        Raises:
            ValueError: more are masked, or there are fewer tokens.
        """
        missing = count - len(self.positions)
        if missing < 0:
            raise ValueError(
                f"count is {count}, but {len(self.positions)} tokens are masked; make it larger"
            )
        others = rows_beside(self.positions, missing, len(self.input_ids))
        return (
            np.concatenate([self.positions, others]),
            np.pad(self.labels, (0, missing), constant_values=IGNORE_INDEX),
        )


def mask_tokens(
    ids: np.ndarray,
    cu_seqlens: np.ndarray,
    noise: np.ndarray,
    vocabulary: Vocabulary,
    masking: Masking,
    *,
    maskable: np.ndarray | None = None,
    starts: np.ndarray | None = None,
    step: int = 0,
) -> MaskedTokens:
    """Masks a batch of sequences.

    At least one token of every sequence is predicted if it has a maskable one and the rate is not
    0; in exchange short sequences are masked a little more often than the rate says.

    Args:
        ids: `(T,)` integers. cu_seqlens: `(N+1,)`, rising from 0 to T.
        noise: `(T, 4)` uint32.
        vocabulary, masking: what and how.
        maskable: `(T,)` bool; default: every token that is not special.
        starts: `(T,)` bool, where words begin; default: told by the ids.
        step: for a `RateSchedule`.

    Raises:
        ValueError: shapes that do not fit, ids outside of the vocabulary, words that are not
            known, a fixed_count that the batch cannot give.
    """
    _check(ids, cu_seqlens, noise, vocabulary, maskable, starts)
    if maskable is None:
        maskable = ~vocabulary.special[ids]
    told_by_ids = masking.unit == "span" and vocabulary.continues is not None
    if starts is None and (masking.unit == "word" or told_by_ids):
        starts = word_starts(ids, cu_seqlens, vocabulary)
    sequence = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))
    tokens = np.flatnonzero(maskable)
    first = _unit_starts(tokens, sequence[tokens], noise, masking, starts)
    heads = tokens[first]
    lengths = np.diff(np.append(first, len(tokens)))
    chosen = _choose(
        sequence[heads], lengths, noise[heads, SELECT], masking, step, len(cu_seqlens) - 1
    )
    positions = tokens[np.repeat(chosen, lengths)]
    return _replace(ids, positions, noise, vocabulary, masking)


def _unit_starts(tokens, sequence, noise, masking, starts) -> np.ndarray:
    """Indices into `tokens`, the maskable ones, at which units begin."""
    if masking.unit == "token":
        return np.arange(len(tokens))
    # A run is a stretch of maskable tokens of one sequence without a gap.
    run_starts = np.ones(len(tokens), bool)
    run_starts[1:] = (np.diff(tokens) != 1) | (np.diff(sequence) != 0)
    if starts is None:
        words = np.arange(len(tokens))
    else:
        words = np.flatnonzero(run_starts | starts[tokens])
    if masking.unit == "word":
        return words
    return words[_span_starts(run_starts[words], noise[tokens[words], LENGTH], masking)]


def _span_starts(run_starts: np.ndarray, bits: np.ndarray, masking: Masking) -> np.ndarray:
    """Cuts every run of words into spans of random lengths; the last one ends with its run.

    The j-th span of a run takes its length from the run's j-th word, so that the lengths are drawn
    at once; a cumulative sum turns them into places.
    """
    bounds = np.cumsum(masking.span_lengths)[:-1] * _FULL
    lengths = np.searchsorted(bounds, bits, side="right") + 1
    ends = np.cumsum(lengths)
    before = ends - lengths
    heads = np.flatnonzero(run_starts)
    counts = np.diff(np.append(heads, len(run_starts)))
    offset = before - np.repeat(before[heads], counts)
    inside = offset < np.repeat(counts, counts)
    return np.sort((np.repeat(heads, counts) + offset)[inside])


def _choose(sequence, lengths, bits, masking, step: int, num_sequences: int) -> np.ndarray:
    """`(U,)` bool. `sequence`, `lengths`, `bits`: of each unit; units are ordered by sequence."""
    available = np.bincount(sequence, weights=lengths, minlength=num_sequences).astype(np.int64)
    if masking.fixed_count is not None:
        counts = _share_out(masking.fixed_count, available)
        return _choose_counted(sequence, lengths, bits, counts)
    rate = masking.rate_at(step)
    if masking.selection == "bernoulli":
        chosen = bits < rate * _FULL
    else:
        counts = np.maximum(np.rint(rate * available).astype(np.int64), 1)
        chosen = _choose_counted(sequence, lengths, bits, counts if rate else 0 * counts)
    if rate:
        _choose_one_at_least(chosen, sequence, bits)
    return chosen


def _choose_one_at_least(chosen: np.ndarray, sequence: np.ndarray, bits: np.ndarray) -> None:
    """Adds the unit of the smallest bits to sequences of which nothing was chosen."""
    if not len(sequence):
        return
    heads = np.flatnonzero(np.diff(sequence, prepend=-1))
    empty = ~np.logical_or.reduceat(chosen, heads)
    if empty.any():
        counts = np.diff(np.append(heads, len(sequence)))
        least = np.where(empty, np.minimum.reduceat(bits, heads), 0)
        chosen |= np.repeat(empty, counts) & (bits == np.repeat(least, counts))


def _choose_counted(sequence, lengths, bits, counts) -> np.ndarray:
    """Units in random order, each taken if it still fits into its sequence's count of tokens.

    One pass takes every sequence's units up to the first that does not fit; the next pass goes on
    with those that fit into what is left. Units of one token need a single pass.
    """
    chosen = np.zeros(len(sequence), bool)
    order = np.argsort(sequence.astype(np.uint64) << np.uint64(32) | bits)
    left = np.asarray(counts).copy()
    while True:
        order = order[lengths[order] <= left[sequence[order]]]
        if not len(order):
            return chosen
        where = sequence[order]
        heads = np.flatnonzero(np.diff(where, prepend=-1))
        before = np.cumsum(lengths[order]) - lengths[order]
        taken = before - np.repeat(before[heads], np.diff(np.append(heads, len(order))))
        fits = taken + lengths[order] <= left[where]
        chosen[order[fits]] = True
        left -= np.bincount(where[fits], weights=lengths[order[fits]], minlength=len(left)).astype(
            left.dtype
        )
        order = order[~fits]


def _share_out(count: int, available: np.ndarray) -> np.ndarray:
    """`count` tokens among sequences in proportion to their maskable tokens, one at least each.

    Raises:
        ValueError: fewer than the sequences, or more than there are.
    """
    total, needing = int(available.sum()), int((available > 0).sum())
    if not needing <= count <= total:
        raise ValueError(
            f"fixed_count is {count}, but the batch has {needing} sequences, which need one each, "
            f"and {total} maskable tokens; choose a number between"
        )
    exact = (count - needing) * (available - (available > 0)) / max(total - needing, 1)
    counts = np.floor(exact).astype(np.int64)
    rest = np.argsort(counts - exact, kind="stable")[: count - needing - int(counts.sum())]
    counts[rest] += 1
    return counts + (available > 0)


def _replace(ids, positions, noise, vocabulary, masking) -> MaskedTokens:
    labels = ids[positions].astype(np.int64)
    action = noise[positions, ACTION]
    to_mask = action < masking.mask_share * _FULL
    to_random = ~to_mask & (action < (masking.mask_share + masking.random_share) * _FULL)
    scaled = noise[positions[to_random], REPLACEMENT].astype(np.uint64)
    # The upper half of a 64-bit product is uniform in [0, number of ordinary ids).
    drawn = scaled * np.uint64(len(vocabulary.ordinary)) >> np.uint64(32)
    masked = ids.copy()
    masked[positions[to_mask]] = vocabulary.mask_id
    masked[positions[to_random]] = vocabulary.ordinary[drawn]
    return MaskedTokens(masked, positions, labels)


def _check(ids, cu_seqlens, noise, vocabulary, maskable, starts) -> None:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"ids must be 1D integers, got {ids.dtype} of shape {ids.shape}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1 or cu_seqlens[0] != 0:
        raise ValueError("cu_seqlens must be 1D and begin with 0")
    if cu_seqlens[-1] != len(ids) or (np.diff(cu_seqlens) < 0).any():
        raise ValueError(
            f"cu_seqlens must rise to the {len(ids)} ids, its last is {cu_seqlens[-1]}"
        )
    if noise.shape != (len(ids), 4) or noise.dtype != np.uint32:
        raise ValueError(
            f"noise must be ({len(ids)}, 4) uint32, got {noise.shape} {noise.dtype}; see "
            f"fastbert.data.noise"
        )
    for name, flags in (("maskable", maskable), ("starts", starts)):
        if flags is not None and (flags.shape != ids.shape or flags.dtype != bool):
            raise ValueError(
                f"{name} must be bool of shape {ids.shape}, got {flags.dtype} of {flags.shape}"
            )
    size = len(vocabulary.special)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ValueError(
            f"ids must lie in the vocabulary of {size}, got {ids.min()} to {ids.max()}"
        )


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
