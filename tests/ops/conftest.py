"""`backend`: every implementation of the op a test file names in `OP` that can run here.

The C++ kernels count once per instruction set, as `cpu:avx2`; those an op has no code of its own
for are left out (`MATMUL_OPS` have some for each).
"""

from typing import NamedTuple

import pytest
import torch

import fastbert.ops  # noqa: F401  registers the ops
from fastbert import extension
from fastbert.dispatch import BACKENDS, OPS, not_supported_reasons, use_backend

MATMUL_OPS = (
    "attention",
    "disentangled_attention",
    "encoder",
    "linear",
    "linear_gelu",
    "mlm_cross_entropy",
    "mlm_distillation",
)
ELEMENTWISE_ISAS = ("portable", "avx2", "avx512", "avx512_bf16")


def _implementations(room: str) -> list[str]:
    op = next(op for op in OPS.values() if op.room == room)
    found = []
    for backend in BACKENDS:
        # The tensors are a CPU's: the CUDA kernels run here emulated or not at all.
        if not op.has(backend) or backend == "cuda":
            continue
        isas = extension.CPU_ISAS if room in MATMUL_OPS else ELEMENTWISE_ISAS
        found += [f"cpu:{isa}" for isa in isas] if backend == "cpu" else [backend]
    return found


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = _implementations(metafunc.module.OP)
        metafunc.parametrize("backend", names, indirect=True)


class Bound(NamedTuple):
    """What `backend` gives a test: the backend's name, and the instruction set behind it."""

    name: str
    isa: str


@pytest.fixture
def backend(request) -> Bound:
    room = request.module.OP
    name, _, isa = request.param.partition(":")
    op = next(op for op in OPS.values() if op.room == room)
    reasons = not_supported_reasons(op, name, torch.device("cpu"), ())
    if reasons:
        pytest.skip("; ".join(reasons))
    if isa and isa not in extension.cpu_isas():
        pytest.skip(f"this machine cannot run {isa}")
    with use_backend(**{room: name}):
        if not isa:
            yield Bound(name, isa)
            return
        with extension.use_cpu_isa(isa):
            yield Bound(name, isa)
