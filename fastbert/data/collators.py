"""transformers' masked-LM collators, with fastbert's masking inside.

They derive from transformers' class: the same fields, checks, padding and hooks
(`torch_mask_tokens`, `numpy_mask_tokens`), so its Trainer takes them as its own. What differs:

- random replacements are ordinary tokens, never special ones;
- every sequence has at least one predicted token;
- whole words keep the 80/10/10 split and are told by the vocabulary, by `offset_mapping`,
  `word_ids` or `chinese_ref`, whichever is there, in rows of any length;
- with a seed, masks are new in every epoch, worker and process of a run, and a rerun repeats them
  all; `set_epoch` says where a run that is resumed goes on.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from fastbert.data.masking import Masking, mask_tokens
from fastbert.data.noise import generator, token_noise
from fastbert.data.sequences import cu_seqlens_of
from fastbert.data.vocabulary import Vocabulary, word_starts

# DataLoader workers that are told apart; a slot counts how often a worker was started.
_WORKERS = 4096
_COUNTED = -1
"""In place of an epoch: none was named."""
_COLUMNS = ("special_tokens_mask", "offset_mapping", "word_ids", "chinese_ref")


@dataclass
class DataCollatorForLanguageModeling(transformers.DataCollatorForLanguageModeling):
    """Pads rows and masks them; see transformers' class of the same name for the arguments.

    `tokenizer`, `mlm`, `whole_word_mask`, `mlm_probability`, `mask_replace_prob`,
    `random_replace_prob`, `pad_to_multiple_of`, `return_tensors` ("pt" or "np") and `seed` mean
    what they mean there. Whole words need a fast tokenizer's `offset_mapping` only where the
    vocabulary does not mark them. Rows may carry `chinese_ref`, the places of tokens that continue
    a word of a segmentation, or `word_ids`, the word of each token and None at special ones.

    Raises:
        ValueError: no mask token, shares that are none; at the call: an unknown `return_tensors`,
            words that cannot be told.
    """

    def __post_init__(self):
        split = self.mask_replace_prob, self.random_replace_prob
        with warnings.catch_warnings():
            # The parent warns that whole words are always replaced by the mask token; not here.
            warnings.simplefilter("ignore")
            super().__post_init__()
        self.mask_replace_prob, self.random_replace_prob = map(float, split)
        self._vocabulary, self._vocabulary_size = None, 0
        self._process, self._start, self._draws = None, 0, 0
        if self.seed is not None:
            self._starts = torch.zeros(_WORKERS, dtype=torch.int64).share_memory_()
            self._epoch = torch.full((), _COUNTED, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch whose batches come next, as for a sampler, also to workers that run.

        The masks of a batch are then a function of (seed, epoch, process of the run, worker, number
        of the batch), so that a run resumed at an epoch goes on with that epoch's. Without a call
        epochs are counted from the collator's making.

        Raises:
            ValueError: a negative epoch; a collator without `seed`, whose masks follow the global
                generator.
        """
        if self.seed is None:
            raise ValueError("set_epoch needs a collator with a seed; give it seed=...")
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more, got {epoch}")
        self._epoch.fill_(epoch)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """A batch of tensors."""
        return self._collate(examples, "pt") if self.mlm else super().torch_call(examples)

    def numpy_call(self, examples: list[Any]) -> dict[str, Any]:
        """A batch of numpy arrays."""
        return self._collate(examples, "np") if self.mlm else super().numpy_call(examples)

    def _collate(self, examples: list[Any], kind: str) -> dict[str, Any]:
        if not len(examples):
            raise ValueError("examples is empty; a batch needs one row or more")
        rows = [dict(e) if isinstance(e, Mapping) else {"input_ids": e} for e in examples]
        columns = {name: [row.pop(name) for row in rows] for name in _COLUMNS if name in rows[0]}
        batch = pad_without_fast_tokenizer_warning(
            self.tokenizer, rows, return_tensors=kind, pad_to_multiple_of=self.pad_to_multiple_of
        )
        width = batch["input_ids"].shape[1]
        special = self._aligned(columns.get("special_tokens_mask"), width, 1)
        offsets = self._aligned(columns.get("offset_mapping"), width, (0, 0))
        starts = self._given_starts(columns, [len(row["input_ids"]) for row in rows], width)
        mask = self.torch_mask_tokens if kind == "pt" else self.numpy_mask_tokens
        extra = {} if starts is None else {"word_starts": starts}
        batch["input_ids"], batch["labels"] = mask(batch["input_ids"], special, offsets, **extra)
        return batch

    def torch_mask_tokens(
        self,
        inputs: torch.Tensor,
        special_tokens_mask: Any | None = None,
        offset_mapping: Any | None = None,
        *,
        word_starts: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(B, S)` ids to ids with replacements and labels; see `numpy_mask_tokens`."""
        rng = self._rng(lambda: int(torch.randint((1 << 63) - 1, ())))
        ids, labels = self._mask(
            inputs.numpy(), special_tokens_mask, offset_mapping, word_starts, rng
        )
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def numpy_mask_tokens(
        self,
        inputs: np.ndarray,
        special_tokens_mask: Any | None = None,
        offset_mapping: Any | None = None,
        *,
        word_starts: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`(B, S)` ids to ids with replacements and labels, -100 where nothing is predicted.

        Args:
            inputs: padded ids.
            special_tokens_mask: `(B, S)`, nonzero at tokens that may not be masked, besides the
                special ones of the vocabulary.
            offset_mapping: `(B, S, 2)` characters of each token, for whole words.
            word_starts: `(B, S)` bool, where words begin, which decides before all else.

        Raises:
            ValueError: whole words are asked for and nothing tells them.
        """
        rng = self._rng(lambda: int(np.random.randint((1 << 63) - 1)))
        return self._mask(inputs, special_tokens_mask, offset_mapping, word_starts, rng)

    def _mask(self, inputs, special_tokens_mask, offset_mapping, starts, rng):
        vocabulary = self._known_vocabulary()
        rows, width = inputs.shape
        ids = inputs.reshape(-1)
        cu_seqlens = cu_seqlens_of(np.full(rows, width))
        special = vocabulary.special[ids]
        if special_tokens_mask is not None:
            special = special | (np.asarray(special_tokens_mask) != 0).reshape(-1)
        if self.whole_word_mask:
            starts = self._word_starts(ids, cu_seqlens, special, offset_mapping, starts)
        masking = Masking(
            self.mlm_probability,
            self.mask_replace_prob,
            self.random_replace_prob,
            "word" if self.whole_word_mask else "token",
        )
        masked = mask_tokens(
            ids,
            cu_seqlens,
            token_noise(rng, len(ids)),
            vocabulary,
            masking,
            maskable=~special,
            starts=starts if self.whole_word_mask else None,
        )
        shape = inputs.shape
        return masked.input_ids.reshape(shape), masked.dense_labels().reshape(shape)

    def _word_starts(self, ids, cu_seqlens, special, offset_mapping, starts) -> np.ndarray:
        vocabulary = self._known_vocabulary()
        if starts is not None:
            return starts.reshape(-1)
        if vocabulary.continues is not None:
            return word_starts(ids, cu_seqlens, vocabulary)
        if offset_mapping is None:
            raise ValueError(
                "whole words cannot be told: the vocabulary does not mark them; tokenize with "
                "return_offsets_mapping=True, or give word_ids or chinese_ref in each row"
            )
        offsets = np.asarray(offset_mapping)
        begins = np.ones(offsets.shape[:2], bool)
        begins[:, 1:] = offsets[:, 1:, 0] != offsets[:, :-1, 1]
        begins = begins.reshape(-1)
        begins[1:] |= special[:-1]
        return begins

    def _given_starts(self, columns, lengths: list[int], width: int) -> np.ndarray | None:
        """`(B, S)` bool from `word_ids` or `chinese_ref`; None without them or without use."""
        if not self.whole_word_mask:
            return None
        rows = []
        if "word_ids" in columns:
            for words in columns["word_ids"]:
                pairs = pairwise([None, *words])
                rows.append([word is None or word != before for before, word in pairs])
        elif "chinese_ref" in columns:
            # As transformers' own preparation writes it, in a vocabulary that marks words too.
            for continuing, length in zip(columns["chinese_ref"], lengths, strict=True):
                row = np.ones(length, bool)
                row[np.asarray(continuing, np.int64)] = False
                rows.append(row)
        else:
            return None
        return self._aligned(rows, width, True).astype(bool)

    def _aligned(self, rows: list[Any] | None, width: int, fill: Any) -> np.ndarray | None:
        """Rows of numbers, padded on the side on which the tokenizer pads ids."""
        if rows is None:
            return None
        padded = np.empty((len(rows), width, *np.shape(fill)), np.int64)
        padded[:] = fill
        for target, row in zip(padded, rows, strict=True):
            if len(row) and self.tokenizer.padding_side == "left":
                target[-len(row) :] = row
            elif len(row):
                target[: len(row)] = row
        return padded

    def _known_vocabulary(self) -> Vocabulary:
        """The tokenizer's, read again when tokens were added."""
        if self._vocabulary is None or self._vocabulary_size != len(self.tokenizer):
            self._vocabulary = Vocabulary.of(self.tokenizer)
            self._vocabulary_size = len(self.tokenizer)
        return self._vocabulary

    def _rng(self, draw_seed) -> np.random.Generator:
        """The next call's generator: of (seed, epoch, process of the run, worker, call), or without
        a seed of the global one.

        Where no epoch is named, the starts of workers tell epochs apart: a DataLoader starts them
        anew in every epoch, each with the collator as it was in the main process, so they are
        counted in memory that all share.
        """
        if self.seed is None:
            return generator(draw_seed())
        info = torch.utils.data.get_worker_info()
        worker = 0 if info is None else info.id + 1
        if self._process != os.getpid():
            self._process, self._draws = os.getpid(), 0
            self._starts[worker] += 1
            self._start = int(self._starts[worker])
        epoch = int(self._epoch)
        if epoch != _COUNTED and epoch + 1 != self._start:
            self._start, self._draws = epoch + 1, 0
        self._draws += 1
        # torchrun numbers the processes of a run, and workers inherit its environment.
        rank = int(os.environ.get("RANK", "0"))
        return generator(self.seed, self._start, rank << 44 | worker << 32 | self._draws)


@dataclass
class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """`DataCollatorForLanguageModeling` with `whole_word_mask=True`, as in transformers 4."""

    whole_word_mask: bool = True
