"""Going on with a fine-tuning that was killed, from the last epoch that was saved whole."""

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.runs import CHECKPOINTS
from fastbert.tasks.tables import TaskError

logger = logging.getLogger("fastbert")

RUN = "run.json"
# Trainer writes it last.
STATE = "trainer_state.json"


class Checkpoints:
    """The checkpoints of a run, which only a run on the same rows by the same recipe goes on from.

    Args:
        output: folder of the model; they are in a folder below it.
        base: the checkpoint it starts from.
        task: its name and settings, for JSON. training: the recipe.
        rows: to train and to judge by.

    Raises:
        TaskError: there are checkpoints of another run.
    """

    def __init__(
        self,
        output: Path,
        base: str,
        task: dict,
        training: TrainingSettings,
        *rows: Sequence[dict],
    ):
        self.output = output
        self.folder = (output / CHECKPOINTS).resolve()
        recipe = {name: value for name, value in asdict(training).items() if name != "progress"}
        run = {"base": str(base), **task, **recipe, "rows": _digest(rows)}
        run = json.loads(json.dumps(run))
        path = self.folder / RUN
        if self.last() is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            path.write_text(json.dumps(run, indent=2) + "\n")
            return
        found = json.loads(path.read_text())
        other = [name for name in run if run[name] != found.get(name)]
        if other:
            raise TaskError(
                f"{self.folder} holds a run that was stopped and had another {', '.join(other)}; "
                "run it again as it was, or remove the folder"
            )

    def last(self) -> Path | None:
        """The newest that was saved whole."""
        found = self.folder.glob("checkpoint-*")
        whole = [path for path in found if _state(path) is not None]
        return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)

    def train(self, trainer) -> dict[str, float]:
        """Trainer's `train` from the last checkpoint, if there is one.

        Returns:
            Its metrics; the speed is that of this process' share.
        """
        last = self.last()
        if last is None:
            return trainer.train().metrics
        begun = _state(last)["global_step"]
        logger.warning("%s: goes on from %s", self.output, last.name)
        metrics = trainer.train(resume_from_checkpoint=str(last)).metrics
        share = 1 - begun / trainer.state.global_step
        return {**metrics, "train_samples_per_second": metrics["train_samples_per_second"] * share}

    def remove(self) -> None:
        """Removes them all."""
        shutil.rmtree(self.folder)


def _state(checkpoint: Path) -> dict | None:
    try:
        return json.loads((checkpoint / STATE).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def _digest(rows: Sequence[Sequence[dict]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()
