"""How an op is timed: checked first on the same inputs, then measured, then put under its roof."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fastbert.dispatch import OPS, not_supported_reasons, use_backend
from fastbert.testing.compare import op_check
from fastbert.testing.counters import assert_ran

from .device import DEVICE, waited_for
from .roofs import copy_bandwidth, matmul_rate

RIVAL = "torch"
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        op: the registered op whose counter must move, for instance `attention_fwd`.
        inputs: arguments of both functions; float tensors are differentiated.
        ours: the op. rival: the same by plain PyTorch, as transformers computes it.
        check: plain PyTorch that runs in float64 too, where `rival` does not.
        bytes_moved, flops: of the forward; a backward counts 2.5 times in FLOPs (two products and
            the recomputation) and twice in bytes.
    """

    op: str
    inputs: Mapping[str, object]
    ours: Callable
    rival: Callable
    bytes_moved: int
    flops: int
    check: Callable | None = None


def providers(room: str) -> list[str]:
    """The backends of `room` that run at speed on DEVICE, and plain PyTorch: without a GPU neither
    Triton's interpreter nor the emulated CUDA kernels."""
    backends = ("reference", "cpu") if DEVICE.type == "cpu" else ("reference", "triton", "cuda")
    found = []
    for backend in backends:
        members = [op for op in OPS.values() if op.room == room and op.has(backend)]
        if members and not any(not_supported_reasons(op, backend, DEVICE, ()) for op in members):
            found.append(backend)
    return [*found, RIVAL]


def run(benchmark, case: Case, room: str, provider: str, dtype: torch.dtype, backward: bool):
    """Times one provider; fails, untimed, if its result is wrong.

    Raises:
        AssertionError: a wrong value or gradient, or another backend ran than the one named.
    """
    inputs = {k: _placed(v, dtype) for k, v in case.inputs.items()}
    if provider == RIVAL:
        measure(benchmark, case, case.rival, inputs, dtype, backward)
        return
    with use_backend(**{room: provider}):
        with assert_ran(case.op, provider):
            op_check(
                case.ours, case.check or case.rival, inputs, dtype, name=room, reduction_rows=64
            )
        measure(benchmark, case, case.ours, inputs, dtype, backward)


def _placed(value, dtype: torch.dtype):
    """A tensor on DEVICE, floats in `dtype`; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(DEVICE, dtype if value.is_floating_point() else None)


def measure(benchmark, case, function, inputs, dtype, backward) -> None:
    """Rounds of forward, or of forward and backward, and what they reach of the machine."""
    leaves = {
        k: v.clone().requires_grad_(backward and v.is_floating_point())
        if isinstance(v, torch.Tensor)
        else v
        for k, v in inputs.items()
    }

    def forward():
        with torch.set_grad_enabled(backward):
            outputs = function(**leaves)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    gradient = torch.randn_like(forward().detach())

    def both():
        forward().backward(gradient)

    timed = waited_for(both if backward else forward)
    benchmark.pedantic(timed, rounds=ROUNDS, warmup_rounds=1)
    moved = case.bytes_moved * (3 if backward else 1) * dtype.itemsize // 4
    flops = int(case.flops * (3.5 if backward else 1))
    seconds = benchmark.stats.stats.median if benchmark.stats else None
    benchmark.extra_info.update({"bytes": moved, "flops": flops})
    if seconds:
        benchmark.extra_info["of_copy_bandwidth"] = round(moved / seconds / copy_bandwidth(), 3)
        benchmark.extra_info["of_matmul_rate"] = round(flops / seconds / matmul_rate(dtype), 3)


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each function, run in turn (A B A B), so that a slow spell meets all of them."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return samples


def speedup(samples: Mapping[str, list[float]], ours: str, rival: str) -> float:
    """Median over rounds of rival / ours, each pair taken side by side."""
    pairs = zip(samples[rival], samples[ours], strict=True)
    return statistics.median(b / a for b, a in pairs)
