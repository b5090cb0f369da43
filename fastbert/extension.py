"""The compiled parts: loaded once, and only by the torch they were built with.

`fastbert._C` holds the C++ kernels, `fastbert._C_cuda` the CUDA kernels, `fastbert._C_emulated` the
same CUDA kernels run by a CPU for tests. setup.py leaves a record beside each, `_C.json` and so on:
`{"built": bool, "torch": version, "reason": why it was not built}`. C++ code compiled against one
torch can crash under another, so a record that does not match is refused here and every op runs its
other implementations.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import torch

RECORDS = Path(__file__).parent
REMEDY = "rebuild from the source with: pip install --no-build-isolation ."
NAMES = {"_C": "compiled", "_C_cuda": "CUDA", "_C_emulated": "emulated CUDA"}
REMEDIES = {
    "_C": REMEDY,
    "_C_cuda": "where torch has CUDA, FASTBERT_BUILD=cuda pip install --no-build-isolation .",
    "_C_emulated": "for the tests of the CUDA kernels, make emulated",
}

CPU_ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets the C++ kernels are compiled for, in rising order."""


@functools.cache
def load(module: str = "_C") -> str | None:
    """Loads one of the compiled parts.

    Returns:
        None when its kernels are registered, else one line saying why not and what to do.
    """
    reason = why_not(RECORDS / f"{module}.json")
    if reason is None:
        importlib.import_module(f"fastbert.{module}")
    return reason


def why_not(record: Path) -> str | None:
    """Why the compiled part described by `record` cannot be used here; None if it can."""
    kernels, remedy = f"{NAMES[record.stem]} kernels", REMEDIES[record.stem]
    if not record.is_file():
        return f"{kernels} are not built: no build record; {remedy}"
    built = json.loads(record.read_text())
    if not built["built"]:
        return f"{kernels} are not built: {built['reason']}; {remedy}"
    if built["torch"] != torch.__version__:
        return (
            f"{kernels} were built with torch {built['torch']}, this is torch "
            f"{torch.__version__}; {remedy}"
        )
    if importlib.util.find_spec(f"fastbert.{record.stem}") is None:
        return f"{kernels} are missing although a build was recorded; {remedy}"
    return None


def cpu_isa() -> str | None:
    """The instruction set the C++ kernels use: the best of this machine, unless
    FASTBERT_CPU_ISA or `use_cpu_isa` says less; None without compiled kernels."""
    return None if load() is not None else torch.ops.fastbert.cpu_isa("")


def cpu_isas() -> tuple[str, ...]:
    """The instruction sets this machine can run, in rising order."""
    if load() is not None:
        return ()
    with use_cpu_isa("best"):
        return CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1]


@contextlib.contextmanager
def use_cpu_isa(name: str) -> Iterator[None]:
    """Runs the C++ kernels of one instruction set inside a `with` block, in the whole process.

    Args:
        name: one of CPU_ISAS, or `best`.

    Raises:
        ValueError: unknown name, or one this machine cannot run.
    """
    before = cpu_isa()
    torch.ops.fastbert.cpu_isa(name)
    try:
        yield
    finally:
        torch.ops.fastbert.cpu_isa(before)
