"""What bi-encoders and cross-encoders share: rows of two texts, their lengths, the run."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastbert.tasks.card import picture_lines
from fastbert.tasks.correlations import number_in
from fastbert.tasks.plots import draw_history
from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.registry import write_description
from fastbert.tasks.resuming import Checkpoints
from fastbert.tasks.runs import (
    Finetuned,
    RunRows,
    epochs_of,
    output_folder,
    rows_of_run,
    write_metrics,
)
from fastbert.tasks.tables import TaskError, check_columns, check_texts, check_varied

logger = logging.getLogger("fastbert")

OVERLONG = ("truncate", "refuse")


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """
    Attributes:
        first: column of the query or the first text.
        second: column of the passage or the second text.
        score: column of a number.
        max_length: tokens of a text, or of a pair.
        overlong: of longer ones `truncate` keeps the head, and the log says of how many; `refuse`
            raises.
    """

    first: str = "query"
    second: str = "positive"
    score: str | None = None
    max_length: int = 128
    overlong: str = "truncate"

    def __post_init__(self):
        if self.overlong not in OVERLONG:
            raise TaskError(f"overlong must be one of {OVERLONG}, got {self.overlong!r}")
        if self.max_length < 8:
            raise TaskError(f"max_length must be at least 8, got {self.max_length}")


def checked_run(
    task: str,
    model: str,
    sources: tuple,
    splits: tuple,
    output: str | Path,
    settings: PairSettings,
    training: TrainingSettings,
    *,
    overwrite: bool,
    **checks,
) -> tuple[Checkpoints, RunRows]:
    """The checkpoints of a run and its rows.

    Args:
        task: the encoder's name. model: what it starts from.
        sources, splits: of training and evaluation.
        output, settings, training, overwrite: of the run.
        checks: arguments of `check`.

    Raises:
        TaskError: what does not fit, with its row; output holds another run.
    """
    folder = output_folder(output, overwrite=overwrite)
    found = rows_of_run(*sources, *splits, training.seed)
    for name, some in found.sources:
        check(some, settings, name, **checks)
    if settings.score is not None:
        check_varied((float(row[settings.score]) for row in found.train), "score", "score")
    description = {"task": task, "settings": asdict(settings)}
    rows = (found.train, found.held_out)
    checkpoints = Checkpoints(folder, model, description, training, *rows, overwrite=overwrite)
    return checkpoints, found


def check(
    rows: Sequence[dict],
    settings: PairSettings,
    name: str,
    *,
    bounds: tuple[float, float],
    negative: str | None = None,
) -> None:
    """
    Args:
        rows, settings: rows and their columns. name: of the rows, for messages.
        bounds: what a score lies in.
        negative: column of a third text.

    Raises:
        TaskError: what does not fit, with its row.
    """
    columns = {"first": settings.first, "second": settings.second, "score": settings.score}
    check_columns(rows, {**columns, "negative": negative}, name)
    check_texts(rows, [settings.first, settings.second, negative], name)
    if settings.score is None:
        return
    for number, row in enumerate(rows, 1):
        number_in(row[settings.score], f"{name}, row {number}: {settings.score!r}", bounds)


def check_lengths(tokenizer, texts: Sequence, settings: PairSettings, name: str) -> None:
    """Says how many texts, or pairs of them, are cut, or refuses them.

    Raises:
        TaskError: one is overlong and the settings refuse it.
    """
    # sentence-transformers has told the tokenizer to cut.
    encoded = tokenizer(list(texts), truncation=False, verbose=False)
    lengths = np.array([len(ids) for ids in encoded["input_ids"]])
    overlong = np.flatnonzero(lengths > settings.max_length)
    if not len(overlong):
        return
    found = (
        f"{name}: {len(overlong)} of {len(lengths)} texts have more than {settings.max_length} "
        f"tokens (up to {lengths.max()})"
    )
    if settings.overlong == "refuse":
        raise TaskError(
            f"{found}, the first in row {int(overlong[0]) + 1}; raise max_length, shorten them, or "
            "choose overlong truncate"
        )
    logger.warning("%s and are truncated", found)


def device() -> str:
    """Where sentence-transformers shall compute."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def judged(network, evaluator, *, accelerated: bool = True, bf16: bool = False) -> dict[str, float]:
    """What an evaluator says of a sentence-transformers model."""
    import torch

    from fastbert.models.accelerate import accelerate

    network = accelerate(network) if accelerated else network
    with torch.autocast(network.device.type, torch.bfloat16, enabled=bf16):
        return _plain(evaluator(network))


def run(
    task: str,
    kinds: tuple[type, type],
    network,
    checkpoints: Checkpoints,
    settings: PairSettings,
    training: TrainingSettings,
    *,
    best: str,
    dataset,
    loss,
    evaluator,
) -> Finetuned:
    """Trains, judges the best epoch and writes the model and a card.

    Args:
        task: the encoder's name.
        kinds: classes of its Trainer and of that one's arguments.
        network: a sentence-transformers model; fastbert goes inside, unless the recipe leaves it
            out.
        checkpoints, settings, training: of the run.
        best: the evaluator's metric that chooses the epoch.
        dataset, loss, evaluator: for the Trainer.
    """
    from fastbert.models.accelerate import accelerate
    from fastbert.tasks.trainers import callbacks_of, optimizer_of, trainer_arguments

    trainer_kind, arguments_kind = kinds
    trainer = trainer_kind(
        model=accelerate(network) if training.accelerated else network,
        args=trainer_arguments(
            arguments_kind,
            checkpoints.folder,
            training,
            num_features=len(dataset),
            best=f"eval_{best}",
        ),
        train_dataset=dataset,
        loss=loss,
        evaluator=evaluator,
        optimizers=(optimizer_of(network, training), None),
        callbacks=callbacks_of(training),
    )
    folder = checkpoints.output
    trained = checkpoints.train(trainer)
    result = Finetuned(
        folder,
        _plain(evaluator(network)),
        [_plain(epoch) for epoch in epochs_of(trainer.state.log_history)],
        trained["train_runtime"],
        trained["train_samples_per_second"],
    )
    network.save_pretrained(str(folder))
    pictures = draw_history(result, _plain_name(best))
    # sentence-transformers has written a card.
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write("\n".join(["", *picture_lines(pictures)]))
    write_description({"task": task, "settings": asdict(settings)}, folder)
    write_metrics(result)
    checkpoints.finish()
    return result


def _plain(metrics: dict) -> dict[str, float]:
    """Metrics under names without what is the same in all: `cosine_mrr@10`, `spearman_cosine`."""
    return {
        _plain_name(name): float(value)
        for name, value in metrics.items()
        if name != "sequential_score"
    }


def _plain_name(metric: str) -> str:
    return metric.removeprefix("cosine_").removesuffix("_cosine")
