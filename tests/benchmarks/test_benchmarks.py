"""The benchmarks run, at their smallest sizes, and refuse to time a wrong result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.gpu import timings
from fastbert import dispatch, extension
from fastbert.ops.bias_gelu import bias_gelu
from fastbert.testing.counters import assert_ran

ROOT = Path(__file__).resolve().parents[2]


def _pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--tiny", *arguments]
    # Under xdist the plugin would take the inner run for a worker's and refuse to time.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_benchmarks_run():
    run = _pytest("benchmarks", "--benchmark-only")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


# file, what a plugin breaks in it, what the refusal says
BROKEN = {
    "op": (
        "benchmarks/ops/bench_bias_gelu.py",
        "import fastbert.ops\n"
        "op = fastbert.dispatch.OPS['bias_gelu_fwd']\n"
        "right = op.reference\n"
        "object.__setattr__(op, 'reference', lambda *a: right(*a) * 1.01)\n",
        "largest error",
    ),
    "gradient of a training step": (
        "benchmarks/models/bench_mlm_step.py",
        "import torch\n"
        "import fastbert\n"
        "right = fastbert.BertForMaskedLM.forward\n"
        "def forward(self, *a, **k):\n"
        "    out = right(self, *a, **k)\n"
        "    if out.loss is not None and out.loss.requires_grad:\n"
        "        out.loss.register_hook(lambda g: g * 1.01)\n"
        "    return out\n"
        "fastbert.BertForMaskedLM.forward = forward\n",
        "gradient: relative error",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_benchmark_refuses_a_wrong_result(tmp_path, broken):
    """The same file with a plugin that breaks what it times: an assertion, not a figure."""
    file, plugin, message = BROKEN[broken]
    (tmp_path / "broken_plugin.py").write_text(plugin)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "broken_plugin"]
    run = subprocess.run(
        [*command, "--tiny", "--benchmark-only", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode != 0
    assert message in run.stdout


def test_benchmarks_time_the_kernels_of_a_gpu(monkeypatch):
    """Where there is one: Triton's and those in CUDA C++ that are built, and not the CPU's."""
    monkeypatch.setattr(harness, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(dispatch, "_triton_reasons", lambda device: [])
    monkeypatch.setattr(dispatch, "_capability_reasons", lambda language, device: [])
    for name in ("unpad", "pad"):
        monkeypatch.setitem(dispatch._built, (name, "cuda"), None)
    assert harness.providers("unpad") == ["reference", "triton", "cuda", "torch"]
    monkeypatch.setitem(dispatch._built, ("pad", "cuda"), "not built")
    assert harness.providers("unpad") == ["reference", "triton", "torch"]


def test_gpu_script_times_both_languages():
    """Forward and backward run the kernels they are named after."""
    if extension.load("_C_emulated") is not None:
        pytest.skip("the emulated CUDA kernels are not built")
    x = torch.randn(3, 8, requires_grad=True)
    functions = {timings.OURS: lambda: bias_gelu(x, None, approximate="none")}
    cases = list(timings._both("bias_gelu", functions, [x], ("bytes", 1, 1)))
    for way, (name, timed, *_) in zip(("fwd", "bwd"), cases, strict=True):
        assert timed.keys() == {timings.OURS, timings.OURS_IN_CUDA}, name
        with assert_ran(f"bias_gelu_{way}", "cuda_emulated"):
            timed[timings.OURS_IN_CUDA]()


def test_gpu_script_times_what_torch_computes_too(monkeypatch):
    """Ours and torch's of the ops whose rival is written out for the script, forward and
    backward."""
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)  # the same gradient for both
    half = {"device": torch.device("cpu"), "dtype": torch.float32}
    compared = 0
    for cases in (timings._disentangled_cases, timings._distillation_cases):
        for name, functions, unit, amount in cases(False, half):
            ours, theirs = functions[timings.OURS](), functions["torch"]()
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)
            assert (unit, amount > 0) == ("flops", True)
            compared += 1
    assert compared == 4
