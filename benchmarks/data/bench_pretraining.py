"""Tokens a second of one core from stored ids to masked batches.

On a shared machine `--benchmark-timer=time.process_time` counts this process's time alone.
The text is random words of one to three tokens, in sentences of 5 to 49 tokens.
"""

import numpy as np
import pytest

from fastbert.data import (
    Documents,
    Masking,
    SpecialTokens,
    Vocabulary,
    masked_batch,
    next_sentence_pairs,
    pack_sentences,
    sentence_order_pairs,
)

from ..shapes import SEED

CLS, SEP, MASK, SPECIAL, V = 0, 1, 2, 3, 30_522
SEQLEN = 128
BATCH = 256

PACKERS = {
    "sentences": lambda documents, special: pack_sentences(documents, special, SEQLEN),
    "next sentence": lambda documents, special: next_sentence_pairs(
        documents, special, SEQLEN, seed=SEED
    ),
    "sentence order": lambda documents, special: sentence_order_pairs(
        documents, special, SEQLEN, seed=SEED
    ),
}
MASKINGS = {
    "tokens": Masking(),
    "tokens, BERT's count": Masking(selection="rounded"),
    "words": Masking(unit="word"),
    "spans": Masking(unit="span"),
}


def _documents(count: int) -> Documents:
    rng = np.random.default_rng(SEED)
    return Documents.of(
        (
            [rng.integers(SPECIAL, V, n) for n in rng.integers(5, 50, rng.integers(5, 40))]
            for _ in range(count)
        ),
        np.uint16,
    )


def _vocabulary() -> Vocabulary:
    ids = np.arange(V)
    return Vocabulary(MASK, ids < SPECIAL, ids[SPECIAL:], ids >= 20_000)


def _checked(sequences, batches) -> None:
    """Nothing but labelled tokens changed, and about 15 % of them are labelled."""
    masked = np.concatenate([batch.sequences.input_ids for batch in batches])
    labels = np.concatenate([batch.masked.dense_labels() for batch in batches])
    predicted = labels >= 0
    assert (masked[~predicted] == sequences.input_ids[~predicted]).all()
    assert (labels[predicted] == sequences.input_ids[predicted]).all()
    assert 0.1 < predicted.mean() < 0.2


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("masking", MASKINGS)
def test_pack_and_mask(benchmark, tiny, packer, masking):
    documents, vocabulary = _documents(20 if tiny else 1000), _vocabulary()

    def run():
        sequences = PACKERS[packer](documents, SpecialTokens(CLS, SEP))
        bounds = range(0, len(sequences), BATCH)
        indices = [np.arange(i, min(i + BATCH, len(sequences))) for i in bounds]
        return sequences, [
            masked_batch(sequences, part, vocabulary, MASKINGS[masking], seed=SEED, epoch=0)
            for part in indices
        ]

    sequences, batches = run()
    _checked(sequences, batches)
    benchmark.group = "masking + packing"
    benchmark.pedantic(run, rounds=3 if tiny else 5, warmup_rounds=1)
    if benchmark.stats:
        rate = len(sequences.input_ids) / benchmark.stats.stats.median / 1e6
        benchmark.extra_info["million_tokens_per_second"] = round(rate, 2)
