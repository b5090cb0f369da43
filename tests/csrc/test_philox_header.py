"""csrc/common/philox.h itself: its scalar functions against frozen masks, and as device code."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("philox_masks.cu")
GOLDEN = json.loads((ROOT / "tests" / "golden" / "dropout_stream.json").read_text())


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    binary = tmp_path_factory.mktemp("philox") / "masks"
    command = [compiler, "-std=c++17", "-O1", "-x", "c++", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*command, str(SOURCE), "-o", str(binary)], check=True)
    return binary


def _masks(program, *arguments):
    text = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout
    return f"{int(text, 2):x}"


@pytest.mark.parametrize("entry", GOLDEN["rows"], ids=lambda e: f"{e['state']}-{e['shape']}")
def test_philox_header_rows(program, entry):
    stream = (*entry["state"], entry["site"], entry["threshold"])
    assert _masks(program, "rows", *stream, *entry["shape"]) == entry["keep"]


@pytest.mark.parametrize("entry", GOLDEN["scores"], ids=lambda e: f"{e['state']}-{e['shape']}")
def test_philox_header_scores(program, entry):
    stream = (*entry["state"], entry["site"], entry["threshold"])
    where = (entry["sequence"], *entry["shape"])
    assert _masks(program, "scores", *stream, *where) == entry["keep"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_philox_header_compiles_for_gpus(architecture, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-std=c++17", f"-I{ROOT / 'csrc'}"]
    command += ["-Xptxas", "-v", str(SOURCE), "-o", str(tmp_path / "masks.cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("0 bytes spill stores") == 2
