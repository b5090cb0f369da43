"""How a model is fine-tuned: transformers' Trainer, with defaults that are known to hold up.

Sources: bias-corrected AdamW, a tenth of the steps as warm-up and a linear fall: Mosbach et al.
2021, "On the stability of fine-tuning BERT", section 6; rates by layer as in
`fastbert.optim.layer_decay`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

from fastbert.optim import layer_decay_groups
from fastbert.tasks.tables import TaskError


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """
    Attributes:
        epochs: passes over the training rows.
        batch_size: features of a batch.
        learning_rate: of the head.
        layer_decay: factor on it from layer to layer down.
        warmup: share of the steps.
        weight_decay: of matrices.
        patience: epochs without a better metric before stopping; None: never.
        seed: of the head, the order, dropout and held-out rows; equal ones give equal runs.
        bf16: autocast to it.
        accumulation: batches of a step.
        accelerated: False trains transformers' own model.
        progress: show a bar.
    """

    epochs: float = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    layer_decay: float = 0.95
    warmup: float = 0.1
    weight_decay: float = 0.01
    patience: int | None = 2
    seed: int = 42
    bf16: bool = False
    accumulation: int = 1
    accelerated: bool = True
    progress: bool = False

    def __post_init__(self):
        for name, low in (("epochs", 0), ("learning_rate", 0), ("batch_size", 0)):
            if not getattr(self, name) > low:
                raise TaskError(f"{name} must be above {low}, got {getattr(self, name)}")
        if not 0 <= self.warmup < 1:
            raise TaskError(f"warmup must lie in [0, 1), got {self.warmup}")
        if self.patience is not None and self.patience < 1:
            raise TaskError(f"patience must be at least 1, got {self.patience}")
        if self.accumulation < 1:
            raise TaskError(f"accumulation must be at least 1, got {self.accumulation}")


def trainer_arguments(
    kind: type, folder: Path, training: TrainingSettings, *, num_features: int, best: str, **more
):
    """Arguments of a Trainer that evaluates and saves every epoch and keeps the best one.

    Args:
        kind: TrainingArguments, or a class derived from it.
        folder: for checkpoints.
        training: the recipe.
        num_features: of an epoch. best: the metric.
        more: further arguments.
    """
    steps = math.ceil(num_features / (training.batch_size * training.accumulation))
    return kind(
        output_dir=str(folder),
        num_train_epochs=training.epochs,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        warmup_steps=int(training.warmup * steps * training.epochs),
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model=best,
        greater_is_better=True,
        restore_callback_states_from_checkpoint=True,
        seed=training.seed,
        bf16=training.bf16,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=not training.progress,
        **more,
    )


def optimizer_of(model: nn.Module, training: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW with rates by layer for the transformers model that `model` is or holds; parameters
    beside it have the head's."""
    encoder = next(m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
    groups = layer_decay_groups(
        encoder,
        lr=training.learning_rate,
        layer_decay=training.layer_decay,
        weight_decay=training.weight_decay,
    )
    known = {id(p) for p in encoder.parameters()}
    others = [p for p in model.parameters() if id(p) not in known and p.requires_grad]
    if others:
        groups.append({"params": others, "weight_decay": training.weight_decay})
    # As Trainer does by default: one pass over the weights, where the plain loop makes ten.
    return torch.optim.AdamW(groups, lr=training.learning_rate, eps=1e-6, fused=True)


def callbacks_of(training: TrainingSettings) -> list[transformers.TrainerCallback]:
    """Early stopping, where the recipe has it."""
    if training.patience is None:
        return []
    return [transformers.EarlyStoppingCallback(early_stopping_patience=training.patience)]
