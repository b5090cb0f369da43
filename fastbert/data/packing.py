"""Sequences without pairs: sentences of the text, in order, up to the longest length.

Letters: K sentences, N sequences, T tokens.

RoBERTa (Liu et al. 2019, section 4.2): FULL-SENTENCES goes on into the next document, with one more
separator between them; DOC-SENTENCES does not.
"""

import numpy as np

from fastbert.data.documents import Documents, SpecialTokens
from fastbert.data.sequences import Sequences, cu_seqlens_of, gather_ranges


def pack_sentences(
    documents: Documents,
    special: SpecialTokens,
    max_length: int,
    *,
    cross_documents: bool = True,
) -> Sequences:
    """Fills sequences with whole sentences, every token exactly once.

    A sentence longer than a sequence is cut; what remains of it goes on like a sentence of its own.

    Args:
        documents: the text.
        special: [CLS] at the beginning, [SEP] at the end and between documents.
        max_length: with special tokens.
        cross_documents: fill up with the next document (FULL-SENTENCES), or end the sequence with
            the document (DOC-SENTENCES).

    Raises:
        ValueError: max_length below 3.
    """
    if max_length < 3:
        raise ValueError(
            f"max_length must be at least 3 for a token between [CLS] and [SEP], got {max_length}"
        )
    room = max_length - 2
    starts, lengths, opens = _pieces(documents, room)
    bounds = _fill(lengths, opens, room, cross_documents)
    return _write(documents, special, starts, lengths, opens, bounds)


def _pieces(documents: Documents, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sentences cut to `room`: start and length of each, and whether a document begins with it."""
    sentence_starts = np.asarray(documents.sentences[:-1])
    sentence_lengths = np.diff(documents.sentences)
    parts = -(-sentence_lengths // room)
    place = gather_ranges(np.zeros(len(parts), np.int64), parts)
    starts = np.repeat(sentence_starts, parts) + place * room
    lengths = np.minimum(np.repeat(sentence_lengths, parts) - place * room, room)
    opens_document = np.zeros(len(parts), bool)
    opens_document[documents.documents[:-1]] = True
    return starts, lengths, (np.repeat(opens_document, parts) & (place == 0))


def _fill(lengths, opens, room: int, cross_documents: bool) -> np.ndarray:
    """First piece of each sequence, and the number of pieces: greedy, in order."""
    # A document that begins inside a sequence costs a separator; one that opens it does not.
    ends = np.cumsum(lengths + opens)
    firsts = np.flatnonzero(opens)
    bounds, piece = [0], 0
    while piece < len(lengths):
        before = (ends[piece - 1] if piece else 0) + int(opens[piece])
        following = int(np.searchsorted(ends, before + room, side="right"))
        if not cross_documents:
            document = int(np.searchsorted(firsts, piece, side="right"))
            following = min(following, firsts[document] if document < len(firsts) else following)
        piece = following
        bounds.append(piece)
    return np.array(bounds, np.int64)


def _write(documents, special, starts, lengths, opens, bounds) -> Sequences:
    """Copies the pieces to their places and sets the special tokens between them."""
    counts = np.diff(bounds)
    heads = bounds[:-1]
    separated = opens.astype(np.int64)
    separated[heads] = 0
    ends = np.cumsum(lengths + separated)
    before = ends - lengths
    first = before[heads]
    last = ends[bounds[1:] - 1]
    cu_seqlens = cu_seqlens_of(last - first + 2)
    places = before + np.repeat(cu_seqlens[:-1] + 1 - first, counts)
    ids = np.full(int(cu_seqlens[-1]), special.sep_id, documents.ids.dtype)
    ids[cu_seqlens[:-1]] = special.cls_id
    target = gather_ranges(places, lengths)
    source = gather_ranges(starts, lengths)
    ids[target] = documents.ids[source]
    words = None
    if documents.word_starts is not None:
        words = np.ones(len(ids), bool)
        words[target] = documents.word_starts[source]
    return Sequences(ids, cu_seqlens, np.zeros(len(ids), np.uint8), words)
