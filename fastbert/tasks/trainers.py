"""What transformers' Trainer needs to carry out a recipe."""

import math
from pathlib import Path

import torch
import transformers
from torch import nn

from fastbert.optim import layer_decay_groups
from fastbert.tasks.recipe import TrainingSettings


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
