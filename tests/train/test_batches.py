"""The stream of batches: every text once an epoch, resumable anywhere, of one shape."""

import shutil
from itertools import islice, takewhile

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fastbert.data import Corpus, Documents
from fastbert.data.corpus import write_shard
from fastbert.train.batches import BatchStream, Place, masking_of, prefetched
from fastbert.train.config import ConfigError, DataConfig, MaskingConfig, Phase

PHASE = Phase(steps=100, max_length=32, tokens_per_step=512, tokens_per_batch=256)


def _stream(corpora, data=None, **options):
    corpus = Corpus.open(corpora / "train")
    tokenizer = AutoTokenizer.from_pretrained(corpus.folder / "tokenizer")
    options = {"num_steps": 100, "seed": 3, **options}
    return BatchStream(corpus, tokenizer, DataConfig() if data is None else data, PHASE, **options)


def _equal(a, b) -> bool:
    return a.place == b.place and all(
        torch.equal(v, b.inputs[k]) if torch.is_tensor(v) else v == b.inputs[k]
        for k, v in a.inputs.items()
    )


def _real_tokens(batch) -> np.ndarray:
    """Original ids of the batch without special tokens and filling."""
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    ids = torch.where(labels == -100, ids, labels)[batch.inputs["attention_mask"][0] != 0]
    return ids[ids > 4].numpy()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_token_once_an_epoch(corpora, num_ranks):
    ids = []
    for rank in range(num_ranks):
        stream = _stream(corpora, rank=rank, num_ranks=num_ranks)
        ids += map(_real_tokens, takewhile(lambda b: b.place.epoch == 0, stream))
    corpus = Corpus.open(corpora / "train")
    stored = np.concatenate([corpus.shard(i).ids for i in range(len(corpus))])
    stored = stored[stored > 4]
    seen = np.concatenate(ids)
    if num_ranks == 1:
        assert np.array_equal(np.sort(seen), np.sort(stored))
    else:
        # An odd sequence at the end of a shard has no partner.
        assert len(stored) - 3 * PHASE.max_length <= len(seen) <= len(stored)


@pytest.mark.parametrize("sequences", ["packed", "next_sentence", "sentence_order"])
@pytest.mark.parametrize(
    "masking", [{}, {"fixed_count": 38}, {"final_rate": 0.3}, {"unit": "word"}], ids=str
)
def test_stream_goes_on_behind_any_batch(corpora, sequences, masking):
    """Over the ends of shards and of an epoch."""
    data = DataConfig(sequences=sequences, masking=MaskingConfig(**masking))
    batches = list(islice(_stream(corpora, data), 40))
    assert batches[-1].place.epoch >= 1
    if "fixed_count" in masking:
        assert {b.num_labels for b in batches} == {38}
    assert ("next_sentence_label" in batches[0].inputs) == (sequences != "packed")
    for number in (0, 7, 20):
        resumed = _stream(corpora, data, place=batches[number].place)
        rest = batches[number + 1 : number + 12]
        assert all(map(_equal, islice(resumed, len(rest)), rest))
    assert not _equal(batches[0], batches[1])


def test_rows_of_the_last_layer_come_with_the_batch(corpora):
    """And nothing else changes."""
    data = DataConfig(sequences="next_sentence")
    plain, subset = (
        list(islice(_stream(corpora, data, last_layer_subset=flag), 5)) for flag in (False, True)
    )
    for batch, other in zip(plain, subset, strict=True):
        rows = set(other.inputs.pop("last_layer_rows").tolist())
        assert _equal(batch, other)
        labelled = (batch.inputs["labels"][0] != -100).nonzero().flatten().tolist()
        firsts = batch.inputs["cu_seq_lens_q"][:-1].unique().tolist()
        # The last one is the end where there is room for more sequences.
        assert {*labelled, *firsts[: len(batch.lengths)]} <= rows
        assert len(rows) < PHASE.tokens_per_batch


def test_epochs_and_seeds_differ(corpora):
    first, second, other = (
        next(iter(_stream(corpora, place=Place(epoch=epoch), seed=seed)))
        for epoch, seed in ((0, 3), (1, 3), (0, 4))
    )
    assert not torch.equal(first.inputs["input_ids"], second.inputs["input_ids"])
    assert not torch.equal(first.inputs["input_ids"], other.inputs["input_ids"])


def test_rate_schedule_follows_the_step(corpora):
    data = DataConfig(masking=MaskingConfig(rate=0.1, final_rate=0.5))
    for first_step, rate in ((0, 0.1), (50, 0.3), (100, 0.5)):
        batches = list(islice(_stream(corpora, data, first_step=first_step), 20))
        share = sum(b.num_labels for b in batches) / sum(b.num_tokens for b in batches)
        assert share == pytest.approx(rate, abs=0.05)


def test_prefetching_changes_nothing(corpora):
    ahead = prefetched(iter(_stream(corpora)))
    assert all(map(_equal, islice(ahead, 10), _stream(corpora)))
    ahead.close()


def test_too_small_a_room_names_the_setting(corpora):
    for name, match in (
        ("sequences_per_batch", "num_sequences is 2"),
        ("labels_per_batch", "is 2"),
    ):
        with pytest.raises(ConfigError, match=rf"{match}.*data.{name}"):
            list(islice(_stream(corpora, DataConfig(**{name: 2})), 3))


def test_empty_corpus_is_refused(corpora):
    with pytest.raises(ConfigError, match="no shard has a sequence for each of 99 processes"):
        next(iter(_stream(corpora, num_ranks=99)))


def test_pairs_of_a_single_document_are_refused(corpora, tmp_path):
    folder = shutil.copytree(corpora / "train", tmp_path / "corpus")
    shutil.rmtree(folder / "00000")
    write_shard(folder / "00000", Documents.of([[[7, 8, 9], [10, 11]]], np.uint16))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    data = DataConfig(sequences="next_sentence")
    stream = BatchStream(Corpus.open(folder), tokenizer, data, PHASE, num_steps=9, seed=3)
    with pytest.raises(ConfigError, match=r"shard 00000 of .*two documents or more, got 1"):
        next(iter(stream))


def test_settings_that_exclude_each_other():

    with pytest.raises(ConfigError, match=r"data.masking: fixed_count needs unit='token'"):
        masking_of(MaskingConfig(unit="word", fixed_count=3), 10)


def test_changed_corpus_is_noticed(corpora, tmp_path):
    """A place of another corpus is refused, not silently gone on from."""

    folder = shutil.copytree(corpora / "train", tmp_path / "corpus")
    place = next(iter(_stream(corpora))).place
    corpus = Corpus.open(folder)
    for name in corpus.shards:
        documents = corpus.shard(corpus.shards.index(name))
        half = len(documents) // 2
        kept = documents.documents[: half + 1].copy()
        sentences = documents.sentences[: kept[-1] + 1].copy()
        ids = documents.ids[: sentences[-1]].copy()
        shutil.rmtree(folder / name)
        write_shard(folder / name, Documents(ids, sentences, kept))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    stream = BatchStream(corpus, tokenizer, DataConfig(), PHASE, num_steps=100, seed=3, place=place)
    with pytest.raises(ValueError, match="sampler with other num_sequences"):
        next(iter(stream))
