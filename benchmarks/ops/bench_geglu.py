"""geglu: reads u and v and writes y, 12 bytes an element of y in fp32; about 31 FLOPs each."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.geglu import geglu

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _plain(x):
    u, v = x.chunk(2, dim=-1)
    return F.gelu(u) * v


def _case(tiny):
    rows, features = (8, 24) if tiny else (2048, 1152)
    return Case(
        "geglu_fwd",
        {"x": torch.randn(rows, 2 * features)},
        lambda x: geglu(x, approximate="none"),
        _plain,
        bytes_moved=12 * rows * features,
        flops=31 * rows * features,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("geglu"))
def test_geglu(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"geglu {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "geglu", provider, DTYPES[dtype], backward)
