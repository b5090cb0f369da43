"""Fine-tuning a model on a task: transformers' Trainer, with defaults that are known to hold up.

Sources: bias-corrected AdamW, a tenth of the steps as warm-up and a linear fall: Mosbach
et al. 2021, "On the stability of fine-tuning BERT", section 6; falling rates by layer:
`fastbert.optim.layer_decay`.
"""

import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers

from fastbert.optim import layer_decay_groups
from fastbert.tasks.card import write_card
from fastbert.tasks.models import load_model, load_tokenizer
from fastbert.tasks.registry import task_class, write_task
from fastbert.tasks.tables import TaskError, read_rows
from fastbert.tasks.task import Encoded, Task, TaskSettings, longest

logger = logging.getLogger("fastbert")

METRICS = "metrics.json"
CHECKPOINTS = "checkpoints"
HELD_OUT = 0.1


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


@dataclass(frozen=True)
class Finetuned:
    """
    Attributes:
        output: folder of the model.
        metrics: of the best checkpoint, on the evaluation rows.
        history: one mapping an epoch: training loss and metrics.
        seconds: of training, evaluations included. samples_per_second: as Trainer counts them.
    """

    output: Path
    metrics: dict[str, float]
    history: list[dict]
    seconds: float
    samples_per_second: float


def finetune(
    task: str,
    model: str,
    train: str | Path | Sequence[dict],
    evaluation: str | Path | Sequence[dict] | None = None,
    *,
    output: str | Path,
    settings: TaskSettings | None = None,
    training: TrainingSettings | None = None,
    split: str | None = None,
    evaluation_split: str | None = None,
) -> Finetuned:
    """Fine-tunes a checkpoint and writes the best epoch's model, its task and a card.

    Args:
        task: one of `fastbert.tasks.TASKS`.
        model: a checkpoint as `from_pretrained` takes it.
        train, evaluation: rows, or where `read_rows` finds them. Without evaluation a tenth of the
            training rows is held out by the seed, and the log says so.
        output: folder to write; what `finetune` wrote there before is replaced.
        settings: the task's columns and lengths. training: the recipe.
        split, evaluation_split: where train and evaluation are names of datasets.

    Raises:
        TaskError: rows, columns, labels or settings that do not fit, before anything is trained.
        OSError: no such checkpoint.
    """
    kind = task_class(task)
    settings = kind.settings_class() if settings is None else settings
    if not isinstance(settings, kind.settings_class):
        raise TaskError(
            f"settings of {task} must be {kind.settings_class.__name__}, got "
            f"{type(settings).__name__}"
        )
    training = TrainingSettings() if training is None else training
    output = _output_folder(output)
    rows, held_out = _rows(train, evaluation, split, evaluation_split, training.seed)

    kind(settings).check(rows, "train", labelled=True)
    worker = kind(settings, kind(settings).labels_of(rows))
    worker.check(held_out, "evaluation", labelled=True)

    tokenizer = load_tokenizer(model)
    transformers.set_seed(training.seed)
    network = load_model(worker, model, new_head=True, accelerated=training.accelerated)
    limit = longest(settings, tokenizer, network.config)
    worker.settings = replace(settings, max_length=limit)

    trainer = _trainer(worker, network, tokenizer, rows, held_out, output, training)
    trained = trainer.train()
    metrics = _plain(trainer.evaluate())
    trainer.save_model(str(output))
    write_task(worker, output)
    result = Finetuned(
        output,
        metrics,
        _history(trainer.state.log_history),
        trained.metrics["train_runtime"],
        trained.metrics["train_samples_per_second"],
    )
    record = {"metrics": metrics, "history": result.history}
    (output / METRICS).write_text(json.dumps(record, indent=2) + "\n")
    write_card(worker, result, training, model, len(rows), len(held_out))
    shutil.rmtree(trainer.args.output_dir)
    return result


def _output_folder(output: str | Path) -> Path:
    output = Path(output)
    found = {path.name for path in output.iterdir()} if output.exists() else set()
    # Checkpoints alone are those of a run that was stopped.
    if METRICS not in found and found - {CHECKPOINTS}:
        raise TaskError(f"{output} holds something else than a fine-tuned model; name a new folder")
    output.mkdir(parents=True, exist_ok=True)
    return output


def _rows(train, evaluation, split, evaluation_split, seed) -> tuple[list[dict], list[dict]]:
    rows = _read(train, split)
    if evaluation is not None:
        return rows, _read(evaluation, evaluation_split)
    order = np.random.default_rng(seed).permutation(len(rows))
    count = max(1, round(HELD_OUT * len(rows)))
    if count >= len(rows):
        raise TaskError(f"{len(rows)} rows are too few to hold some out; name evaluation rows")
    logger.info("no evaluation rows were named: %d of %d rows are held out", count, len(rows))
    return [rows[i] for i in sorted(order[count:])], [rows[i] for i in sorted(order[:count])]


def _read(source, split) -> list[dict]:
    rows = read_rows(source, split=split) if isinstance(source, (str, Path)) else list(source)
    if not rows:
        raise TaskError("there are no rows")
    return rows


def _trainer(worker: Task, network, tokenizer, rows, held_out, output: Path, training):
    encoded = worker.encode(rows, tokenizer, labelled=True)
    judged = worker.encode(held_out, tokenizer, labelled=True).by_length()
    steps = math.ceil(
        math.ceil(len(encoded.features) / (training.batch_size * training.accumulation))
        * training.epochs
    )
    groups = layer_decay_groups(
        network,
        lr=training.learning_rate,
        layer_decay=training.layer_decay,
        weight_decay=training.weight_decay,
    )
    callbacks = []
    if training.patience is not None:
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=training.patience)
        callbacks.append(stopping)
    return transformers.Trainer(
        model=network,
        args=transformers.TrainingArguments(
            output_dir=str(output / CHECKPOINTS),
            num_train_epochs=training.epochs,
            per_device_train_batch_size=training.batch_size,
            per_device_eval_batch_size=training.batch_size,
            gradient_accumulation_steps=training.accumulation,
            warmup_steps=int(training.warmup * steps),
            lr_scheduler_type="linear",
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model=worker.best,
            greater_is_better=worker.greater_is_better,
            seed=training.seed,
            bf16=training.bf16,
            use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False,
            label_names=list(worker.label_names),
            report_to=[],
            disable_tqdm=not training.progress,
        ),
        train_dataset=encoded.features,
        eval_dataset=judged.features,
        processing_class=tokenizer,
        data_collator=worker.collator(tokenizer),
        compute_metrics=lambda p: _measured(worker, held_out, judged, p.predictions),
        optimizers=(torch.optim.AdamW(groups, lr=training.learning_rate, eps=1e-6), None),
        callbacks=callbacks,
    )


def _measured(worker: Task, rows, encoded: Encoded, logits) -> dict[str, float]:
    return worker.metrics(rows, worker.answers(rows, encoded, logits))


def _plain(metrics: dict) -> dict[str, float]:
    """Metrics without Trainer's prefix and clocks."""
    clocks = ("runtime", "samples_per_second", "steps_per_second", "epoch", "step")
    named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if name not in clocks}


def _history(log: list[dict]) -> list[dict]:
    """What each epoch gave, of Trainer's log; its last entries repeat the best epoch."""
    epochs: dict[float, dict] = {}
    for entry in log:
        if "loss" in entry:
            epochs[entry["epoch"]] = {"epoch": entry["epoch"], "train_loss": entry["loss"]}
        elif "eval_loss" in entry and len(epochs.get(entry["epoch"], ())) == 2:
            epochs[entry["epoch"]] |= _plain(entry)
    return list(epochs.values())
