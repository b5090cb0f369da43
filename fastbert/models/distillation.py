"""A masked-LM student and its teacher: DistilBERT's three losses in one forward (Sanh et al. 2019,
section 2).

Letters: T packed rows, C hidden, P labelled rows.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch.nn.functional import cosine_similarity
from transformers.utils import ModelOutput

from fastbert.models.bert import BertForMaskedLM
from fastbert.models.losses import mean_loss, rescaled_loss
from fastbert.ops.mlm_distillation import mlm_distillation


@dataclass(frozen=True)
class Teaching:
    """Whom a student learns from, and how.

    Attributes:
        teacher: in evaluation mode, on the student's device; it gets no gradients.
        temperature: of both softmaxes of the soft loss.
        soft_weight, mlm_weight, cosine_weight: factors of the three losses.
    """

    teacher: BertForMaskedLM
    temperature: float = 2.0
    soft_weight: float = 5.0
    mlm_weight: float = 2.0
    cosine_weight: float = 1.0


@dataclass
class DistillationOutput(ModelOutput):
    """The losses of a student, each a scalar.

    Attributes:
        loss: the weighted sum of the others.
        soft_loss: T²·KL(teacher ‖ student) over the vocabulary, mean over labelled rows.
        mlm_loss: cross-entropy with the labels, mean over labelled rows.
        cosine_loss: 1 - cosine of both models' last hidden states, mean over real tokens.
    """

    loss: torch.Tensor | None = None
    soft_loss: torch.Tensor | None = None
    mlm_loss: torch.Tensor | None = None
    cosine_loss: torch.Tensor | None = None


class BertStudent(BertForMaskedLM):
    """A `BertForMaskedLM` whose forward gives the losses against a teacher.

    Its weights have the names of `BertForMaskedLM`; the teacher is no part of them.

    Attributes:
        teaching: set by `student_of`.
    """

    teaching: Teaching

    def forward(
        self, *, labels, attention_mask, label_rows=None, num_items_in_batch=None, **inputs
    ) -> DistillationOutput:
        """Trains on a batch.

        Args:
            labels: `(B, S)` int64, -100 where ignored.
            attention_mask: `(B, S)`, 0 at rows that are no tokens.
            label_rows: as in `BertForMaskedLM`.
            num_items_in_batch: labels of the whole step, of which the batch's losses are a share;
                the cosine's as large as that of its labels. None: those of this batch.
            inputs: of both models; `rng_state` is the student's alone.

        Returns:
            The losses.
        """
        teaching, inputs = self.teaching, {**inputs, "attention_mask": attention_mask}
        outputs = self.run_model(inputs, labels, label_rows)
        inputs.pop("rng_state", None)
        with torch.no_grad():
            expected = teaching.teacher.run_model(inputs, labels, label_rows)
            teacher_rows, _ = self._labelled_rows(expected, labels, label_rows)
            teacher_features = teaching.teacher.transform(teacher_rows)
        rows, counted = self._labelled_rows(outputs, labels, label_rows)
        decoder, teacher_decoder = self.decoder_layer(), teaching.teacher.decoder_layer()
        mlm_losses, soft_losses = mlm_distillation(
            self.transform(rows),
            decoder.weight,
            decoder.bias,
            counted,
            teacher_features,
            teacher_decoder.weight,
            teacher_decoder.bias,
            temperature=teaching.temperature,
        )
        mlm_loss = mean_loss(mlm_losses, counted, num_items_in_batch)
        soft_loss = mean_loss(soft_losses, counted, num_items_in_batch)
        cosine_loss = rescaled_loss(
            _cosine_loss(outputs.last_hidden_state, expected.last_hidden_state, attention_mask),
            counted,
            num_items_in_batch,
        )
        loss = teaching.soft_weight * soft_loss + teaching.mlm_weight * mlm_loss
        loss = loss + teaching.cosine_weight * cosine_loss
        return DistillationOutput(loss, soft_loss, mlm_loss, cosine_loss)


def _cosine_loss(states, teacher_states, attention_mask) -> torch.Tensor:
    """1 - cosine of `(B, S, C)` states, mean over real tokens."""
    real = attention_mask != 0
    apart = 1 - cosine_similarity(states.float(), teacher_states.float(), dim=-1)
    return torch.where(real, apart, 0).sum() / real.sum()


def student_of(
    teaching: Teaching,
    layers: Sequence[int],
    *,
    hidden_dropout_prob: float,
    attention_probs_dropout_prob: float,
) -> BertStudent:
    """A student that begins with its teacher's embeddings, head and some of its layers.

    Args:
        teaching: the teacher, of whose width and vocabulary the student is.
        layers: the teacher's layers, in the student's order.
        hidden_dropout_prob, attention_probs_dropout_prob: of the student.

    Returns:
        In training mode, on the CPU.
    """
    teacher = teaching.teacher
    config: transformers.BertConfig = copy.deepcopy(teacher.config)
    config.num_hidden_layers = len(layers)
    config.hidden_dropout_prob = hidden_dropout_prob
    config.attention_probs_dropout_prob = attention_probs_dropout_prob
    student = BertStudent(config)
    student.bert.embeddings.load_state_dict(teacher.bert.embeddings.state_dict())
    student.cls.load_state_dict(teacher.cls.state_dict())
    for layer, number in zip(student.bert.encoder.layer, layers, strict=True):
        layer.load_state_dict(teacher.bert.encoder.layer[number].state_dict())
    student.teaching = teaching
    return student.train()


def spaced_layers(num_layers: int, of: int) -> list[int]:
    """`num_layers` of `of` layers, evenly from the first to the last.

    6 of 12 are 0, 2, 4, 7, 9, 11, which DistilBERT's published training takes for its "one layer
    out of two" (Sanh et al. 2019, section 2).
    """
    if num_layers == 1:
        return [0]
    return [round(i * (of - 1) / (num_layers - 1)) for i in range(num_layers)]
