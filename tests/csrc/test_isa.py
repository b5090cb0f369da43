"""Which instruction sets the compiled part holds, and that none leaks into another's code."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastbert import extension

LIBRARY = next(iter(sorted(Path(extension.__file__).parent.glob("_C*.so"))), None)
# Registers, and the namespaces whose functions may use them.
REGISTERS = {
    "zmm": r"%zmm|%k[0-7]\b",
    "ymm": r"%ymm",
    "tmm": r"%tmm",
}
ALLOWED = {
    "zmm": ("avx512", "avx512_bf16", "amx"),
    "ymm": ("avx2", "avx512", "avx512_bf16", "amx"),
    "tmm": ("amx",),
}


@pytest.fixture(scope="module")
def functions():
    """Each function of the compiled part with its instructions."""
    if LIBRARY is None:
        pytest.skip("the compiled part is not built")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    if extension.cpu_isas()[-1:] == ("portable",):
        pytest.skip("built for the portable kernels only")
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for block in text.split("\n\n"):
        head, _, body = block.partition("\n")
        name = re.match(r"[0-9a-f]+ <(.*)>:$", head)
        if name:
            found[name[1]] = body
    return found


def _namespace(function: str) -> str:
    inside = re.search(r"\bfastbert::(\w+)::", function)
    return inside[1] if inside else ""


@pytest.mark.parametrize("register", REGISTERS)
def test_isa_code_stays_in_its_namespace(functions, register):
    users = {f for f, body in functions.items() if re.search(REGISTERS[register], body)}
    assert users, f"nothing uses {register}"
    strays = {f for f in users if _namespace(f) not in ALLOWED[register]}
    assert not strays, f"{register} outside of {ALLOWED[register]}: {sorted(strays)[:5]}"


def test_isa_code_calls_nothing_of_a_newer_one(functions):
    """From avx2 and portable code no call leads to code of a newer instruction set."""
    wide = ("avx512", "avx512_bf16", "amx")
    newer = {"portable": ("avx2", *wide), "avx2": wide}
    for function, body in functions.items():
        for called in re.findall(r"(?:call|jmp)\s+[0-9a-f]+ <(.*?)(?:\+0x[0-9a-f]+)?>", body):
            assert _namespace(called) not in newer.get(_namespace(function), ()), (function, called)


def test_isa_is_chosen_and_restored():
    isas = extension.cpu_isas()
    if not isas:
        pytest.skip("the compiled part is not built")
    assert isas[0] == "portable"
    before = extension.cpu_isa()
    for isa in isas:
        with extension.use_cpu_isa(isa):
            assert extension.cpu_isa() == isa
    assert extension.cpu_isa() == before
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        torch.ops.fastbert.cpu_isa("sse9")


def test_isa_from_the_environment():
    if not extension.cpu_isas():
        pytest.skip("the compiled part is not built")
    code = "from fastbert import extension; print(extension.cpu_isa())"
    for wanted in ("portable", "nonsense"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=os.environ | {"FASTBERT_CPU_ISA": wanted},
        )
        if wanted == "portable":
            assert run.stdout.strip() == "portable"
        else:
            assert run.returncode != 0
            assert "FASTBERT_CPU_ISA: unknown instruction set 'nonsense'" in run.stderr


def test_split_fp32_from_the_environment():
    if extension.cpu_isa() != "amx":
        pytest.skip("products are split on AMX only")
    code = "import torch, fastbert.ops.linear as l; x = torch.ones(9, 64); l.linear(x, x, None)"
    for wanted, status in (("0", 0), ("1", 0), ("no", 1)):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=os.environ | {"FASTBERT_SPLIT_FP32": wanted},
        )
        assert run.returncode == status, run.stderr
    assert "FASTBERT_SPLIT_FP32: must be 0 or 1, got 'no'" in run.stderr
