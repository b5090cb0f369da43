"""Next-sentence and sentence-order pairs: whose text, how often, cut from where."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import fastbert
from fastbert.data import (
    Documents,
    Masking,
    SpecialTokens,
    Vocabulary,
    masked_batch,
    next_sentence_pairs,
    sentence_order_pairs,
)
from fastbert.data.pairs import FOLLOWS, OTHER
from fastbert.testing.proportions import assert_proportion

CLS, SEP = 0, 1
SPECIAL = SpecialTokens(CLS, SEP)
TEXTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=2, max_size=8)


def numbered(shape):
    ids = iter(range(2, 1 << 30))
    return Documents.of([[[next(ids) for _ in range(n)] for n in document] for document in shape])


def segments(pairs):
    """(A, B, label) of each pair; asserts where special tokens and token types stand."""
    for number in range(len(pairs)):
        row = slice(*pairs.cu_seqlens[number : number + 2])
        ids, types = pairs.input_ids[row], pairs.token_type_ids[row]
        first, second = np.flatnonzero(ids == SEP)
        assert ids[0] == CLS and (ids == CLS).sum() == 1 and second == len(ids) - 1
        assert (types == (np.arange(len(ids)) > first)).all()
        yield ids[1:first], ids[first + 1 : second], int(pairs.pair_labels[number])


def document_of(documents, token):
    heads = documents.sentences[documents.documents[:-1]]
    return int(np.searchsorted(heads, int(token) - 2, side="right")) - 1


def assert_stretch(segment):
    assert len(segment) and (np.diff(segment.astype(np.int64)) == 1).all()


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(5, 20), st.integers(0, 99))
def test_next_sentence_pairs(shape, max_length, seed):
    documents = numbered(shape)
    pairs = next_sentence_pairs(documents, SPECIAL, max_length, seed=seed, short_share=0.3)
    assert pairs.lengths.max() <= max_length
    first_documents = set()
    for a, b, label in segments(pairs):
        assert_stretch(a)
        assert_stretch(b)
        of_a = document_of(documents, a[0])
        first_documents.add(of_a)
        assert document_of(documents, a[-1]) == of_a
        assert (document_of(documents, b[0]) == of_a) == (label == FOLLOWS)
        assert document_of(documents, b[0]) == document_of(documents, b[-1])
        assert label == OTHER or b[0] > a[-1]
    assert first_documents == set(range(len(documents)))


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(5, 20), st.integers(0, 99))
def test_sentence_order_pairs(shape, max_length, seed):
    documents = numbered(shape)
    pairs = sentence_order_pairs(documents, SPECIAL, max_length, seed=seed)
    assert pairs.lengths.max(initial=0) <= max_length
    for a, b, label in segments(pairs):
        assert_stretch(a)
        assert_stretch(b)
        assert document_of(documents, a[0]) == document_of(documents, b[0])
        assert (b[0] > a[-1]) == (label == FOLLOWS)


def test_half_of_the_seconds_are_others():
    """Documents of two sentences that fit: one true pair, or two of which both are others."""
    count = 10_000
    documents = numbered([[5, 5]] * count)
    pairs = next_sentence_pairs(documents, SPECIAL, 32, seed=0, short_share=0.0)
    follows = int((pairs.pair_labels == FOLLOWS).sum())
    assert_proportion(follows, count, 0.5)
    assert len(pairs) == follows + 2 * (count - follows)
    # Others are any other document's.
    others = np.zeros(count)
    for a, b, label in segments(pairs.take(np.arange(4000))):
        if label == OTHER:
            others[document_of(documents, b[0])] += 1
            assert document_of(documents, a[0]) != document_of(documents, b[0])
    assert_proportion(int(others[: count // 2].sum()), int(others.sum()), 0.5)


def test_half_of_the_orders_are_swapped():
    count = 10_000
    pairs = sentence_order_pairs(numbered([[5, 5]] * count), SPECIAL, 32, seed=0, short_share=0.0)
    assert len(pairs) == count
    assert_proportion(int((pairs.pair_labels == OTHER).sum()), count, 0.5)


def test_one_target_in_ten_is_short():
    """Sentences of one token meet their target exactly; the first 10 pairs of each document."""
    documents = numbered([[1] * 400] * 300)
    pairs = sentence_order_pairs(documents, SPECIAL, 35, seed=0)
    first = np.array([min(a[0], b[0]) for a, b, _ in segments(pairs)])
    document = (first.astype(np.int64) - 2) // 400
    place = np.arange(len(pairs)) - np.searchsorted(document, document)
    lengths = pairs.lengths[place < 10] - 3
    # A short target is drawn from 2 to 32 and so is the full one once in 31.
    assert_proportion(int((lengths < 32).sum()), len(lengths), 0.1 * 30 / 31)
    short = lengths[lengths < 32]
    assert short.min() == 2
    assert_proportion(int((short <= 16).sum()), len(short), 0.5)


def test_the_longer_segment_is_cut_from_either_end():
    count = 2000
    pairs = sentence_order_pairs(
        numbered([[39, 20]] * count), SPECIAL, 43, seed=0, short_share=0.0, swapped_share=0.0
    )
    front = 0
    for number, (a, b, _) in enumerate(segments(pairs)):
        assert len(a) == len(b) == 20
        front += int(a[0]) - 2 - 59 * number
    # 19 of A's 39 tokens go, each from the front or the back.
    assert_proportion(front, 19 * count, 0.5)


def test_equal_segments_are_cut_in_turn_the_second_first():
    pairs = sentence_order_pairs(
        numbered([[9, 9], [4, 9]]), SPECIAL, 16, seed=0, short_share=0.0, swapped_share=0.0
    )
    assert [(len(a), len(b)) for a, b, _ in segments(pairs)] == [(7, 6), (4, 9)]


def test_epochs_and_seeds_give_other_pairs():
    documents = numbered([[4, 5, 6, 7]] * 20)

    def make(**key):
        return next_sentence_pairs(documents, SPECIAL, 20, **key).input_ids.tolist()

    assert make(seed=1) == make(seed=1)
    assert make(seed=1) != make(seed=2)
    assert make(seed=1) != make(seed=1, epoch=1)


def test_a_padded_batch_is_the_models_input():
    """transformers' names and shapes, and nothing but padding beside the sequences."""
    documents = numbered([[4, 5, 6, 7]] * 10)
    pairs = next_sentence_pairs(documents, SPECIAL, 20, seed=0)
    size = int(documents.ids.max()) + 1
    ids = np.arange(size)
    vocabulary = Vocabulary(SEP, ids <= SEP, ids[SEP + 1 :])
    batch = masked_batch(pairs, np.arange(6), vocabulary, Masking(), seed=0, epoch=0)
    padded = batch.padded(pad_id=SEP, multiple_of=8)
    assert padded["input_ids"].shape == (6, 24)
    real = padded["attention_mask"].bool()
    assert real.sum(1).tolist() == pairs.lengths[:6].tolist()
    for name, flat in (
        ("input_ids", batch.sequences.input_ids),
        ("token_type_ids", batch.sequences.token_type_ids),
        ("labels", batch.masked.dense_labels()),
    ):
        assert (padded[name][real].numpy() == flat).all()
    assert (padded["labels"][~real] == -100).all()
    config = transformers.BertConfig(
        vocab_size=size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    outputs = fastbert.BertForPreTraining(config)(**padded)
    assert torch.isfinite(outputs.loss) and outputs.seq_relationship_logits.shape == (6, 2)


def test_inputs_that_are_none():
    with pytest.raises(ValueError, match="two documents or more, got 1"):
        next_sentence_pairs(numbered([[3, 3]]), SPECIAL, 16, seed=0)
    with pytest.raises(ValueError, match="max_length must be at least 5"):
        sentence_order_pairs(numbered([[3, 3]]), SPECIAL, 4, seed=0)
    with pytest.raises(ValueError, match="short_share must be between"):
        sentence_order_pairs(numbered([[3, 3]]), SPECIAL, 9, seed=0, short_share=2.0)
