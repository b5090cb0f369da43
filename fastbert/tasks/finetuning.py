"""Fine-tuning a model on a task of transformers' Trainer."""

from collections.abc import Sequence
from pathlib import Path

import transformers

from fastbert.folders import check_checkpoint
from fastbert.tasks.card import write_card
from fastbert.tasks.models import load_model, load_tokenizer
from fastbert.tasks.plots import draw
from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.registry import task_class, write_description
from fastbert.tasks.resuming import Checkpoints
from fastbert.tasks.runs import (
    Finetuned,
    RunRows,
    epochs_of,
    output_folder,
    plain,
    rows_of_run,
    write_metrics,
)
from fastbert.tasks.tables import TaskError
from fastbert.tasks.task import Task, TaskSettings, fitted
from fastbert.tasks.trainers import callbacks_of, optimizer_of, trainer_arguments


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
    overwrite: bool = False,
) -> Finetuned:
    """Fine-tunes a checkpoint and writes the best epoch's model, its task and a card.

    A run that was killed goes on from its last epoch when it is called again; of one that was
    finished the metrics are given again.

    Args:
        task: one of `fastbert.tasks.TASKS`.
        model: a checkpoint as `from_pretrained` takes it.
        train, evaluation: rows, or where `read_rows` finds them; of a GLUE task also its folder or
            dataset, which brings both. Without evaluation a tenth of the training rows is held out
            by the seed, and the log says so.
        output: folder to write.
        settings: the task's columns and lengths. training: the recipe.
        split, evaluation_split: where train and evaluation are names of datasets.
        overwrite: replace another run that output holds, and train a finished one anew.

    Raises:
        TaskError: rows, columns, labels or settings that do not fit, or output holds another run;
            before anything is trained.
        OSError: no such checkpoint.
    """
    check_checkpoint("model", model)
    kind = task_class(task)
    task = kind.name
    settings = kind.settings_class() if settings is None else settings
    if not isinstance(settings, kind.settings_class):
        raise TaskError(
            f"settings of {task} must be {kind.settings_class.__name__}, got "
            f"{type(settings).__name__}"
        )
    training = TrainingSettings() if training is None else training
    output = output_folder(output, overwrite=overwrite)
    worker = kind(settings)
    beside = worker.evaluation_beside(train if evaluation is None else evaluation)
    if evaluation_split is None and beside is not None:
        evaluation, evaluation_split = beside
    found = rows_of_run(train, evaluation, split, evaluation_split, training.seed, worker.read)
    rows, held_out = found.train, found.held_out
    worker = _checked(kind, settings, found)
    checkpoints = Checkpoints(
        output, model, worker.description(), training, rows, held_out, overwrite=overwrite
    )
    done = checkpoints.done_before()
    if done is not None:
        return done

    tokenizer = load_tokenizer(worker, model)
    transformers.set_seed(training.seed)
    network = load_model(worker, model, new_head=True, accelerated=training.accelerated)
    worker.settings = fitted(settings, tokenizer, network.config)

    # By the sources, so that a row that is refused has the number it has in its file.
    encoded = [worker.encode(some, tokenizer, labelled=True, name=n) for n, some in found.sources]
    features = encoded[0].of_rows(found.kept).features
    judged = encoded[-1].of_rows(found.judged).by_length()
    trainer = _trainer(
        worker,
        network,
        tokenizer,
        features,
        judged.features,
        lambda p: worker.metrics(held_out, worker.answers(held_out, judged, p.predictions)),
        checkpoints.folder,
        training,
    )
    trained = checkpoints.train(trainer)
    predicted = trainer.predict(judged.features, metric_key_prefix="eval")
    metrics = plain(predicted.metrics)
    trainer.save_model(str(output))
    write_description(worker.description(), output)
    result = Finetuned(
        output,
        metrics,
        epochs_of(trainer.state.log_history),
        trained["train_runtime"],
        trained["train_samples_per_second"],
    )
    write_metrics(result)
    answers = worker.answers(held_out, judged, predicted.predictions)
    pictures = draw(worker, held_out, answers, result)
    write_card(worker, result, training, model, len(rows), len(held_out), pictures)
    checkpoints.finish()
    return result


def _checked(kind: type[Task], settings: TaskSettings, found: RunRows) -> Task:
    """The task with the labels of the training rows, which the rows to judge by have to know."""
    worker = kind(settings)
    name, rows = found.sources[0]
    worker.check(rows, name, labelled=True)
    worker.check_varied(found.train)
    worker = kind(settings, worker.labels_of(found.train))
    # Held-out rows are told by the number they have in their file.
    name, rows = found.sources[-1]
    held_out = "" if len(found.sources) == 2 else ", held out to judge by"
    worker.check(rows, f"{name}{held_out}", labelled=True)
    return worker


def _trainer(
    worker: Task, network, tokenizer, features, judged, metrics, folder: Path, training
) -> transformers.Trainer:
    return transformers.Trainer(
        model=network,
        args=trainer_arguments(
            transformers.TrainingArguments,
            folder,
            training,
            num_features=len(features),
            best=worker.best,
            remove_unused_columns=False,
            label_names=list(worker.label_names),
        ),
        train_dataset=features,
        eval_dataset=judged,
        processing_class=tokenizer,
        data_collator=worker.collator(tokenizer),
        compute_metrics=metrics,
        optimizers=(optimizer_of(network, training), None),
        callbacks=callbacks_of(training),
    )
