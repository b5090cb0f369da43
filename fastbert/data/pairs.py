"""Pairs of segments: next-sentence prediction (BERT) and sentence-order prediction (ALBERT).

Letters: N pairs, T tokens.

Sources: Devlin et al. 2019, section 3.1 (task 2) and appendix A.2: two segments of together at
most the longest length, the second the true continuation half of the time and otherwise from
another document, 10 % of the targets shorter. Lan et al. 2020, section 3.1: two consecutive
segments, swapped half of the time.
"""

import numpy as np

from fastbert.data.documents import Documents, SpecialTokens
from fastbert.data.noise import generator
from fastbert.data.sequences import Sequences, cu_seqlens_of, gather_ranges

FOLLOWS, OTHER = 0, 1
SHORTEST = 2


def next_sentence_pairs(
    documents: Documents,
    special: SpecialTokens,
    max_length: int,
    *,
    seed: int,
    epoch: int = 0,
    short_share: float = 0.1,
    other_share: float = 0.5,
) -> Sequences:
    """Pairs for next-sentence prediction; label 1 where the second segment is another document's.

    Sentences of a document are gathered up to a target length and split at a random sentence; the
    first part is segment A. Segment B is the second part, or sentences of another document from a
    random one on, in which case the second part is used again for the next pair. A gathering of a
    single sentence always gets another document's. The longer segment then loses tokens, each from
    its front or its back at random, until the pair fits.

    Args:
        documents: at least two; sentences give the places to split.
        special: [CLS] A [SEP] B [SEP].
        max_length: with special tokens.
        seed, epoch: another epoch gives other pairs. Each document draws from its own generator.
        short_share: of the targets that are drawn from 2 to the longest length.
        other_share: of the pairs whose second segment comes from another document.

    Raises:
        ValueError: fewer than two documents, max_length below 5, a share outside 0 to 1.
    """
    _check(max_length, short_share=short_share, other_share=other_share)
    if len(documents) < 2:
        raise ValueError(
            f"next-sentence prediction needs two documents or more, got {len(documents)}"
        )
    pairs = []
    for document in range(len(documents)):
        rng = generator(seed, epoch, document)
        pairs += _document_pairs(documents, document, max_length - 3, short_share, other_share, rng)
    return _write(documents, special, pairs)


def sentence_order_pairs(
    documents: Documents,
    special: SpecialTokens,
    max_length: int,
    *,
    seed: int,
    epoch: int = 0,
    short_share: float = 0.1,
    swapped_share: float = 0.5,
) -> Sequences:
    """Pairs for sentence-order prediction; label 1 where the two segments are swapped.

    Gathered, split and cut like the pairs of `next_sentence_pairs`; a gathering of a single
    sentence is split within it, and one of a single token left out.

    Args:
        documents: sentences give the places to split.
        special, max_length, seed, epoch, short_share: as in `next_sentence_pairs`.
        swapped_share: of the pairs.

    Raises:
        ValueError: max_length below 5, a share outside 0 to 1.
    """
    _check(max_length, short_share=short_share, swapped_share=swapped_share)
    pairs = []
    for document in range(len(documents)):
        rng = generator(seed, epoch, document)
        pairs += _ordered_pairs(
            documents, document, max_length - 3, short_share, swapped_share, rng
        )
    return _write(documents, special, pairs)


def _check(max_length: int, **shares: float) -> None:
    if max_length < 3 + SHORTEST:
        raise ValueError(
            f"max_length must be at least {3 + SHORTEST} for a token of each segment, got "
            f"{max_length}"
        )
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {share}")


def _document_pairs(documents, document, room, short_share, other_share, rng) -> list[tuple]:
    first, last = documents.documents[document : document + 2].tolist()
    bounds = documents.sentences[first : last + 1].tolist()
    pairs, sentence = [], 0
    while sentence < last - first:
        target = _target(room, short_share, rng)
        end = _gather(bounds, sentence, target)
        split = sentence + 1
        if end - sentence > 1:
            split = int(rng.integers(sentence + 1, end))
        a = (bounds[sentence], bounds[split])
        if end - sentence == 1 or rng.random() < other_share:
            b = _elsewhere(documents, document, max(target - (a[1] - a[0]), 1), rng)
            pairs.append((*_cut(a, b, room, rng), OTHER))
            sentence = split
        else:
            pairs.append((*_cut(a, (bounds[split], bounds[end]), room, rng), FOLLOWS))
            sentence = end
    return pairs


def _ordered_pairs(documents, document, room, short_share, swapped_share, rng) -> list[tuple]:
    first, last = documents.documents[document : document + 2].tolist()
    bounds = documents.sentences[first : last + 1].tolist()
    pairs, sentence = [], 0
    while sentence < last - first:
        end = _gather(bounds, sentence, _target(room, short_share, rng))
        left, right = bounds[sentence], bounds[end]
        if end - sentence > 1:
            middle = bounds[int(rng.integers(sentence + 1, end))]
        elif right - left > 1:
            middle = int(rng.integers(left + 1, right))
        else:
            middle = None
        if middle is not None:
            a, b = _cut((left, middle), (middle, right), room, rng)
            swapped = rng.random() < swapped_share
            pairs.append((b, a, OTHER) if swapped else (a, b, FOLLOWS))
        sentence = end
    return pairs


def _target(room: int, short_share: float, rng: np.random.Generator) -> int:
    return int(rng.integers(SHORTEST, room + 1)) if rng.random() < short_share else room


def _gather(bounds: list[int], sentence: int, target: int) -> int:
    """The sentence behind the first one with which `target` tokens are reached."""
    end = sentence + 1
    while end < len(bounds) - 1 and bounds[end] - bounds[sentence] < target:
        end += 1
    return end


def _elsewhere(documents, document: int, target: int, rng) -> tuple[int, int]:
    """Sentences of another document, from a random one on, until `target` tokens are reached."""
    other = int(rng.integers(len(documents) - 1))
    other += other >= document
    first, last = documents.documents[other : other + 2].tolist()
    begin = int(rng.integers(first, last))
    # More than `target` tokens would be cut again, so no more sentences than that are looked at.
    bounds = documents.sentences[begin : min(last, begin + target) + 1].tolist()
    return bounds[0], bounds[_gather(bounds, 0, target)]


def _cut(a: tuple[int, int], b: tuple[int, int], room: int, rng) -> tuple[tuple, tuple]:
    """Shortens the longer segment, token by token from either end, until both fit.

    Which end loses a token is a fair coin, so the front loses a binomial number of them.
    """
    length_a, length_b = a[1] - a[0], b[1] - b[0]
    excess = length_a + length_b - room
    if excess <= 0:
        return a, b
    # The longer one loses until they are equal; from there both lose in turn, the second first.
    difference = length_a - length_b
    level = min(abs(difference), excess)
    rest = excess - level
    cut_a = (level if difference > 0 else 0) + rest // 2
    cut_b = excess - cut_a
    return _shorten(a, cut_a, rng), _shorten(b, cut_b, rng)


def _shorten(segment: tuple[int, int], count: int, rng) -> tuple[int, int]:
    front = int(rng.binomial(count, 0.5)) if count else 0
    return segment[0] + front, segment[1] - (count - front)


def _write(documents: Documents, special: SpecialTokens, pairs: list[tuple]) -> Sequences:
    """Copies the segments to their places and frames them."""
    spans = np.array([(*a, *b) for a, b, _ in pairs], np.int64).reshape(-1, 4)
    labels = np.array([label for *_, label in pairs], np.int64)
    lengths = np.stack([spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2]], 1)
    cu_seqlens = cu_seqlens_of(lengths.sum(1) + 3)
    place_a = cu_seqlens[:-1] + 1
    place_b = place_a + lengths[:, 0] + 1
    target = gather_ranges(np.stack([place_a, place_b], 1).ravel(), lengths.ravel())
    source = gather_ranges(spans[:, [0, 2]].ravel(), lengths.ravel())
    ids = np.full(int(cu_seqlens[-1]), special.sep_id, documents.ids.dtype)
    ids[cu_seqlens[:-1]] = special.cls_id
    ids[target] = documents.ids[source]
    token_types = np.zeros(len(ids), np.uint8)
    # The [SEP] behind B belongs to the second segment.
    token_types[gather_ranges(place_b, lengths[:, 1] + 1)] = 1
    words = None
    if documents.word_starts is not None:
        words = np.ones(len(ids), bool)
        words[target] = documents.word_starts[source]
    return Sequences(ids, cu_seqlens, token_types, words, labels)
