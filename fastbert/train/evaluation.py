"""Held-out loss, accuracy and perplexity of masked tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fastbert.padding import IGNORE_INDEX
from fastbert.train.batches import TrainingBatch
from fastbert.train.parallel import whole_weights
from fastbert.train.processes import Processes


@dataclass(frozen=True)
class Evaluation:
    """Over all predicted tokens: mean cross-entropy, share guessed right, exp(loss)."""

    loss: float
    accuracy: float
    perplexity: float
    num_labels: int


# Not inference_mode: its tensors cannot be used by the training step that follows.
@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[TrainingBatch],
    dtype: torch.dtype | None = None,
    processes: Processes | None = None,
) -> Evaluation:
    """Evaluates a masked-LM head without dropout; leaves it in training mode if it was in it.

    Args:
        model: `BertForMaskedLM` or `BertForPreTraining`.
        batches: of this process; at least one label in all.
        dtype: of autocast; None: none.
        processes: over which the figures are taken; None: this one.

    Raises:
        ValueError: no label.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
    try:
        with autocast, whole_weights(model):
            for batch in batches:
                inputs = {
                    k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v
                    for k, v in batch.inputs.items()
                }
                sums += _sums(model, inputs)
    finally:
        model.train(was_training)
    if processes is not None:
        processes.add(sums)
    total, correct, count = sums.tolist()
    if not count:
        raise ValueError("batches hold no label; give a larger held-out corpus")
    loss = total / count
    return Evaluation(loss, correct / count, math.exp(min(loss, 700.0)), int(count))


def _sums(model: nn.Module, inputs: dict) -> torch.Tensor:
    """`(3,)` fp64: cross-entropy, tokens guessed right, labels. Only labelled rows are scored."""
    labels = inputs.pop("labels")
    rows = inputs.pop("label_rows")
    inputs.pop("next_sentence_label", None)
    hidden = model.bert(**inputs).last_hidden_state
    labels = labels[0, rows]
    scores = model.cls.predictions(hidden[0, rows]).float()
    loss = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    correct = (scores.argmax(-1) == labels).sum()
    return torch.stack([loss.double(), correct.double(), (labels != IGNORE_INDEX).sum().double()])
