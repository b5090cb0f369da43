"""Nothing is lost: a run that is killed anywhere and started again equals one that never was."""

import errno
import io
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from fastbert.testing.killing import BATCHES, run_in_process, somewhere
from fastbert.testing.runs import learned, run, weights
from fastbert.train import checkpoints, pretraining
from fastbert.train.checkpoints import CheckpointError, Checkpoints, damage
from fastbert.train.config import ConfigError, config_from
from fastbert.train.exporting import export
from fastbert.train.journal import METRICS
from fastbert.train.pretraining import NonFiniteError, pretrain


class Uninterrupted:
    """Runs without a kill, one for each kind of settings."""

    def __init__(self, folder):
        self.folder, self.outcomes = folder, {}

    def __call__(self, settings) -> tuple[list[dict], bytes]:
        key = json.dumps({**settings, "output": ""})
        if key not in self.outcomes:
            folder = self.folder / str(len(self.outcomes))
            settings = {**settings, "output": str(folder / "run")}
            assert run_in_process(run, settings) == 0
            self.outcomes[key] = learned(folder / "run"), weights(folder / "run")
        return self.outcomes[key]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


def _ends_alike(settings, uninterrupted, code: int = 0) -> None:
    """Goes on with the run and compares it with the one that was not killed."""
    expected, expected_weights = uninterrupted(settings)
    assert code in (0, -signal.SIGKILL)
    assert run_in_process(run, settings) == 0
    assert learned(settings["output"]) == expected
    assert weights(settings["output"]) == expected_weights


def _killed(settings, uninterrupted, number: int) -> int:
    code = run_in_process(run, settings, kill_before=number)
    _ends_alike(settings, uninterrupted, code)
    return code


def test_the_run_learns_and_takes_its_time(settings, uninterrupted):
    """The comparisons below compare something: several epochs, phases, and a falling loss."""
    records, _ = uninterrupted(settings)
    steps = [r for r in records if r["loss"] is not None]
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert steps[-1]["epoch"] >= 2
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert sum(r["heldout_loss"] is not None for r in records) == 2


# Before: the records' fsync; the first checkpoint's rename; the second's manifest and rename; the
# removal of the oldest.
@pytest.mark.parametrize("number", [0, 5, 10, 12, 20])
def test_killed_in_a_save(settings, uninterrupted, number):
    assert _killed(settings, uninterrupted, number) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "sequences"),
    [("fp32", "packed"), ("bf16", "next_sentence"), ("fp16", "sentence_order")],
)
def test_killed_before_every_operation(settings, uninterrupted, tmp_path, sequences, precision):
    """Of all saves: between write, fsync, manifest, rename and removal."""
    settings["precision"] = precision
    settings["data"]["sequences"] = sequences
    settings["phases"][0]["max_length"] = 32
    number = 0
    while True:
        settings["output"] = str(tmp_path / f"run{number}")
        if _killed(settings, uninterrupted, number) == 0:
            break
        number += 1
    assert number > 20


def test_killed_at_a_random_time(settings, uninterrupted):
    seconds = random.Random(os.getpid()).uniform(0.2, 1.5)
    code = run_in_process(run, settings, kill_after=seconds)
    _ends_alike(settings, uninterrupted, code)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_twenty_in_a_row(settings, uninterrupted, attempt):
    """Killed anywhere, with three seeds of the run."""
    settings |= {"seed": attempt % 3, "average_decay": 0.9}
    _ends_alike(settings, uninterrupted, run_in_process(run, settings, **somewhere(attempt)))


@pytest.mark.parametrize("number", [1, 13])
def test_killed_between_accumulated_batches(settings, uninterrupted, number):
    """Before the second batch of the first step, and of the seventh."""
    code = run_in_process(run, settings, kill_before=number, operations=BATCHES)
    assert code == -signal.SIGKILL
    _ends_alike(settings, uninterrupted, code)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "stable_adamw"])
def test_killed_again_and_again(settings, uninterrupted, optimizer):
    """Until it ends by itself, with times that grow so that it does."""
    settings["optimizer"]["name"] = optimizer
    generator = random.Random(os.getpid())
    for attempt in range(20):
        code = run_in_process(run, settings, kill_after=generator.uniform(0.1, 0.5 + attempt / 10))
        if code == 0:
            break
    _ends_alike(settings, uninterrupted, code)


def test_terminated_run_saves_and_goes_on(settings, uninterrupted):
    """SIGTERM: exit code 0, a checkpoint at the step reached, the same end."""
    metrics = Path(settings["output"]) / METRICS

    def has_begun() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= 2

    code = run_in_process(run, settings, kill_after=has_begun, sign=signal.SIGTERM)
    assert code == 0
    names = Checkpoints(Path(settings["output"]) / "checkpoints", 2).names()
    reached = max(record["step"] for record in learned(settings["output"]))
    assert names[-1] == f"step-{reached}"
    assert reached < 12
    _ends_alike(settings, uninterrupted)


def test_all_that_was_saved_is_restored(settings):
    """Also what a short run does not depend on: loss scale, random states, the average."""
    settings |= {"precision": "fp16", "average_decay": 0.9}

    def held(run) -> list:
        return tree_leaves(
            [run.state(), run.average.state_dict(), torch.load(io.BytesIO(run._host_state()))]
        )

    run = pretraining.Pretraining(config_from(settings))
    torch.rand(7), np.random.rand(7), random.random()
    run.run()
    assert run.scaler.state_dict()["_growth_tracker"] == 12
    # Before there is another run: the random states are the process's, not a run's.
    expected = held(run)
    again = pretraining.Pretraining(config_from(settings))
    again.resume()
    restored = held(again)
    assert len(restored) == len(expected) > 100
    for ours, theirs in zip(restored, expected, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    assert run.checkpoints.names() == ["step-8", "step-12"], "the last two are kept"


def test_durable_before_it_is_named(settings, monkeypatch):
    """Every file and the folder itself are synced before the rename, the name behind it."""
    settings["phases"] = [{**settings["phases"][0], "steps": 4}]
    fsync, rename = os.fsync, os.rename
    synced, named = set(), []

    def record_fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_rename(source, target):
        if Path(target).name == "step-4":
            paths = [Path(source), *Path(source).iterdir()]
            named.append([path.name for path in paths if path.stat().st_ino not in synced])
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    pretrain(config_from(settings))
    assert named == [[]]
    assert (Path(settings["output"]) / "checkpoints").stat().st_ino in synced


def test_the_state_of_its_step_is_written(settings, monkeypatch, tmp_path):
    """In the background, although two more steps change it first."""
    settings["phases"] = [{**settings["phases"][0], "steps": 8}]
    run, save = pretraining.Pretraining(config_from(settings)), checkpoints.dcp.save

    def save_late(*arguments, **options):
        while run.steps_done < 6:
            time.sleep(0.001)
        return save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.dcp, "save", save_late)
        run.run()
    export(settings["output"], tmp_path / "ours", "step-4")
    settings["output"] = f"{settings['output']}-foreground"
    settings["checkpoint"]["background"] = False
    pretrain(config_from(settings))
    export(settings["output"], tmp_path / "expected", "step-4")
    files = (tmp_path / name / "model.safetensors" for name in ("ours", "expected"))
    ours, expected = (file.read_bytes() for file in files)
    assert ours == expected


def test_full_disk(settings, uninterrupted, monkeypatch):
    """The run says so; the checkpoint before is whole and is gone on from."""
    fsync, count = os.fsync, 0

    def full(descriptor):
        nonlocal count
        count += 1
        if count == 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-8: .*No space left.*step-4 is intact"):
        pretrain(config_from(settings))
    monkeypatch.undo()
    folder = Path(settings["output"]) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-4"]
    _ends_alike(settings, uninterrupted)


def test_damaged_checkpoint(settings, uninterrupted):
    """It is named with its fault and with the intact one, which is used on request only."""
    assert run_in_process(run, settings) == 0
    folder = Path(settings["output"]) / "checkpoints"
    assert [damage(folder / name) for name in ("step-8", "step-12")] == [None, None]
    data, manifest = folder / "step-12" / "__0_0.distcp", folder / "step-12" / "manifest.json"
    content = data.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for path, damaged, fault in (
        (data, changed, "checksum"),
        (data, content[:middle], f"has {middle} bytes"),
        (data, None, "No such file"),
        (manifest, b"{", "Expecting"),
    ):
        whole = path.read_bytes()
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"damaged: .*{fault}.*resume-from step-8 goes"):
            pretrain(config_from(settings))
        path.write_bytes(whole)
    manifest.unlink()
    settings["checkpoint"]["resume_from"] = "step-8"
    assert run_in_process(run, settings) == 0
    assert (folder / "step-12.aside").is_dir()
    del settings["checkpoint"]["resume_from"]
    _ends_alike(settings, uninterrupted)


def test_unknown_checkpoint(settings):
    settings["checkpoint"]["resume_from"] = "step-5"
    with pytest.raises(CheckpointError, match="step-5 does not exist; there are none"):
        pretrain(config_from(settings))


def test_other_settings_are_not_resumed(settings):
    settings["phases"] = settings["phases"][:1]
    pretrain(config_from(settings))
    settings["log"]["peak_tflops"] = 1.0
    pretrain(config_from(settings))
    settings["optimizer"]["lr"] = 1e-3
    with pytest.raises(ConfigError, match=r"optimizer.lr: 0.002 there, 0.001 now"):
        pretrain(config_from(settings))


def test_run_of_gradients_that_are_not_finite_stops(settings):
    """An absurd rate: the batches are there for inspection, and no weight became NaN."""
    settings["optimizer"] |= {"lr": 1e30, "max_grad_norm": None}
    settings["schedule"]["warmup_steps"] = 0
    settings["max_skipped"] = 3
    with pytest.raises(NonFiniteError, match="3 steps in a row"):
        pretrain(config_from(settings))
    folder = Path(settings["output"])
    skipped = [r["step"] for r in learned(folder) if r["skipped"]]
    assert sorted(path.name for path in (folder / "nonfinite").iterdir()) == sorted(
        f"step-{step}.pt" for step in skipped
    )
    batches = torch.load(folder / "nonfinite" / f"step-{skipped[-1]}.pt", weights_only=True)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 256), (1, 256)]


def test_kill_is_noticed_if_the_manifest_came_late(settings, monkeypatch):
    """The tests above can fail: a checkpoint that appears before it is whole is seen by them."""
    monkeypatch.setattr(checkpoints, "_manifest", lambda folder: {"__0_0.distcp": {"size": 1}})
    settings["phases"] = [{**settings["phases"][0], "steps": 4}]
    pretrain(config_from(settings))
    with pytest.raises(CheckpointError, match="damaged"):
        pretraining.Pretraining(config_from(settings)).resume()
