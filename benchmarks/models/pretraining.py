"""Pretraining steps to compare, data included: ours, and what one writes with transformers."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn

from fastbert.data import Corpus, pack_sentences, pad_rows, prepare, train_tokenizer
from fastbert.data.documents import SpecialTokens
from fastbert.padding import IGNORE_INDEX
from fastbert.train import GraphedStep
from fastbert.train.batches import BatchStream
from fastbert.train.building import build_optimizer
from fastbert.train.config import DataConfig, OptimizerConfig, Phase

from ..shapes import SEED

LENGTH = 128
OPTIMIZER = OptimizerConfig(lr=1e-3)


# --- data


def full_and_ragged(paragraphs: list[str], folder: Path, vocab_size: int) -> tuple[dict, object]:
    """Two corpora of one text, and their tokenizer.

    Returns:
        `full`, the text as one endless sentence, which is cut into sequences of the full length;
        `ragged`, a sequence for each paragraph, longer ones cut.
    """
    lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
    tokenizer = train_tokenizer(lines, vocab_size=vocab_size)
    corpora = {}
    for name, separator in (("full", " "), ("ragged", "\n\n")):
        file = folder / f"{name}.txt"
        file.write_text(separator.join(lines), "utf-8")
        corpora[name] = prepare([file], tokenizer, folder / name, workers=1, progress=False)
    return corpora, tokenizer


def tokens_of(corpus: Corpus, tokenizer, num_sequences: int) -> int:
    """Tokens of so many of its sequences, on average; enough for one of the full length."""
    special = SpecialTokens.of(tokenizer)
    sequences = pack_sentences(corpus.shard(0), special, LENGTH, cross_documents=False)
    return max(round(sequences.lengths.mean() * num_sequences), LENGTH)


def stream(corpus: Corpus, tokenizer, tokens: int, num_steps: int = 1000, **options) -> Iterator:
    """Our batches of about so many tokens, the same in every call.

    Args:
        options: `cross_documents` of the data, `last_layer_subset` of the batches.
    """
    data = DataConfig(cross_documents=options.pop("cross_documents", True))
    phase = Phase(num_steps, LENGTH, tokens, tokens)
    return iter(
        BatchStream(corpus, tokenizer, data, phase, num_steps=num_steps, seed=SEED, **options)
    )


def features_of(inputs: dict) -> list[dict]:
    """The sequences of a packed batch before they were masked, for a collator of transformers."""
    ids, labels = inputs["input_ids"][0].numpy(), inputs["labels"][0].numpy()
    original = np.where(labels == IGNORE_INDEX, ids, labels)
    bounds = np.unique(inputs["cu_seq_lens_q"].numpy())
    return [{"input_ids": original[start:end].tolist()} for start, end in pairwise(bounds)]


def padded(inputs: dict, pad_id: int) -> dict[str, torch.Tensor]:
    """A packed batch, masked as it is, as transformers' collator would lay it out."""
    cu_seqlens = np.unique(inputs["cu_seq_lens_q"].numpy())
    fills = {"input_ids": pad_id, "attention_mask": 0, "labels": IGNORE_INDEX}
    return {
        name: pad_rows(inputs[name][0, : cu_seqlens[-1]].numpy(), cu_seqlens, fill)
        for name, fill in fills.items()
    }


def collator(tokenizer) -> transformers.DataCollatorForLanguageModeling:
    """transformers' own."""
    return transformers.DataCollatorForLanguageModeling(tokenizer)


# --- steps


def plain_step(model: nn.Module, optimizer, dtype: torch.dtype | None) -> Callable:
    """A training step as one writes it with transformers: autocast, clipping, torch's optimizer."""

    def step(batch: dict[str, torch.Tensor]) -> float:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def graphed_step(
    model: nn.Module, optimizer, dtype: torch.dtype | None, seed: int = SEED
) -> Callable:
    """The step of `fastbert pretrain`."""
    step = GraphedStep(model, optimizer, dtype=dtype, rng_state=torch.tensor([seed, 0]), lag=0)
    return lambda inputs: step(inputs).loss


def step_of(
    kind: str,
    model: nn.Module,
    dtype: torch.dtype | None,
    settings: OptimizerConfig = OPTIMIZER,
    seed: int = SEED,
) -> tuple[Callable, object]:
    """A step of the kind `transformers` or `fastbert` and its optimizer, torch's fused AdamW.

    Args:
        seed: of fastbert's dropout; transformers' comes from torch's default generator.
    """
    optimizer = build_optimizer(settings, model.train())
    if kind == "fastbert":
        return graphed_step(model, optimizer, dtype, seed), optimizer
    return plain_step(model, optimizer, dtype), optimizer
