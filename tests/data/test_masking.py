"""Masking: its proportions, what it never touches, and that masks are a function of their seed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastbert.data import (
    Masking,
    RateSchedule,
    Vocabulary,
    geometric_lengths,
    inverse_lengths,
    mask_tokens,
    masked_batch,
)
from fastbert.data.masking import UNITS
from fastbert.data.noise import generator, sequence_noise, token_noise
from fastbert.data.sequences import Sequences, cu_seqlens_of
from fastbert.data.vocabulary import word_starts
from fastbert.padding import IGNORE_INDEX
from fastbert.testing.proportions import assert_proportion

MILLION = 1_000_000
PAD, UNK, CLS, SEP, MASK = range(5)
# Ids from 305 on continue a word.
VOCABULARY = Vocabulary(MASK, np.arange(505) < 5, np.arange(5, 505), (np.arange(505) >= 305))


def _sequences(lengths, seed=1):
    """[CLS] words [SEP] of these lengths; two of five tokens continue a word."""
    ids = np.random.default_rng(seed).integers(5, 505, sum(lengths)).astype(np.uint16)
    cu_seqlens = cu_seqlens_of(np.array(lengths, np.int64))
    ids[cu_seqlens[1:] - 1] = SEP
    ids[cu_seqlens[:-1]] = CLS
    return ids, cu_seqlens


def _mask(ids, cu_seqlens, masking, seed=0, **options):
    noise = token_noise(generator(seed), len(ids))
    return mask_tokens(ids, cu_seqlens, noise, VOCABULARY, masking, **options)


@pytest.mark.parametrize(
    ("rate", "mask_share", "random_share"), [(0.15, 0.8, 0.1), (0.4, 0.5, 0.3), (0.15, 1.0, 0.0)]
)
def test_proportions(rate, mask_share, random_share):
    ids, cu_seqlens = _sequences([128] * (MILLION // 128))
    masked = _mask(ids, cu_seqlens, Masking(rate, mask_share, random_share))
    maskable = int((ids >= 5).sum())
    assert_proportion(len(masked.positions), maskable, rate)
    now = masked.input_ids[masked.positions]
    assert_proportion(int((now == MASK).sum()), len(now), mask_share)
    # A random token is the old one once in 500.
    changed = (now != MASK) & (now != masked.labels)
    assert_proportion(int(changed.sum()), len(now), random_share * (1 - 1 / 500))


def test_random_tokens_are_ordinary_and_equally_frequent():
    ids, cu_seqlens = _sequences([128] * (MILLION // 128))
    masked = _mask(ids, cu_seqlens, Masking(0.5, 0.0, 1.0))
    counts = np.bincount(masked.input_ids[masked.positions], minlength=505)
    assert not counts[:5].any()
    for count in counts[5:]:
        assert_proportion(int(count), len(masked.positions), 1 / 500, alarm=1e-6 / 500)


def test_whole_words_share_one_fate():
    ids, cu_seqlens = _sequences([128] * (MILLION // 128))
    masked = _mask(ids, cu_seqlens, Masking(unit="word"))
    word = np.cumsum(word_starts(ids, cu_seqlens, VOCABULARY))
    chosen = np.zeros(len(ids), bool)
    chosen[masked.positions] = True
    ordinary = ids >= 5
    words = np.unique(word[ordinary])
    touched = np.unique(word[masked.positions])
    assert_proportion(len(touched), len(words), 0.15)
    assert not np.isin(word[ordinary & ~chosen], touched).any()


def test_spans_have_the_lengths_asked_for():
    """Spans of three tokens only: each masked stretch is a multiple of three, but at an end."""
    ids, cu_seqlens = _sequences([152] * 2000)
    masking = Masking(unit="span", span_lengths=(0.0, 0.0, 1.0))
    masked = _mask(ids, cu_seqlens, masking, starts=np.ones(len(ids), bool))
    chosen = np.zeros(len(ids) + 1, bool)
    chosen[masked.positions] = True
    edges = np.flatnonzero(np.diff(chosen, prepend=False)).reshape(-1, 2)
    assert ((edges[:, 1] - edges[:, 0]) % 3 == 0).all()
    assert_proportion(len(masked.positions) // 3, 2000 * 50, 0.15)


@pytest.mark.parametrize("lengths", [inverse_lengths(3), geometric_lengths(0.2, 10)])
def test_span_lengths_follow_their_law(lengths):
    """In one long run at a rate so low that spans rarely touch."""
    ids = np.full(MILLION, 7, np.uint16)
    masking = Masking(0.001, unit="span", span_lengths=lengths)
    noise = token_noise(generator(3), MILLION)
    starts = np.ones(MILLION, bool)
    cu_seqlens = np.array([0, MILLION])
    masked = mask_tokens(ids, cu_seqlens, noise, VOCABULARY, masking, starts=starts)
    chosen = np.zeros(MILLION + 1, bool)
    chosen[masked.positions] = True
    edges = np.flatnonzero(np.diff(chosen, prepend=False)).reshape(-1, 2)
    found = np.bincount(edges[:, 1] - edges[:, 0], minlength=len(lengths) + 1)[1:]
    mean = (np.arange(1, len(lengths) + 1) * np.array(lengths)).sum()
    assert_proportion(int(found.sum()), int(MILLION / mean), 0.001)
    # One span in a thousand touches another, far below what the bound tells apart here.
    assert_proportion(int(found[0]), int(found.sum()), lengths[0])


def test_albert_and_spanbert_laws():
    assert inverse_lengths(3) == pytest.approx((6 / 11, 3 / 11, 2 / 11))
    # SpanBERT, section 3.1: a mean length of 3.8.
    law = geometric_lengths(0.2, 10)
    assert sum(n * p for n, p in enumerate(law, 1)) == pytest.approx(3.8, abs=0.03)


def test_rounded_selection_is_berts_count():
    lengths = [3, 4, 9, 12, 13, 66, 128, 512]
    ids, cu_seqlens = _sequences(lengths)
    masked = _mask(ids, cu_seqlens, Masking(selection="rounded"))
    counts = np.bincount(
        np.searchsorted(cu_seqlens, masked.positions, side="right") - 1, minlength=len(lengths)
    )
    assert counts.tolist() == [max(1, round((n - 2) * 0.15)) for n in lengths]


def test_rounded_selection_of_words_leaves_out_only_what_does_not_fit():
    ids, cu_seqlens = _sequences([90] * 300)
    masked = _mask(ids, cu_seqlens, Masking(selection="rounded", unit="word"))
    word = np.cumsum(word_starts(ids, cu_seqlens, VOCABULARY)) - 1
    chosen = np.zeros(len(ids), bool)
    chosen[masked.positions] = True
    size = np.bincount(word)
    for first, last in pairwise(cu_seqlens):
        inside = slice(first + 1, last - 1)
        count, target = chosen[inside].sum(), round(88 * 0.15)
        assert count <= target
        assert set(word[inside][chosen[inside]]).isdisjoint(word[inside][~chosen[inside]])
        left_out = size[np.unique(word[inside][~chosen[inside]])]
        assert (left_out > target - count).all()


@pytest.mark.parametrize("count", [5, 6, 40, 231])
def test_fixed_count(count):
    ids, cu_seqlens = _sequences([3, 7, 50, 128, 53])
    masked = _mask(ids, cu_seqlens, Masking(fixed_count=count))
    assert len(masked.positions) == count
    of = np.searchsorted(cu_seqlens, masked.positions, side="right") - 1
    assert set(of) == {0, 1, 2, 3, 4}
    assert (np.diff(masked.positions) > 0).all()


def test_fixed_count_takes_every_token_as_often():
    ids, cu_seqlens = _sequences([128] * 8)
    hits = np.zeros(len(ids), np.int64)
    for seed in range(500):
        hits[_mask(ids, cu_seqlens, Masking(fixed_count=126), seed).positions] += 1
    for count in hits[ids >= 5]:
        assert_proportion(int(count), 500, 0.125, alarm=1e-6 / 1008)


@pytest.mark.parametrize("count", [4, 232])
def test_fixed_count_that_cannot_be(count):
    ids, cu_seqlens = _sequences([3, 7, 50, 128, 53])
    with pytest.raises(ValueError, match=f"fixed_count is {count}"):
        _mask(ids, cu_seqlens, Masking(fixed_count=count))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 504), max_size=12), max_size=8),
    st.sampled_from(UNITS),
    st.sampled_from(["bernoulli", "rounded"]),
    st.sampled_from([0.0, 0.15, 0.6, 1.0]),
    st.integers(0, 1000),
)
def test_what_masking_never_does(rows, unit, selection, rate, seed):
    """Any rows, also empty and special ones: what is not predicted stays, and specials always."""
    ids = np.array([i for row in rows for i in row], np.uint16)
    cu_seqlens = cu_seqlens_of(np.array([len(row) for row in rows], np.int64))
    masked = _mask(ids, cu_seqlens, Masking(rate, unit=unit, selection=selection), seed)
    labels = masked.dense_labels()
    predicted = labels != IGNORE_INDEX
    assert (labels[predicted] == ids[predicted]).all()
    assert (masked.input_ids[~predicted] == ids[~predicted]).all()
    assert not predicted[ids < 5].any()
    for first, last in pairwise(cu_seqlens):
        if (ids[first:last] >= 5).any():
            assert predicted[first:last].any() == (rate > 0)
    if rate == 1:
        assert predicted[ids >= 5].all()


def _data_set(lengths):
    ids, cu_seqlens = _sequences(lengths)
    return Sequences(ids, cu_seqlens, np.zeros(len(ids), np.uint8))


@pytest.mark.parametrize("unit", UNITS)
def test_masks_depend_on_seed_epoch_and_index_alone(unit):
    data = _data_set([40, 17, 128, 9, 64])
    options = {"vocabulary": VOCABULARY, "masking": Masking(unit=unit), "seed": 3, "epoch": 2}
    together = masked_batch(data, np.array([4, 1, 2, 0]), **options)
    alone = masked_batch(data, np.array([2]), **options)
    at = together.sequences.cu_seqlens[[2, 3]]
    assert (together.sequences.input_ids[at[0] : at[1]] == alone.sequences.input_ids).all()
    later = masked_batch(data.take([1, 2]), np.array([1]), first_index=1, **options)
    assert (later.sequences.input_ids == alone.sequences.input_ids).all()
    for other in ({"seed": 4}, {"epoch": 3}, {"first_index": 7}):
        changed = masked_batch(data, np.array([2]), **{**options, **other})
        assert not np.array_equal(changed.masked.positions, alone.masked.positions)


def test_static_masks_come_back():
    data = _data_set([128] * 4)
    static = Masking(dupe_factor=10)

    def positions(epoch):
        batch = masked_batch(data, np.arange(4), VOCABULARY, static, seed=0, epoch=epoch)
        return batch.masked.positions.tolist()

    assert positions(13) == positions(3)
    assert len({tuple(positions(epoch)) for epoch in range(10)}) == 10


def test_noise_of_a_sequence_is_its_generators():
    noise = sequence_noise(5, 7, np.array([11, 3]), np.array([6, 9]))
    assert (noise[:6] == token_noise(generator(5, 7, 11), 6)).all()
    assert (noise[6:] == token_noise(generator(5, 7, 3), 9)).all()


def test_seeds_that_are_none():
    with pytest.raises(ValueError, match=r"seed must lie in 0 to .* got -1"):
        generator(-1)
    with pytest.raises(ValueError, match=r"epoch must lie in 0 to .* got -2"):
        sequence_noise(0, -2, np.array([0]), np.array([4]))


def test_rate_schedule():
    ids, cu_seqlens = _sequences([128] * 2000)
    masking = Masking(RateSchedule(0.3, 0.1, steps=100))
    maskable = int((ids >= 5).sum())
    for step, rate in ((0, 0.3), (50, 0.2), (100, 0.1), (900, 0.1)):
        masked = _mask(ids, cu_seqlens, masking, step=step)
        assert_proportion(len(masked.positions), maskable, rate)


def test_padded_to_a_fixed_size():
    ids, cu_seqlens = _sequences([20, 20])
    masked = _mask(ids, cu_seqlens, Masking())
    positions, labels = masked.padded(16)
    count = len(masked.positions)
    assert (positions[:count] == masked.positions).all() and (labels[:count] >= 5).all()
    assert (labels[count:] == IGNORE_INDEX).all() and len(positions) == len(labels) == 16
    with pytest.raises(ValueError, match="count is 1, but"):
        masked.padded(1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rate": 1.5}, "rate must be between"),
        ({"mask_share": 0.8, "random_share": 0.3}, r"mask_share \+ random_share"),
        ({"unit": "letter"}, "unit must be one of"),
        ({"selection": "all"}, "selection must be one of"),
        ({"fixed_count": 0}, "fixed_count must be at least 1"),
        ({"fixed_count": 9, "unit": "word"}, "fixed_count needs unit='token'"),
        ({"span_lengths": (0.5, 0.4)}, "must add up to 1"),
        ({"dupe_factor": 0}, "dupe_factor must be at least 1"),
    ],
)
def test_settings_that_are_none(setting, message):
    with pytest.raises(ValueError, match=message):
        Masking(**setting)


def test_inputs_that_do_not_fit():
    ids, cu_seqlens = _sequences([20, 20])
    noise = token_noise(generator(0), 40)
    for arguments, message in (
        ((ids.astype(np.float32), cu_seqlens, noise), "ids must be 1D integers"),
        ((ids, cu_seqlens[:-1], noise), "cu_seqlens must rise to the 40 ids"),
        ((ids, cu_seqlens, noise[:-1]), r"noise must be \(40, 4\)"),
        ((ids + 490, cu_seqlens, noise), "vocabulary of 505"),
    ):
        with pytest.raises(ValueError, match=message):
            mask_tokens(*arguments, VOCABULARY, Masking())
    unmarked = Vocabulary(MASK, VOCABULARY.special, VOCABULARY.ordinary)
    with pytest.raises(ValueError, match="does not mark where words begin"):
        mask_tokens(ids, cu_seqlens, noise, unmarked, Masking(unit="word"))
