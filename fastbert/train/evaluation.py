"""Held-out figures: of masked tokens, and of replaced ones."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fastbert.models.replaced_tokens import ReplacedTokensModel
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

    def told(self) -> str:
        """For people."""
        return (
            f"loss {self.loss:.4f}, accuracy {self.accuracy:.2%}, perplexity {self.perplexity:.2f}"
        )


@dataclass(frozen=True)
class DetectionEvaluation:
    """Of replaced tokens; the samples are drawn alike in every evaluation.

    Attributes:
        loss: as in training. mlm_loss: of the generator. detection_loss: of the discriminator.
        accuracy: share of tokens judged right. recall: share of the replaced that were found.
        num_labels: masked tokens.
    """

    loss: float
    mlm_loss: float
    detection_loss: float
    accuracy: float
    recall: float
    num_labels: int

    def told(self) -> str:
        """For people."""
        return (
            f"loss {self.loss:.4f}, generator {self.mlm_loss:.4f}, discriminator "
            f"{self.detection_loss:.4f}, accuracy {self.accuracy:.2%}, found {self.recall:.2%}"
        )


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
    total, correct, count = _add_up(model, batches, _masked_sums, 3, dtype, processes)
    loss = total / count
    return Evaluation(loss, correct / count, math.exp(min(loss, 700.0)), int(count))


def evaluate_detection(
    model: ReplacedTokensModel,
    batches: Iterable[TrainingBatch],
    dtype: torch.dtype | None = None,
    processes: Processes | None = None,
) -> DetectionEvaluation:
    """Evaluates a generator and a discriminator; arguments and errors as `evaluate`."""
    sums = _add_up(model, batches, _detection_sums, 7, dtype, processes)
    mlm, detection, right, tokens, found, replaced, labels = sums
    mlm_loss, detection_loss = mlm / labels, detection / tokens
    return DetectionEvaluation(
        mlm_loss + model.detection_weight * detection_loss,
        mlm_loss,
        detection_loss,
        right / tokens,
        found / max(replaced, 1),
        int(labels),
    )


# Not inference_mode: its tensors cannot be used by the training step that follows.
@torch.no_grad()
def _add_up(
    model: nn.Module,
    batches: Iterable[TrainingBatch],
    sums_of: Callable[[nn.Module, dict, int], list[torch.Tensor]],
    num_sums: int,
    dtype: torch.dtype | None,
    processes: Processes | None,
) -> list[float]:
    """Sums over batches and processes, without dropout.

    Args:
        model, batches, dtype, processes: of `evaluate`.
        sums_of: of the model, a batch's inputs and its number, from 0; the last one counts labels.
        num_sums: how many they are.

    Raises:
        ValueError: no label.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums = torch.zeros(num_sums, dtype=torch.float64, device=device)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
    try:
        with autocast, whole_weights(model):
            for number, batch in enumerate(batches):
                inputs = {
                    k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v
                    for k, v in batch.inputs.items()
                }
                sums += torch.stack([s.double() for s in sums_of(model, inputs, number)])
    finally:
        model.train(was_training)
    if processes is not None:
        processes.add(sums)
    totals = sums.tolist()
    if not totals[-1]:
        raise ValueError("batches hold no label; give a larger held-out corpus")
    return totals


def _masked_sums(model: nn.Module, inputs: dict, number: int) -> list[torch.Tensor]:
    """Cross-entropy, tokens guessed right, labels. Only labelled rows are scored."""
    labels = inputs.pop("labels")
    rows = inputs.pop("label_rows")
    inputs.pop("next_sentence_label", None)
    hidden = model.bert(**inputs).last_hidden_state
    labels = labels[0, rows]
    scores = model.cls.predictions(hidden[0, rows]).float()
    loss = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    correct = (scores.argmax(-1) == labels).sum()
    return [loss, correct, (labels != IGNORE_INDEX).sum()]


def _detection_sums(model: ReplacedTokensModel, inputs: dict, number: int) -> list[torch.Tensor]:
    """Losses, tokens judged right, tokens, replaced ones found, replaced ones, labels."""
    real = inputs["attention_mask"] == 1
    labels = (inputs["labels"] != IGNORE_INDEX).sum()
    outputs = model(**inputs, rng_state=inputs["input_ids"].new_tensor([0, number]))
    judged, replaced = outputs.logits > 0, outputs.replaced
    return [
        outputs.mlm_loss * labels,
        outputs.detection_loss * real.sum(),
        ((judged == replaced) & real).sum(),
        real.sum(),
        (judged & replaced).sum(),
        replaced.sum(),
        labels,
    ]
