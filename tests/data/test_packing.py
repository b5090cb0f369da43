"""Packers lose nothing, invent nothing and keep to the limit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastbert.data import Documents, Sequences, SpecialTokens, concatenate, pack_sentences, pad_rows

CLS, SEP = 0, 1
SPECIAL = SpecialTokens(CLS, SEP)
TEXTS = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8)


def numbered(shape):
    """Documents of sentences of these lengths whose ids count from 2 on: every token is unique."""
    ids = iter(range(2, 1 << 30))
    return Documents.of([[[next(ids) for _ in range(n)] for n in document] for document in shape])


def rows(sequences):
    return [part.tolist() for part in np.split(sequences.input_ids, sequences.cu_seqlens[1:-1])]


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(3, 14), st.booleans())
def test_every_token_once_and_specials_in_place(shape, max_length, cross):
    documents = numbered(shape)
    packed = pack_sentences(documents, SPECIAL, max_length, cross_documents=cross)
    ids = packed.input_ids
    assert ids[ids > SEP].tolist() == list(range(2, 2 + len(documents.ids)))
    assert packed.lengths.max(initial=0) <= max_length
    starts = documents.sentences[documents.documents[:-1]] + 2
    for row in rows(packed) if len(packed) else []:
        assert row[0] == CLS and row[-1] == SEP and CLS not in row[1:]
        inner = row[1:-1]
        assert inner and inner[0] != SEP and inner[-1] != SEP
        # A separator stands exactly before each document that begins inside.
        separated = [inner[i + 1] for i, token in enumerate(inner) if token == SEP]
        assert separated == [t for t in inner[1:] if t in starts]
        assert cross or not separated


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(3, 14))
def test_sequences_are_as_full_as_whole_sentences_allow(shape, max_length):
    documents = numbered(shape)
    packed = pack_sentences(documents, SPECIAL, max_length)
    room = max_length - 2
    starts = documents.sentences[:-1] + 2
    opens = documents.sentences[documents.documents[:-1]] + 2
    lengths = dict(zip(starts.tolist(), np.diff(documents.sentences).tolist(), strict=True))
    following = rows(packed)[1:] if len(packed) else []
    for row, after in zip(rows(packed), following, strict=False):
        head = after[1]
        if head in lengths:
            needed = min(lengths[head], room) + (head in opens)
            assert len(row) - 2 + needed > room
        # What is not the head of a sentence is the rest of one that was cut.
        else:
            assert len(row) == max_length


def test_a_known_packing():
    packed = pack_sentences(numbered([[2, 2], [3], [9]]), SPECIAL, 9)
    assert rows(packed) == [
        [CLS, 2, 3, 4, 5, SEP],
        [CLS, 6, 7, 8, SEP],
        [CLS, 9, 10, 11, 12, 13, 14, 15, SEP],
        [CLS, 16, 17, SEP],
    ]
    packed = pack_sentences(numbered([[2, 2], [2], [1]]), SPECIAL, 9)
    assert rows(packed) == [[CLS, 2, 3, 4, 5, SEP, 6, 7, SEP], [CLS, 8, SEP]]


def test_words_go_with_their_tokens():
    documents = numbered([[3, 4], [5]])
    starts = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1], bool)
    documents = Documents(documents.ids, documents.sentences, documents.documents, starts)
    packed = pack_sentences(documents, SPECIAL, 7)
    ordinary = packed.input_ids > SEP
    assert (packed.word_starts[ordinary] == starts).all() and packed.word_starts[~ordinary].all()


def test_take_and_concatenate():
    packed = pack_sentences(numbered([[2, 2], [3], [7]]), SPECIAL, 9)
    taken = packed.take([2, 0])
    assert rows(taken) == [rows(packed)[2], rows(packed)[0]]
    assert rows(concatenate([taken, packed])) == rows(taken) + rows(packed)
    with pytest.raises(IndexError, match="indices must lie in 0 to 2"):
        packed.take([3])
    words = Sequences(taken.input_ids, taken.cu_seqlens, taken.token_type_ids, taken.input_ids > 1)
    with pytest.raises(ValueError, match="some of the parts have word_starts"):
        concatenate([taken, words])


def test_pad_rows():
    padded = pad_rows(np.array([5, 6, 7, 8], np.uint16), np.array([0, 3, 3, 4]), 9, multiple_of=4)
    assert padded.tolist() == [[5, 6, 7, 9], [9, 9, 9, 9], [8, 9, 9, 9]]


def test_no_room():
    with pytest.raises(ValueError, match="max_length must be at least 3"):
        pack_sentences(numbered([[1]]), SPECIAL, 2)
