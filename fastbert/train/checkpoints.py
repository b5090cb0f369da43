"""Checkpoints of which nothing is lost: whole or not there, checked when read.

    RUN/checkpoints/step-2000/            written by torch.distributed.checkpoint
    RUN/checkpoints/step-2000/manifest.json   size and SHA-256 of every file
    RUN/checkpoints/step-2500.part/       one that is being written, or was when the run was killed

A checkpoint is written beside its place, made durable file by file, described by its manifest, and
appears by one rename; older ones go only after that. In the background all this is done by a
thread, on a copy of the state, while training goes on.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fastbert.data.corpus import sync_folder, write_atomically
from fastbert.train.processes import Processes

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with what is left and how to go on."""


class _Failed(Exception):
    """What went wrong in one of the processes."""


class Checkpoints:
    """The checkpoints of a run; a context manager where they are written in the background.

    Args:
        folder: where they lie, the same for all processes; made when the first one is written.
        keep: how many stay, the last ones.
        processes: which all call `save` and `load` together; None: this one alone.
        background: write a copy, made in host memory, in a thread.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        processes: Processes | None = None,
        *,
        background: bool = False,
    ):
        self.folder, self.keep = folder, keep
        self._processes = (Processes() if processes is None else processes).apart()
        self._alone = self._processes.size == 1
        if self._alone:
            # torch warns that it assumes a single process, which `no_dist` says. For good, because
            # the filters belong to all threads.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        self._thread = ThreadPoolExecutor(1, "checkpoints") if background else None
        self._writing: Future | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *error) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if kind is None:
            self.finish()

    def names(self) -> list[str]:
        """Of those that are whole, by step."""
        if not self.folder.is_dir():
            return []
        steps = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return [f"step-{step}" for step in sorted(int(match[1]) for match in steps if match)]

    def save(self, step: int, state: dict) -> None:
        """Writes the state after `step` steps; in the background, its copy as soon as the one
        before is written.

        Args:
            step: names the checkpoint.
            state: nested dicts of tensors and of what pickles.

        Raises:
            CheckpointError: it, or in the background the one before, could not be written, on a
                full disk for example; those before it stay.
        """
        self.finish()
        if self._thread is None:
            self._write(step, state)
            return
        self._writing = self._thread.submit(self._write, step, _copied(state))

    def finish(self) -> None:
        """Waits for what is written in the background.

        Raises:
            CheckpointError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, state: dict) -> None:
        target = self.folder / f"step-{step}"
        part = target.with_suffix(".part")

        def write() -> None:
            group = self._processes.group
            dcp.save(state, checkpoint_id=part, no_dist=self._alone, process_group=group)

        first = self._processes.is_first
        try:
            self._together(lambda: self._begin(part) if first else None)
            self._together(write)
            self._together(lambda: self._publish(part, target) if first else None)
        except _Failed as failed:
            if first:
                shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"cannot write {target}: {failed}; {self._left(target.name)}"
            ) from failed

    def _together(self, action: Callable[[], None]) -> None:
        """Fails in all processes if the action does in one, so that none waits for another."""
        error = None
        try:
            action()
        except (OSError, dcp.CheckpointException) as caught:
            error = caught
        reasons = self._processes.gathered(None if error is None else _reason(error))
        for reason in reasons:
            if reason is not None:
                raise _Failed(reason) from error

    def _begin(self, part: Path) -> None:
        self._clear()
        part.mkdir(parents=True)

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
        dcp.load(
            state,
            checkpoint_id=self.folder / name,
            no_dist=self._alone,
            process_group=self._processes.group,
        )

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


def _copied(state: dict) -> dict:
    """The state in memory of its own, on the host."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    copy = stager.stage(state)
    stager.close()
    return copy


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
