"""Distillation: a pretraining whose loss has two more terms (Sanh et al. 2019).

The student begins with some of its teacher's layers and learns on the same stream of masked batches
from three losses (fastbert/models/distillation.py). All else, the folder of the run among it, is
pretraining's (fastbert/train/pretraining.py).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoTokenizer

import fastbert
from fastbert.models.distillation import BertStudent, Teaching, spaced_layers, student_of
from fastbert.train import building
from fastbert.train.config import ConfigError, DistillConfig, StudentConfig
from fastbert.train.distilbert import why_not_distilbert
from fastbert.train.pretraining import Pretraining, Summary
from fastbert.train.processes import joined


def distill(config: DistillConfig) -> Summary:
    """Runs, or goes on with, a distillation; as `fastbert.train.pretraining.pretrain`.

    Raises:
        ConfigError: also a teacher that is no BERT, or does not fit the corpus or the student.
    """
    with joined(building.device_of(config)) as processes:
        return Distillation(config, processes).run()


class Distillation(Pretraining):
    """A distillation in this process, maybe one of several."""

    config: DistillConfig

    def build_model(self) -> BertStudent:
        settings, student = self.config.distillation, self.config.model
        teacher = read_teacher(settings.teacher, self.tokenizer)
        max_length = max(phase.max_length for phase in self.config.phases)
        building.check_sizes("distillation.teacher", teacher.config, self.tokenizer, max_length)
        if student.family == "distilbert":
            reason = why_not_distilbert(teacher.config)
            if reason is not None:
                raise ConfigError(f"model.family distilbert: {reason}; use family bert")
        layers = chosen_layers(student, teacher.config.num_hidden_layers)
        teaching = Teaching(
            teacher.to(self.device),
            settings.temperature,
            settings.soft_weight,
            settings.mlm_weight,
            settings.cosine_weight,
        )
        return student_of(
            teaching,
            layers,
            hidden_dropout_prob=student.hidden_dropout_prob,
            attention_probs_dropout_prob=student.attention_probs_dropout_prob,
        )

    @staticmethod
    def step_loss(model: torch.nn.Module, batch: Mapping, rng_state, num_labels) -> Mapping:
        """The student's losses: their sum, and what it is made of."""
        return model(**batch, rng_state=rng_state, num_items_in_batch=num_labels)


def read_teacher(folder: str, tokenizer) -> fastbert.BertForMaskedLM:
    """The frozen teacher of a transformers folder.

    Args:
        folder: of a `BertForMaskedLM`; a tokenizer that is there must be the corpus' one.
        tokenizer: of the corpus.

    Raises:
        ConfigError: no such model, one without a trained head, another tokenizer.
    """
    try:
        model, info = fastbert.BertForMaskedLM.from_pretrained(folder, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"distillation.teacher: cannot read {folder}: {error}") from error
    if model.config.model_type != "bert" or info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3]) or "its own names"
        raise ConfigError(
            f"distillation.teacher {folder} is no BertForMaskedLM with all its weights "
            f"(model_type {model.config.model_type}, missing {missing}); give one that was trained "
            "with a masked-LM head"
        )
    if not model.is_plain_head():
        raise ConfigError(
            f"distillation.teacher {folder} has hidden_act {model.config.hidden_act}; the fused "
            "losses know gelu and its tanh forms"
        )
    if any((Path(folder) / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        own = AutoTokenizer.from_pretrained(folder)
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"distillation.teacher {folder} has another tokenizer than the corpus; prepare the "
                "corpus with the teacher's (fastbert data prepare -t)"
            )
    return model.float().eval().requires_grad_(False)


def chosen_layers(student: StudentConfig, num_teacher_layers: int) -> list[int]:
    """The teacher's layers that a student begins with.

    Raises:
        ConfigError: layers the teacher does not have, or more than it has.
    """
    if student.layers is not None:
        wrong = [n for n in student.layers if not 0 <= n < num_teacher_layers]
        if wrong:
            raise ConfigError(
                f"model.layers {list(student.layers)}: the teacher has layers 0 to "
                f"{num_teacher_layers - 1}, not {wrong[0]}"
            )
        return list(student.layers)
    num_layers = student.num_hidden_layers or max(1, num_teacher_layers // 2)
    if num_layers > num_teacher_layers:
        raise ConfigError(
            f"model.num_hidden_layers {num_layers}: the teacher has {num_teacher_layers} layers; "
            "take fewer, or name them, some twice, in model.layers"
        )
    return spaced_layers(num_layers, num_teacher_layers)
