"""The endless stream of packed, masked batches of a corpus, resumable behind any of them.

Every batch carries the place behind it, so a run resumes behind the last batch it trained on
whatever was prepared ahead. The order, the pairs and the masks are functions of the seed, the
epoch and the shard alone.
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastbert.data import (
    Batch,
    Corpus,
    Masking,
    RateSchedule,
    Sequences,
    SpecialTokens,
    TokenBudgetSampler,
    Vocabulary,
    geometric_lengths,
    inverse_lengths,
    masked_batch,
    next_sentence_pairs,
    pack_sentences,
    sentence_order_pairs,
)
from fastbert.data.noise import generator
from fastbert.padding import pack_columns
from fastbert.train.config import ConfigError, DataConfig, MaskingConfig, Phase

AHEAD = 2
"""Batches prepared while one is computed."""


@dataclass(frozen=True)
class Place:
    """Where a stream goes on.

    Attributes:
        phase: of the run.
        epoch: over the corpus. shard: position in the epoch's order of shards.
        sampler: state of that shard's `TokenBudgetSampler`; None at its beginning.
        batches: taken since the phase began.
    """

    phase: int = 0
    epoch: int = 0
    shard: int = 0
    sampler: dict[str, int] | None = None
    batches: int = 0

    def among(self, num_ranks: int, before: int) -> "Place":
        """The same place for other processes, which share out anew what follows.

        Args:
            num_ranks: how many go on.
            before: how many came here, at the end of an optimizer step.
        """
        sampler = self.sampler and {**self.sampler, "num_ranks": num_ranks}
        # Each takes more batches of a step, or fewer.
        return replace(self, sampler=sampler, batches=self.batches * before // num_ranks)


@dataclass(frozen=True)
class TrainingBatch:
    """One batch of one process.

    Attributes:
        inputs: keyword arguments of the model, of `fastbert.padding.pack`.
        place: behind it.
        lengths: `(N,)` tokens of its sequences.
        capacity: rows that are computed, idle ones included.
        num_labels: predicted tokens.
    """

    inputs: dict
    place: Place
    lengths: np.ndarray
    capacity: int
    num_labels: int

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())


class BatchStream:
    """Batches of one phase for one process, without end.

    Args:
        corpus: of token ids.
        tokenizer: that made it.
        data: what sequences and masks are made.
        phase: their length and the tokens of a batch.
        num_steps: of the run, at which a masking rate reaches its end.
        seed: of all that is drawn.
        place: where to begin.
        rank, num_ranks: this process and all of them.
        first_step: optimizer step at which the phase begins.
        pin: lay tensors into pinned memory, for copies that wait for nothing.
        last_layer_subset: as in `fastbert.padding.pack`.

    Raises:
        ConfigError: a corpus without enough text for one batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer,
        data: DataConfig,
        phase: Phase,
        *,
        num_steps: int,
        seed: int,
        place: Place | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        first_step: int = 0,
        pin: bool = False,
        last_layer_subset: bool = False,
    ):
        self._corpus, self._data, self._phase = corpus, data, phase
        self._vocabulary, self._special = Vocabulary.of(tokenizer), SpecialTokens.of(tokenizer)
        self._pad_id = tokenizer.pad_token_id
        self._masking = masking_of(data.masking, num_steps)
        self._seed, self._rank, self._num_ranks = seed, rank, num_ranks
        self._first_step, self._pin = first_step, pin
        self._last_layer_subset = last_layer_subset
        self._place = Place() if place is None else place
        # Of the first sequences that are made: a graph needs the same capacity for all batches.
        self._capacity: dict[str, int] | None = None

    @property
    def accumulation(self) -> int:
        """Batches of one optimizer step."""
        return self._phase.tokens_per_step // (self._phase.tokens_per_batch * self._num_ranks)

    def __iter__(self) -> Iterator[TrainingBatch]:
        place = self._place
        while True:
            whole_epoch = place.shard == 0 and place.sampler is None
            before = place.batches
            for shard in range(place.shard, len(self._corpus)):
                for batch in self._shard_batches(place):
                    place = batch.place
                    yield batch
                place = replace(place, shard=shard + 1, sampler=None)
            if whole_epoch and place.batches == before:
                raise ConfigError(
                    f"{self._corpus.folder} has too little text: no shard has a sequence for each "
                    f"of {self._num_ranks} processes"
                )
            place = replace(place, epoch=place.epoch + 1, shard=0)

    def _shard_batches(self, place: Place) -> Iterator[TrainingBatch]:
        """The rest of the shard that stands at the place."""
        order = generator(self._seed, place.epoch).permutation(len(self._corpus))
        shard = int(order[place.shard])
        seed = _shard_seed(self._seed, shard)
        sequences = self._sequences(shard, seed, place.epoch)
        sampler = TokenBudgetSampler(
            sequences.lengths,
            self._phase.tokens_per_batch,
            rank=self._rank,
            num_ranks=self._num_ranks,
            seed=seed,
            # The rest of a shard may have fewer tokens than are to be predicted.
            drop_last=self._data.masking.fixed_count is not None,
        )
        sampler.set_epoch(place.epoch)
        if place.sampler is not None:
            sampler.load_state_dict(place.sampler)
        for indices in sampler:
            place = replace(place, sampler=sampler.state_dict(), batches=place.batches + 1)
            yield self._batch(sequences, indices, seed, place)

    def _sequences(self, shard: int, seed: int, epoch: int) -> Sequences:
        documents, data, length = self._corpus.shard(shard), self._data, self._phase.max_length
        if data.sequences == "packed":
            return pack_sentences(
                documents, self._special, length, cross_documents=data.cross_documents
            )
        pairs = next_sentence_pairs if data.sequences == "next_sentence" else sentence_order_pairs
        # Static masking repeats the pairs with their masks, as BERT's duplicated data does.
        try:
            return pairs(
                documents,
                self._special,
                length,
                seed=seed,
                epoch=self._masking.epoch_of_masks(epoch),
                short_share=data.short_share,
            )
        except ValueError as error:
            raise ConfigError(
                f"shard {self._corpus.shards[shard]} of {self._corpus.folder}: {error}"
            ) from error

    def _batch(self, sequences, indices, seed: int, place: Place) -> TrainingBatch:
        step = self._first_step + (place.batches - 1) // self.accumulation
        try:
            batch = masked_batch(
                sequences,
                np.asarray(indices),
                self._vocabulary,
                self._masking,
                seed=seed,
                epoch=place.epoch,
                step=step,
            )
        except ValueError as error:
            raise ConfigError(f"data.masking: {error}") from error
        if self._capacity is None:
            self._capacity = self._room()
        inputs = self._packed(batch)
        if self._pin:
            inputs = {k: v.pin_memory() if torch.is_tensor(v) else v for k, v in inputs.items()}
        return TrainingBatch(
            inputs,
            place,
            batch.sequences.lengths,
            self._phase.tokens_per_batch,
            len(batch.masked.positions),
        )

    def _packed(self, batch: Batch) -> dict:
        """The masked batch in tensors of fixed shapes."""
        sequences = batch.sequences
        of_tokens = {
            "input_ids": sequences.input_ids,
            "token_type_ids": sequences.token_type_ids,
            "labels": batch.masked.dense_labels(),
        }
        of_sequences = {}
        if sequences.pair_labels is not None:
            of_sequences["next_sentence_label"] = sequences.pair_labels
        try:
            return pack_columns(
                of_tokens,
                of_sequences,
                sequences.lengths,
                **self._capacity,
                pad_token_id=self._pad_id,
                last_layer_subset=self._last_layer_subset,
            )
        except ValueError as error:
            raise ConfigError(
                f"{error} (data.sequences_per_batch sets num_sequences, data.labels_per_batch sets "
                f"num_labels)"
            ) from error

    def _room(self) -> dict[str, int]:
        """The capacities of every batch, the same in every process and after every resumption."""
        tokens = self._phase.tokens_per_batch
        lengths = self._sequences(0, _shard_seed(self._seed, 0), 0).lengths
        mean = lengths.mean() if len(lengths) else self._phase.max_length
        sequences = self._data.sequences_per_batch or min(tokens, 16 + 4 * math.ceil(tokens / mean))
        masking = self._data.masking
        if masking.fixed_count is not None:
            labels = masking.fixed_count
        else:
            rate = max(masking.rate, masking.final_rate or 0)
            # Eight deviations of a binomial law, wider where units of several tokens are chosen;
            # and the one token a sequence has at least.
            deviation = math.sqrt(tokens * rate * (1 if masking.unit == "token" else 9))
            labels = math.ceil(rate * tokens + 8 * deviation) + sequences
        return {
            "num_tokens": tokens,
            "num_sequences": sequences,
            "num_labels": min(self._data.labels_per_batch or labels, tokens),
            "max_seqlen": self._phase.max_length,
        }


def masking_of(masking: MaskingConfig, num_steps: int) -> Masking:
    """The settings as `fastbert.data` takes them.

    Raises:
        ConfigError: settings that exclude each other.
    """
    rate = masking.rate
    if masking.final_rate is not None:
        rate = RateSchedule(masking.rate, masking.final_rate, num_steps)
    lengths = inverse_lengths if masking.span_lengths == "inverse" else geometric_lengths
    try:
        return Masking(
            rate,
            masking.mask_share,
            masking.random_share,
            masking.unit,
            masking.selection,
            masking.fixed_count,
            lengths(),
            masking.dupe_factor,
        )
    except ValueError as error:
        raise ConfigError(f"data.masking: {error}") from error


def prefetched(batches: Iterator[TrainingBatch]) -> Iterator[TrainingBatch]:
    """The same batches, prepared by a thread while those before them are used."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        ahead = deque(pool.submit(next, batches) for _ in range(AHEAD))
        while True:
            batch = ahead.popleft().result()
            ahead.append(pool.submit(next, batches))
            yield batch


def _shard_seed(seed: int, shard: int) -> int:
    """A seed of its own for each shard: sequences are numbered from 0 in all of them."""
    return int(np.random.SeedSequence([seed, shard]).generate_state(1, np.uint64)[0])
