"""linear: one matmul, 2·T·C·F FLOPs; reads T·C and the weight, writes T·F."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.linear import linear

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# One short text, a batch, and the longer sums of the second matrix of the feed-forward network.
SHAPES = {"16": (16, 768, 3072), "1024": (1024, 768, 3072), "1024-deep": (1024, 3072, 768)}


def _case(shape):
    rows, width, inner = shape
    return Case(
        "linear_fwd",
        {
            "x": torch.randn(rows, width),
            "weight": torch.randn(inner, width) * width**-0.5,
            "bias": torch.randn(inner),
        },
        linear,
        F.linear,
        bytes_moved=4 * (rows * width + width * inner + rows * inner),
        flops=2 * rows * width * inner,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("provider", providers("linear"))
def test_linear(benchmark, tiny, provider, shape, dtype, backward):
    case = _case((8, 12, 24) if tiny else SHAPES[shape])
    benchmark.group = f"linear {shape} {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, case, "linear", provider, DTYPES[dtype], backward)
