"""The record of the compiled part: built for this torch, or refused with a remedy."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fastbert import extension

ROOT = Path(__file__).resolve().parents[1]


def test_extension_is_loaded_or_says_why_not():
    reason = extension.load()
    assert reason is None or reason.startswith("compiled kernels")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "no build record"),
        ({"built": False, "torch": None, "reason": "no compiler"}, "not built: no compiler"),
        (
            {"built": True, "torch": "2.0.0", "reason": None},
            "built with torch 2.0.0, this is torch",
        ),
    ],
)
def test_extension_is_refused_with_a_remedy(tmp_path, record, message):
    path = tmp_path / "_C.json"
    if record is not None:
        path.write_text(json.dumps(record))
    reason = extension.why_not(path)
    assert message in reason
    assert "--no-build-isolation" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("part", "remedy"),
    [("_C_emulated", "emulated CUDA kernels .* make emulated"), ("_C_cuda", "FASTBERT_BUILD=cuda")],
)
def test_every_part_has_its_remedy(tmp_path, part, remedy):
    reason = extension.why_not(tmp_path / f"{part}.json")
    assert re.search(remedy, reason)
    assert "no build record" in reason


def test_extension_of_this_torch_is_taken(tmp_path):
    if extension.load() is not None:
        pytest.skip("the compiled part is not built")
    path = tmp_path / "_C.json"
    path.write_text(json.dumps({"built": True, "torch": torch.__version__, "reason": None}))
    assert extension.why_not(path) is None


def _build(folder, mode):
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder / "base")]
    command += ["bdist_wheel", "--dist-dir", str(folder)]
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"FASTBERT_BUILD": mode, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )


def test_pure_python_wheel_records_why(tmp_path):
    run = _build(tmp_path, "none")
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = json.loads(archive.read("fastbert/_C.json"))
        cuda = json.loads(archive.read("fastbert/_C_cuda.json"))
    assert record == cuda == {"built": False, "torch": None, "reason": "FASTBERT_BUILD=none"}
    assert {"fastbert/kernels/philox.py", "fastbert/ops/attention.py"} <= names
    assert not any(name.endswith(".so") or name.startswith("kernels/") for name in names)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("cuda", "was built without CUDA"),
        ("fast", "must be one of auto, none, cpu, cuda, cuda_only, cuda_emulated, got 'fast'"),
    ],
)
def test_explicit_build_that_cannot_be_is_an_error(tmp_path, mode, message):
    if mode == "cuda" and torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    run = _build(tmp_path, mode)
    assert run.returncode != 0
    assert message in run.stderr


# setup.py up to what it hands to setuptools, with the claim that this torch has CUDA.
WHAT_IS_BUILT = """
import json, os, runpy, setuptools, torch
from torch.utils import cpp_extension
torch.version.cuda = torch.version.cuda or "13.0"
cpp_extension.CUDA_HOME = cpp_extension._find_cuda_home()
def show(ext_modules, **_):
    (part,) = ext_modules
    print(json.dumps([part.name, part.sources, os.environ["TORCH_CUDA_ARCH_LIST"]]))
setuptools.setup = show
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize("named", ["", "9.0"])
def test_cuda_part_is_built_without_a_gpu(named):
    """For the architectures named, or where none is, for all that nvcc and the kernels know."""
    if shutil.which("nvcc") is None or torch.cuda.is_available():
        pytest.skip("takes nvcc and no GPU")
    environment = {**os.environ, "FASTBERT_BUILD": "cuda_only", "TORCH_CUDA_ARCH_LIST": named}
    run = subprocess.run(
        [sys.executable, "-c", WHAT_IS_BUILT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    part, sources, architectures = json.loads(run.stdout.splitlines()[-1])
    assert part == "fastbert._C_cuda"
    kernels = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cuda").rglob("*.c[up]*")}
    assert {s for s in kernels if not s.endswith("h")} < set(sources)
    if named:
        assert architectures == named
    else:
        assert architectures.startswith("8.0;9.0")
        assert architectures.endswith("+PTX")
