"""What a run tells: metrics.jsonl always, a progress line, TensorBoard and wandb on request."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fastbert.data.corpus import write_atomically
from fastbert.train.config import ConfigError, LogConfig

METRICS = "metrics.jsonl"


class Journal:
    """A context manager that writes records wherever the settings say.

    Args:
        folder: of the run.
        config: where to write.
        num_steps: of the run. first_step: with which this process begins; records behind it, of a
            run that was killed after its last checkpoint, are removed.
        settings: of the run, shown by wandb.

    Raises:
        ConfigError: a package that is asked for is missing.
    """

    def __init__(
        self, folder: Path, config: LogConfig, *, num_steps: int, first_step: int, settings: Mapping
    ):
        self._path, self._config = folder / METRICS, config
        self._settings = dict(settings)
        self._num_steps, self._first_step = num_steps, first_step
        self._tensorboard = _tensorboard(folder) if config.tensorboard else None
        self._wandb = _wandb() if config.wandb_project else None

    def __enter__(self) -> "Journal":
        keep_records(self._path, self._first_step)
        self._file = self._path.open("a")
        self._line = _ProgressLine(self._num_steps, self._first_step, self._config.progress)
        if self._wandb is not None:
            self._run = self._wandb.init(
                project=self._config.wandb_project,
                dir=str(self._path.parent),
                config=self._settings,
            )
        return self

    def __exit__(self, *error) -> None:
        self._line.stop()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._run.finish(exit_code=0 if error[0] is None else 1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Writes what is known after `step` steps."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        self._line.update(step, values)
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._run.log(numbers, step=step)

    def sync(self) -> None:
        """Makes the records durable: a checkpoint must not be ahead of them."""
        self._file.flush()
        os.fsync(self._file.fileno())


class SilentJournal:
    """The journal of every process but the first."""

    def __enter__(self) -> "SilentJournal":
        return self

    def __exit__(self, *error) -> None:
        """Has nothing to close."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Writes nothing."""

    def sync(self) -> None:
        """Has nothing to sync."""


def keep_records(path: Path, last_step: int) -> None:
    """Removes the records behind a step, and a line that a kill cut off."""
    if not path.exists():
        return
    kept = [json.dumps(r) for r in read_records(path) if r["step"] <= last_step]
    write_atomically(path, "".join(line + "\n" for line in kept))


def read_records(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; an unfinished last line is left out.

    Raises:
        ValueError: a line within the file that is no JSON.
    """
    lines = path.read_text().split("\n")
    records = []
    # What stands behind the last line's end was being written when the run was killed.
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
    return records


class _ProgressLine:
    """The line a person watches."""

    def __init__(self, num_steps: int, first_step: int, shown: bool):
        from rich.progress import MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._values: dict[str, float] = {}
        self._progress = Progress(
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("left"),
            Remaining(),
            disable=not shown,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step, text="")
        self._progress.start()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self._values.update(values)
        self._progress.update(self._task, completed=step, text=describe(self._values))

    def stop(self) -> None:
        self._progress.stop()


def describe(values: Mapping[str, float]) -> str:
    """Loss, held-out accuracy, rate, speed, use of the device and padding, as far as known."""
    parts = (
        ("loss", "loss {:.3f}"),
        ("heldout_accuracy", "held-out accuracy {:.1%}"),
        ("lr", "lr {:.2g}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("mfu", "MFU {:.0%}"),
        ("padding_share", "padding {:.0%}"),
    )
    return ", ".join(form.format(values[name]) for name, form in parts if name in values)


def _tensorboard(folder: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError("log.tensorboard needs `pip install tensorboard`") from error
    return SummaryWriter(str(folder / "tensorboard"))


def _wandb():
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("log.wandb_project needs `pip install wandb`") from error
    return wandb
