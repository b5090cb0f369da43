"""What fine-tuning begins with and leaves behind: rows, a folder, metrics."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastbert.tasks.tables import TaskError, read_rows

logger = logging.getLogger("fastbert")

DESCRIPTION = "fastbert_task.json"
METRICS = "metrics.json"
RUN = "run.json"
CHECKPOINTS = "checkpoints"
HELD_OUT = 0.1


@dataclass(frozen=True)
class Finetuned:
    """
    Attributes:
        output: folder of the model.
        metrics: of the best checkpoint, on the evaluation rows.
        history: one mapping an epoch: training loss and metrics.
        seconds: of training, evaluations included. samples_per_second: as Trainer counts them.
            None in both: the run was finished before, and nothing was trained.
    """

    output: Path
    metrics: dict[str, float]
    history: list[dict]
    seconds: float | None
    samples_per_second: float | None


@dataclass(frozen=True)
class RunRows:
    """Rows of a run, whole and as they are used.

    Attributes:
        sources: the one or the two they come from, that of the training rows first: its name in
            messages, such as `films.csv (train)`, and all its rows.
        kept, judged: numbers, from 0, of the rows to train and of those to judge by, each in the
            source it comes from.
    """

    sources: list[tuple[str, list[dict]]]
    kept: Sequence[int]
    judged: Sequence[int]

    @property
    def train(self) -> list[dict]:
        """Rows to train."""
        return [self.sources[0][1][i] for i in self.kept]

    @property
    def held_out(self) -> list[dict]:
        """Rows to judge by."""
        return [self.sources[-1][1][i] for i in self.judged]


def output_folder(output: str | Path, *, overwrite: bool) -> Path:
    """The folder, which need not be there: `Checkpoints` makes it when the input is checked.

    Args:
        output: its path.
        overwrite: it may hold a model that an older version fine-tuned.

    Raises:
        TaskError: it holds what `finetune` did not write, or such a model.
    """
    output = Path(output)
    checkpoints = output / CHECKPOINTS
    was_stopped = (checkpoints / RUN).is_file()
    holds_model = (output / DESCRIPTION).is_file() and (output / METRICS).is_file()
    if not (was_stopped or holds_model) and _names(output) - {CHECKPOINTS}:
        raise TaskError(
            f"{output} holds something else than a run of finetune (no {DESCRIPTION} and "
            f"{METRICS}); name a new folder"
        )
    if not was_stopped and _names(checkpoints):
        raise TaskError(
            f"{checkpoints} holds something else than checkpoints of finetune (no {RUN}), which "
            "would be deleted; name a new folder"
        )
    if holds_model and not (was_stopped or overwrite or (output / RUN).is_file()):
        raise TaskError(
            f"{output} holds a model that an older version fine-tuned, and does not say how (no "
            f"{RUN}); choose another output, or replace it by --overwrite (overwrite=True in "
            "Python)"
        )
    return output


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def rows_of_run(
    train, evaluation, split: str | None, evaluation_split: str | None, seed: int, read=read_rows
) -> RunRows:
    """Rows to train and rows to judge by, not checked.

    Args:
        train, evaluation: rows, or what `read` takes; without the latter some are held out.
        split, evaluation_split: for `read`.
        seed: of the choice of held-out rows.
        read: `read_rows`, or a task's own.

    Raises:
        TaskError: there are none, or too few to hold some out.
    """
    name, rows = source = _read("train", train, split, read)
    if evaluation is not None:
        judged = _read("evaluation", evaluation, evaluation_split, read)
        return RunRows([source, judged], range(len(rows)), range(len(judged[1])))
    order = np.random.default_rng(seed).permutation(len(rows))
    count = max(1, round(HELD_OUT * len(rows)))
    if count >= len(rows):
        raise TaskError(
            f"{name}: {len(rows)} rows are too few to hold some out; name evaluation rows"
        )
    logger.info("no evaluation rows were named: %d of %d rows are held out", count, len(rows))
    return RunRows([source], sorted(order[count:].tolist()), sorted(order[:count].tolist()))


def _read(argument: str, source, split, read) -> tuple[str, list[dict]]:
    named = isinstance(source, (str, Path))
    rows = read(source, split=split) if named else list(source)
    name = f"{source} ({argument})" if named else argument
    if not rows:
        raise TaskError(f"{name}: there are no rows")
    return name, rows


def plain(metrics: dict) -> dict[str, float]:
    """Metrics without Trainer's prefix and clocks."""
    clocks = ("runtime", "samples_per_second", "steps_per_second", "epoch", "step")
    named = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    return {name: value for name, value in named.items() if name not in clocks}


def epochs_of(log: list[dict]) -> list[dict]:
    """What each epoch gave, of Trainer's log; its last entries repeat the best epoch."""
    epochs: dict[float, dict] = {}
    for entry in log:
        if "loss" in entry:
            epochs[entry["epoch"]] = {"epoch": entry["epoch"], "train_loss": entry["loss"]}
        elif (
            any(name.startswith("eval_") for name in entry)
            and len(epochs.get(entry["epoch"], ())) == 2
        ):
            epochs[entry["epoch"]] |= plain(entry)
    return list(epochs.values())


def write_metrics(result: Finetuned) -> None:
    """Writes what `read_metrics` reads."""
    record = {"metrics": result.metrics, "history": result.history}
    (result.output / METRICS).write_text(json.dumps(record, indent=2) + "\n")


def read_metrics(output: Path) -> Finetuned:
    """What a finished run gave."""
    record = json.loads((output / METRICS).read_text())
    return Finetuned(output, record["metrics"], record["history"], None, None)
