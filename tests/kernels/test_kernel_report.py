"""Every Triton kernel compiles ahead of time for every target, within its limits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report():
    """The report's module, without the environment variable it sets for its own process."""
    before = os.environ.get("TRITON_INTERPRET")
    path = ROOT / "benchmarks" / "gpu" / "kernel_report.py"
    spec = importlib.util.spec_from_file_location("kernel_report", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before
    return module


def test_report_names_every_kernel(report):
    import ast

    kernels = set()
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels.add((path.stem, node.name))
    assert kernels == set(report.KERNELS)


def test_kernels_compile_within_their_limits():
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/kernel_report.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_report_finds_a_fault(report):
    row = {
        "kernel": "k",
        "arch": "sm_90",
        "dtype": "fp32",
        "registers": 100,
        "register_limit": 96,
        "spilled_bytes": 8,
        "shared_bytes": 10**6,
    }
    assert len(report.faults(row)) == 3
    fine = {**row, "registers": 96, "spilled_bytes": 0, "shared_bytes": 0}
    assert report.faults(fine) == []
