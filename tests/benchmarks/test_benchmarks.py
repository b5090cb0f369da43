"""The benchmarks run, at their smallest sizes, and refuse to time a wrong result."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_benchmark_refuses_a_wrong_result(tmp_path):
    """The same file with a plugin that breaks the reference: an assertion, not a figure."""
    (tmp_path / "break_bias_gelu.py").write_text(
        "import torch\n"
        "from fastbert import dispatch\n"
        "import fastbert.ops\n"
        "op = dispatch.OPS['bias_gelu_fwd']\n"
        "right = op.reference\n"
        "object.__setattr__(op, 'reference', lambda *a: right(*a) * 1.01)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "break_bias_gelu"]
    command += ["--tiny", "--benchmark-only", "benchmarks/ops/bench_bias_gelu.py"]
    run = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert run.returncode != 0
    assert "largest error" in run.stdout
