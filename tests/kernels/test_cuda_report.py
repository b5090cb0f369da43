"""The report on CUDA C++ kernels sees what is wrong, and the binding compiles for CUDA tensors."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
FINE = {
    "kernel": "k<fp32, RowLayout<1, 2, true> >",
    "target": 90,
    "registers": 96,
    "spills": 0,
    "shared_bytes": 0,
    "warps": 20,
    "wide_loads": 2,
    "wide_stores": 1,
}
SPILLS = """
__global__ void k(float* x) {
  float v[400];
#pragma unroll
  for (int i = 0; i < 400; ++i) v[i] = x[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 400; ++i) x[(399 - i) * 32 + threadIdx.x] = v[i] * v[(i * 7) % 400];
}
"""


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    return importlib.import_module("cuda_report")


@pytest.fixture
def nvcc():
    path = shutil.which("nvcc")
    if path is None:
        pytest.skip("no nvcc")
    return path


def toolkit_includes(nvcc: str) -> list[str]:
    """The options by which nvcc itself finds the toolkit's headers."""
    command = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    return re.search(r'INCLUDES="(.*)"', text)[1].replace('"', "").split()


@pytest.mark.parametrize(
    "change", [{"spills": 8}, {"warps": 7}, {"wide_loads": 0}, {"wide_stores": 0}], ids=str
)
def test_report_finds_a_fault(report, change):
    assert report.faults(FINE) == []
    assert len(report.faults({**FINE, **change})) == 1
    if "wide_loads" in change or "wide_stores" in change:
        assert report.faults({**FINE, **change, "kernel": "k<true, false>"}) == []
    masks = {**FINE, **change, "kernel": "row_keep_mask_kernel<true>"}
    assert len(report.faults(masks)) == ("wide_loads" not in change)


def test_report_samples_targets(report):
    """Everything for one target; of what is written out by dtype, one dtype for the others."""
    sources = [ROOT / "csrc" / "cuda" / f"{name}.cu" for name in ("geglu", "attention_bwd_bf16")]
    repeated = sources[1].with_stem("attention_bwd_fp16")
    jobs = report.jobs_of([*sources, repeated], None)
    assert jobs[0][0].stem.startswith("attention_bwd")
    targets = {source: {t for s, t in jobs if s == source} for source, _ in jobs}
    assert targets == {sources[0]: {90, 80, 100}, sources[1]: {90, 80, 100}, repeated: {90}}
    assert len(report.jobs_of(sources, "all")) == 10
    assert report.jobs_of(sources[:1], "89,120") == [(sources[0], 89), (sources[0], 120)]


def test_report_reads_machine_code(report, nvcc, tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(SPILLS)
    (row,) = report.compile_file(source, 90)
    assert row["kernel"] == "k"
    assert row["registers"] == 255
    assert row["spills"] > 0
    source.write_text("__global__ void k() { int unused = 1; }")
    with pytest.raises(RuntimeError, match="unused"):
        report.compile_file(source, 90)


def test_sums_compile_within_their_limits(nvcc):
    """The whole report is a stage of .ci/run; here the shortest file."""
    command = ["benchmarks/gpu/cuda_report.py", "--check", "--only", "sum_parts"]
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("sum_parts_kernel") == 3


def test_binding_compiles_for_cuda_tensors(nvcc, tmp_path):
    """Against this torch's headers; what a torch without CUDA lacks of them is made up."""
    macros = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    macros.parent.mkdir(parents=True)
    macros.write_text("#pragma once\n")
    folders = [ROOT / "csrc", *include_paths(), sysconfig.get_paths()["include"], tmp_path]
    command = ["c++", "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in folders)]
    command += toolkit_includes(nvcc)
    source = ROOT / "csrc" / "register_cuda.cpp"
    run = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
