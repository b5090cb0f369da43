"""Every Triton kernel compiles ahead of time for every target, within its limits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOTH = (True, False)


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


def test_report_has_every_form_of_disentangled_attention(report):
    """Tables that are there or not, dropout or none; sums of either table that is there."""
    forms = {}
    for _, name, kernel, target, dtype in report.jobs("disentangled_attention"):
        if (target, dtype) == (90, "bf16"):
            constants = kernel.constants(dtype, target)
            form = tuple(constants.get(n) for n in ("HAS_KEY", "HAS_QUERY", "DROPOUT", "OF_KEYS"))
            forms.setdefault(name.split("_")[-2], set()).add(form)
    of_tables = {(key, query, p, None) for key in BOTH for query in BOTH for p in BOTH}
    for kernel in ("fwd", "dq", "dkv"):
        assert forms[kernel] == of_tables
    assert forms["positions"] == {
        (key, query, p, of_keys)
        for key, query, p, _ in of_tables
        for of_keys in BOTH
        if (key if of_keys else query)
    }
    everywhere = report.jobs("positions", everywhere=True)
    assert len(everywhere) > 6 * len(forms["positions"])


def test_kernels_compile_within_their_limits():
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/kernel_report.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_report_finds_a_fault(report):
    kernel = report.Kernel(lambda dtype, target: {}, tensor_cores=True)
    fine = {
        "kernel": "k",
        "target": "sm_90",
        "dtype": "bf16",
        "form": "DROPOUT",
        "registers": 96,
        "spills": 0,
        "shared_bytes": 1024,
        "blocks": 4,
        "wide_loads": 2,
        "tensor": 8,
        "hgmma": 8,
    }
    assert report.faults(fine, kernel) == []
    wrong = {"spills": 3, "shared_bytes": 10**6, "blocks": 1, "wide_loads": 0, "hgmma": 0}
    for key, value in wrong.items():
        assert len(report.faults({**fine, key: value}, kernel)) == 1, key
    assert len(report.faults({**fine, "tensor": 0, "hgmma": 0}, kernel)) == 2


def test_report_allows_an_older_triton_its_spills(report, monkeypatch):
    import triton

    kernel = report.Kernel(lambda dtype, target: {}, wide=False)
    row = {"kernel": "mlm_cross_entropy_bwd", "target": "sm_80", "dtype": "bf16", "spills": 2}
    row |= {"shared_bytes": 0, "form": ""}
    for version, spills, faults in (("3.6.0", 2, 0), ("3.6.0", 3, 1), ("3.9.0", 2, 1)):
        monkeypatch.setattr(triton, "__version__", version)
        assert len(report.faults({**row, "spills": spills}, kernel)) == faults
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert len(report.faults({**row, "target": "sm_89"}, kernel)) == 1


def test_report_counts_what_bounds_a_loop(report):
    """64 x 64 x 64 on Hopper: half a million FLOP are 128 cycles of 4096."""
    code = [(0, "MOV", "R0, R1 ")]
    code += [(16 * i, "HGMMA.64x64x16.F32.BF16", "R8, gdesc[UR4], R8 ") for i in range(1, 5)]
    code += [(80, "MUFU.EX2", "R2, R2 "), (96, "FFMA", "R2, R2, R3, R4 "), (112, "BRA", "0x10 ")]
    assert report.loop_cycles(code, 90, 4) == {
        "tensor": 128,
        "special": 8,
        "fp32": 1,
        "instructions": 7,
    }
    assert report.loop_cycles(code[:-1], 90, 4) is None
    assert report.blocks_per_sm(90, 128, 16 << 10, 128) == 4
    assert report.blocks_per_sm(90, 32, 100 << 10, 128) == 2


def test_roofline_page_is_what_its_script_prints():
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/roofline.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ROOT / "docs" / "roofline.md").read_text() == run.stdout
