"""What this machine can do at most: copy bandwidth and matmul rate, measured once a session."""

import functools
import time

import torch

from .device import DEVICE, waited_for

COPY_BYTES = 64 << 20 if DEVICE.type == "cpu" else 1 << 30
MATMUL = 1024, 768, 3072


def _best(function, repeats: int = 7) -> float:
    """Seconds of the fastest run: the roof is what the machine does undisturbed."""
    function = waited_for(function)
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.ones(COPY_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _best(lambda: target.copy_(source))


@functools.cache
def matmul_rate(dtype: torch.dtype) -> float:
    """FLOPs a second of torch's matmul at BERT's feed-forward shape."""
    rows, inner, columns = MATMUL
    kind = {"dtype": dtype, "device": DEVICE}
    a = torch.randn(rows, inner, **kind)
    b = torch.randn(inner, columns, **kind)
    out = torch.empty(rows, columns, **kind)
    return 2 * rows * inner * columns / _best(lambda: torch.mm(a, b, out=out))
