"""Several processes: equal to one, repeatable, resumable, stopped together."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load

from fastbert.testing.killing import run_in_processes
from fastbert.testing.runs import learned, run, weights
from fastbert.train.batches import BatchStream, Place
from fastbert.train.checkpoints import Checkpoints
from fastbert.train.config import config_from
from fastbert.train.pretraining import Pretraining

ROOT = Path(__file__).resolve().parents[2]
SIZE = 2


@pytest.fixture
def settings(settings):
    """Two processes, of one batch each in a step, then of two."""
    settings["phases"] = [
        {"steps": 6, "max_length": 24, "tokens_per_step": 512, "tokens_per_batch": 256},
        {"steps": 2, "max_length": 48, "tokens_per_step": 1024, "tokens_per_batch": 256},
    ]
    settings["checkpoint"]["every"] = 3
    return settings


def _in_one_process(settings, size: int):
    """The reference: all processes' batches, accumulated in one; its reports and weights."""
    alone = Pretraining(config_from({**settings, "output": settings["output"] + " alone"}))
    reports, place = [], [Place()] * size
    for number, phase in enumerate(alone.config.phases):
        if number:
            place = [Place(phase=number, epoch=place[0].epoch + 1)] * size
            state = alone.step.state_dict()
            alone.step = alone._graphed_step(state["rng_state"])
            alone.step.load_state_dict(state)
        streams = [
            BatchStream(
                alone.corpus,
                alone.tokenizer,
                alone.config.data,
                phase,
                num_steps=alone.config.num_steps,
                seed=alone.config.seed,
                place=place[rank],
                rank=rank,
                num_ranks=size,
            )
            for rank in range(size)
        ]
        batches = [iter(stream) for stream in streams]
        for _ in range(phase.steps):
            taken = [next(b) for _ in range(streams[0].accumulation) for b in batches]
            reports.append(alone.step(*(batch.inputs for batch in taken)))
            alone.scheduler.step()
            place = [batch.place for batch in taken[-size:]]
    return reports, alone.model.state_dict()


@pytest.mark.parametrize(
    ("mode", "sequences", "size"),
    [
        ("ddp", "packed", 2),
        ("ddp", "next_sentence", 2),
        ("zero1", "packed", 2),
        ("fsdp", "next_sentence", 2),
        ("fsdp", "packed", 4),
        pytest.param("ddp", "packed", 4, marks=pytest.mark.slow),
        pytest.param("zero1", "packed", 4, marks=pytest.mark.slow),
        pytest.param("fsdp", "packed", 2, marks=pytest.mark.slow),
    ],
)
def test_processes_equal_one(settings, mode, sequences, size):
    """fp32 without dropout: losses, gradient norms and weights to 1e-5."""
    settings["parallel"] = {"mode": mode}
    settings["data"]["sequences"] = sequences
    settings["model"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for phase in settings["phases"]:
        phase["tokens_per_step"] *= size // SIZE
    assert run_in_processes(run, settings, size=size) == [0] * size
    ours = [r for r in learned(settings["output"]) if r["loss"] is not None]
    expected, expected_weights = _in_one_process(settings, size)
    assert len(ours) == len(expected) == 8
    for mine, other in zip(ours, expected, strict=True):
        assert mine["num_labels"] == other.num_labels
        assert mine["grad_norm"] == pytest.approx(other.grad_norm, rel=1e-4)
        assert mine["loss"] == pytest.approx(other.loss, rel=1e-5)
    for name, weight in load(weights(settings["output"])).items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mode", ["ddp", *(pytest.param(m, marks=pytest.mark.slow) for m in ("zero1", "fsdp"))]
)
def test_processes_repeat_themselves_and_resume(settings, mode):
    """With dropout: the same run twice, and once more with a process killed in its second save."""
    settings |= {"parallel": {"mode": mode}, "average_decay": 0.9}
    outcomes = []
    for name in ("first", "second", "killed"):
        settings["output"] = f"{Path(settings['output']).parent / name}"
        options = {"rank0": {"kill_before": 15}} if name == "killed" else {}
        codes = run_in_processes(run, settings, size=SIZE, **options)
        if name == "killed":
            assert codes[0] == -signal.SIGKILL and codes[1] != 0
            codes = run_in_processes(run, settings, size=SIZE)
        assert codes == [0, 0]
        kept = [weights(settings["output"], average=average) for average in (False, True)]
        outcomes.append((learned(settings["output"]), *kept))
    assert outcomes[0] == outcomes[1] == outcomes[2]

    hosts = {f"rank{rank}": b"" for rank in range(SIZE)}
    Checkpoints(Path(settings["output"]) / "checkpoints", 2).load("step-8", {"host": hosts})
    streams = [torch.load(io.BytesIO(host))["step"]["rng_state"] for host in hosts.values()]
    assert streams[0][0] != streams[1][0], "processes draw the same dropout"


def test_processes_stop_together(settings):
    """SIGTERM to one of them."""
    settings["phases"][0]["steps"] = 2000
    metrics = Path(settings["output"]) / "metrics.jsonl"

    def has_begun() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= 2

    terminated = {"kill_after": has_begun, "sign": signal.SIGTERM}
    assert run_in_processes(run, settings, size=SIZE, rank1=terminated) == [0, 0]
    names = Checkpoints(Path(settings["output"]) / "checkpoints", 2).names()
    reached = max(record["step"] for record in learned(settings["output"]))
    assert names[-1] == f"step-{reached}"
    assert reached < 2000


@pytest.mark.slow
def test_torchrun(settings, tmp_path):
    """The command as it is typed."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(SIZE), "-m", "fastbert", "pretrain", str(path)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after 8 steps") == 1
