"""Which run a folder holds: one that was finished, or one that was stopped and goes on from the
last epoch that was saved whole."""

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fastbert.differences import differences
from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.runs import CHECKPOINTS, RUN, Finetuned, read_metrics
from fastbert.tasks.tables import TaskError

logger = logging.getLogger("fastbert")

# Trainer writes it last.
STATE = "trainer_state.json"
# Endings of the files that tell one checkpoint from another: weights, configuration, vocabulary.
_TELLING = (".safetensors", ".bin", ".json", ".txt", ".model")


class Checkpoints:
    """The checkpoints of a run, which only a run on the same rows by the same recipe goes on from.

    A finished run leaves its record beside the model, so that another one does not replace it
    unasked.

    Args:
        output: folder of the model; checkpoints are in a folder below it.
        base: the checkpoint it starts from.
        task: its name and settings, for JSON. training: the recipe.
        rows, held_out: to train and to judge by.
        overwrite: replace another run, and train a finished one anew.

    Raises:
        TaskError: the folder holds another run, with what differs.
    """

    def __init__(
        self,
        output: Path,
        base: str,
        task: dict,
        training: TrainingSettings,
        rows: Sequence[dict],
        held_out: Sequence[dict],
        *,
        overwrite: bool,
    ):
        self.output = output
        self.folder = (output / CHECKPOINTS).resolve()
        self._overwrite = overwrite
        recipe = {name: value for name, value in asdict(training).items() if name != "progress"}
        run = {
            "checkpoint": _checkpoint(base),
            **task,
            "training": recipe,
            "train_rows": _digest(rows),
            "evaluation_rows": _digest(held_out),
        }
        self._run = json.loads(json.dumps(run))
        stopped = self._last()
        goes_on = stopped is not None and self._is_mine(
            self.folder / RUN, "a run that was stopped", "run it again as it was, "
        )
        self._begun = stopped if goes_on else None
        self._is_finished = not goes_on and self._is_mine(output / RUN, "a finished run")

    def _is_mine(self, record: Path, what: str, remedy: str = "") -> bool:
        """Whether a record is of this run."""
        if not record.is_file():
            return False
        changed = differences(json.loads(record.read_text(encoding="utf-8")), self._run)
        if changed and not self._overwrite:
            raise TaskError(
                f"{self.output} holds {what}, with other settings; {remedy}choose another output, "
                "or replace it by --overwrite (overwrite=True in Python):\n" + "\n".join(changed)
            )
        return not changed

    def _last(self) -> Path | None:
        """The newest that was saved whole."""
        found = self.folder.glob("checkpoint-*")
        whole = [path for path in found if _state(path) is not None]
        return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)

    def done_before(self) -> Finetuned | None:
        """What this run gave, if it was finished and is not to be overwritten."""
        if not self._is_finished or self._overwrite:
            return None
        logger.warning(
            "%s: this run was finished before; --overwrite trains it anew (overwrite=True in "
            "Python)",
            self.output,
        )
        return read_metrics(self.output)

    def train(self, trainer) -> dict[str, float]:
        """Trainer's `train` from the last checkpoint, if there is one.

        Returns:
            Its metrics; the speed is that of this process' share.
        """
        if self._begun is None:
            self._remove()
            self.folder.mkdir(parents=True)
            self._write_record(self.folder)
            return trainer.train().metrics
        begun = _state(self._begun)["global_step"]
        logger.warning("%s: goes on from %s", self.output, self._begun.name)
        metrics = trainer.train(resume_from_checkpoint=str(self._begun)).metrics
        share = 1 - begun / trainer.state.global_step
        return {**metrics, "train_samples_per_second": metrics["train_samples_per_second"] * share}

    def finish(self) -> None:
        """Says that the model is written, and removes the checkpoints."""
        self._write_record(self.output)
        self._remove()

    def _remove(self) -> None:
        """The record goes last: without it nobody knows whose the rest is."""
        if not self.folder.exists():
            return
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == RUN):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.folder.rmdir()

    def _write_record(self, folder: Path) -> None:
        text = json.dumps(self._run, indent=2, ensure_ascii=False) + "\n"
        (folder / RUN).write_text(text, encoding="utf-8")


def _state(checkpoint: Path) -> dict | None:
    try:
        return json.loads((checkpoint / STATE).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def _digest(rows: Sequence[dict]) -> str:
    text = json.dumps(list(rows), sort_keys=True, default=str)
    return f"{len(rows)} rows, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _checkpoint(base: str) -> str:
    """A name of the hub, or of a folder its own name and what is in it: it may be written anew."""
    folder = Path(base)
    if not folder.is_dir():
        return str(base)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _TELLING and path.is_file():
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return f"{folder.resolve().name}, sha256 {digest.hexdigest()[:16]}"
