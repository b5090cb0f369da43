"""Training sequences laid one after the other, and batches of them.

Letters: N sequences, T tokens, S padded length, P masked tokens.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from fastbert.data.masking import MaskedTokens, Masking, mask_tokens
from fastbert.data.noise import sequence_noise
from fastbert.data.vocabulary import Vocabulary
from fastbert.padding import IGNORE_INDEX


def cu_seqlens_of(lengths: np.ndarray) -> np.ndarray:
    """`(N,)` lengths to `(N+1,)` int64 offsets that begin with 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def gather_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices start, start + 1, ... of all ranges, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


@dataclass(frozen=True)
class Sequences:
    """N sequences with their special tokens, ready to be masked.

    Attributes:
        input_ids: `(T,)` integers.
        cu_seqlens: `(N+1,)` int64, from 0 to T.
        token_type_ids: `(T,)` uint8, 1 in the second segment of a pair.
        word_starts: `(T,)` bool, where a user's segmentation says that words begin; None: the
            vocabulary's marks decide.
        pair_labels: `(N,)` int64 for pairs, 0 where the second segment follows the first in the
            text, 1 where it does not (next sentence) or where the two are swapped (sentence
            order), as transformers' heads read it; None without pairs.
    """

    input_ids: np.ndarray
    cu_seqlens: np.ndarray
    token_type_ids: np.ndarray
    word_starts: np.ndarray | None = None
    pair_labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> np.ndarray:
        """`(N,)` tokens of each sequence."""
        return np.diff(self.cu_seqlens)

    def take(self, indices: np.ndarray) -> "Sequences":
        """The sequences of these numbers, in this order.

        Raises:
            IndexError: a number outside 0 to N - 1.
        """
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"indices must lie in 0 to {len(self) - 1}, got {indices}")
        # Not from `lengths`, which are those of the whole data set.
        lengths = self.cu_seqlens[indices + 1] - self.cu_seqlens[indices]
        tokens = gather_ranges(self.cu_seqlens[indices], lengths)
        return Sequences(
            self.input_ids[tokens],
            cu_seqlens_of(lengths),
            self.token_type_ids[tokens],
            None if self.word_starts is None else self.word_starts[tokens],
            None if self.pair_labels is None else self.pair_labels[indices],
        )


def concatenate(parts: list[Sequences]) -> Sequences:
    """All sequences of `parts` in order; at least one part, of one kind.

    Raises:
        ValueError: no part, or some with and some without words or pairs.
    """
    if not parts:
        raise ValueError("parts must hold at least one Sequences")

    def joined(name):
        columns = [getattr(part, name) for part in parts]
        if any(column is None for column in columns):
            if any(column is not None for column in columns):
                raise ValueError(f"some of the parts have {name} and some have not")
            return None
        return np.concatenate(columns)

    columns = {f.name: joined(f.name) for f in fields(Sequences) if f.name != "cu_seqlens"}
    lengths = np.concatenate([part.lengths for part in parts])
    return Sequences(cu_seqlens=cu_seqlens_of(lengths), **columns)


@dataclass(frozen=True)
class Batch:
    """A masked batch without padding.

    Attributes:
        sequences: its sequences, `input_ids` with replacements.
        masked: which tokens are predicted, and what they were.
    """

    sequences: Sequences
    masked: MaskedTokens

    def padded(self, pad_id: int, *, multiple_of: int = 1) -> dict[str, torch.Tensor]:
        """`(N, S)` tensors under transformers' names, S rounded up to a multiple.

        `input_ids`, `token_type_ids`, `attention_mask` and `labels` (-100 where nothing is
        predicted), all int64; for pairs `next_sentence_label`, `(N,)`.

        Raises:
            ValueError: multiple_of below 1.
        """
        sequences = self.sequences
        columns = {
            "input_ids": (sequences.input_ids, pad_id),
            "token_type_ids": (sequences.token_type_ids, 0),
            "attention_mask": (np.ones(len(sequences.input_ids), np.int64), 0),
            "labels": (self.masked.dense_labels(), IGNORE_INDEX),
        }
        tensors = {
            name: pad_rows(flat, sequences.cu_seqlens, value, multiple_of=multiple_of)
            for name, (flat, value) in columns.items()
        }
        if sequences.pair_labels is not None:
            tensors["next_sentence_label"] = torch.from_numpy(sequences.pair_labels)
        return tensors


def pad_rows(
    flat: np.ndarray, cu_seqlens: np.ndarray, value: int, *, multiple_of: int = 1
) -> torch.Tensor:
    """`(T,)` numbers to an `(N, S)` int64 tensor, `value` behind each sequence.

    Raises:
        ValueError: multiple_of below 1.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be at least 1, got {multiple_of}")
    lengths = np.diff(cu_seqlens)
    longest = -(-int(lengths.max(initial=0)) // multiple_of) * multiple_of
    rows = np.full((len(lengths), longest), value, np.int64)
    rows[np.arange(longest) < lengths[:, None]] = flat
    return torch.from_numpy(rows)


def masked_batch(
    sequences: Sequences,
    indices: np.ndarray,
    vocabulary: Vocabulary,
    masking: Masking,
    *,
    seed: int,
    epoch: int,
    step: int = 0,
    first_index: int = 0,
) -> Batch:
    """Takes sequences and masks them.

    With fixed_count unset, the masks of a sequence depend on (seed, epoch, its index) alone, not on
    the batch it comes in or the worker that makes it.

    Args:
        sequences: the data set.
        indices: `(N,)` which ones.
        vocabulary, masking: see `mask_tokens`.
        seed, epoch: of the noise. step: for a `RateSchedule`.
        first_index: the sequences that come before these in the data set, where these are one
            shard's.

    Raises:
        ValueError, IndexError: as in `mask_tokens` and `Sequences.take`.
    """
    batch = sequences.take(indices)
    numbers = np.asarray(indices, np.int64) + first_index
    noise = sequence_noise(seed, masking.epoch_of_masks(epoch), numbers, batch.lengths)
    masked = mask_tokens(
        batch.input_ids,
        batch.cu_seqlens,
        noise,
        vocabulary,
        masking,
        starts=batch.word_starts,
        step=step,
    )
    return Batch(replace(batch, input_ids=masked.input_ids), masked)
