"""Checkpoints of which nothing is lost: whole or not there, checked when read.

    RUN/checkpoints/step-2000/            written by torch.distributed.checkpoint
    RUN/checkpoints/step-2000/manifest.json   size and SHA-256 of every file
    RUN/checkpoints/step-2500.part/       one that is being written, or was when the run was killed

A checkpoint is written beside its place, made durable file by file, described by its manifest, and
appears by one rename; older ones go only after that.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.checkpoint as dcp

from fastbert.data.corpus import sync_folder, write_atomically
from fastbert.train.processes import Processes

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with what is left and how to go on."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: where they lie; made when the first one is written.
        keep: how many stay, the last ones.
        processes: which all call `save` and `load` together; None: this one alone.
    """

    def __init__(self, folder: Path, keep: int, processes: Processes | None = None):
        self.folder, self.keep = folder, keep
        self._processes = Processes() if processes is None else processes
        self._alone = self._processes.size == 1

    def names(self) -> list[str]:
        """Of those that are whole, by step."""
        if not self.folder.is_dir():
            return []
        steps = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return [f"step-{step}" for step in sorted(int(match[1]) for match in steps if match)]

    def save(self, step: int, state: dict) -> Path:
        """Writes the state after `step` steps.

        Args:
            step: names the checkpoint.
            state: nested dicts of tensors and of what pickles.

        Raises:
            CheckpointError: it could not be written, on a full disk for example; those before it
                stay.
        """
        target = self.folder / f"step-{step}"
        part = target.with_suffix(".part")
        try:
            if self._processes.is_first:
                self._clear()
                part.mkdir(parents=True)
            self._processes.wait()
            with _without_warning():
                dcp.save(state, checkpoint_id=part, no_dist=self._alone)
            if self._processes.is_first:
                self._publish(part, target)
        except (OSError, dcp.CheckpointException) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"cannot write {target}: {_reason(error)}; {self._left(target.name)}"
            ) from error
        self._processes.wait()
        return target

    def _publish(self, part: Path, target: Path) -> None:
        """Gives what is complete its name, and removes the oldest."""
        write_atomically(part / MANIFEST, json.dumps(_manifest(part), indent=1))
        os.rename(part, target)
        sync_folder(self.folder)
        for name in self.names()[: -self.keep]:
            self._remove(self.folder / name)

    def verify(self, name: str) -> None:
        """Reads the whole checkpoint.

        Raises:
            CheckpointError: there is none of that name, or it is damaged.
        """
        path = self.folder / name
        if name not in self.names():
            raise CheckpointError(
                f"{path} does not exist; there are {', '.join(self.names()) or 'none'}"
            )
        fault = damage(path)
        if fault:
            raise CheckpointError(f"{path} is damaged: {fault}; {self._left(name)}")

    def load(self, name: str, state: dict) -> None:
        """Fills `state`, or the part of a checkpoint that it names, tensors in place."""
        with _without_warning():
            dcp.load(state, checkpoint_id=self.folder / name, no_dist=self._alone)

    def set_aside_after(self, name: str) -> list[str]:
        """Renames the checkpoints behind this one, so that they are not resumed from.

        Returns:
            Their names.
        """
        names = self.names()
        later = names[names.index(name) + 1 :]
        self._processes.wait()
        for other in reversed(later) if self._processes.is_first else ():
            aside = self.folder / f"{other}.aside"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.folder / other, aside)
        self._processes.wait()
        return later

    def _clear(self) -> None:
        """Removes what a killed run left half written or half removed."""
        if self.folder.is_dir():
            for path in self.folder.glob("*.part"):
                shutil.rmtree(path)

    def _remove(self, path: Path) -> None:
        # Renamed first: a kill in between must not leave half a checkpoint under its name.
        doomed = path.with_suffix(".part")
        os.rename(path, doomed)
        shutil.rmtree(doomed)

    def _left(self, name: str) -> str:
        """What can be done without the checkpoint `name`."""
        step = int(_NAME.fullmatch(name)[1])
        before = [n for n in self.names() if int(_NAME.fullmatch(n)[1]) < step]
        for other in reversed(before):
            if damage(self.folder / other) is None:
                return f"{other} is intact: --checkpoint.resume-from {other} goes on from there"
        return "no earlier checkpoint is intact"


@contextmanager
def _without_warning() -> Iterator[None]:
    """torch warns that it assumes a single process, which `no_dist` says."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if all its files are as they were written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest.items():
            size = (path / name).stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} does not have the checksum it was written with"
    except (OSError, ValueError) as error:
        return _reason(error)
    return None


def _manifest(folder: Path) -> dict[str, dict]:
    return {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return "; ".join(str(cause) for cause in causes)
    return str(error)
