"""linear_gelu's gelu_mlp: two matmuls, 4·T·C·F FLOPs; reads and writes T·C, weights once."""

import pytest
import torch

from fastbert.ops.linear_gelu import gelu_mlp
from fastbert.reference.linear_gelu import gelu_mlp_reference

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(tiny):
    rows, width, inner = (8, 12, 24) if tiny else (1024, 768, 3072)
    inputs = {
        "x": torch.randn(rows, width),
        "weight_in": torch.randn(inner, width) * width**-0.5,
        "bias_in": torch.randn(inner),
        "weight_out": torch.randn(width, inner) * inner**-0.5,
        "bias_out": torch.randn(width),
    }
    return Case(
        "linear_gelu_fwd",
        inputs,
        lambda **a: gelu_mlp(**a, approximate="none"),
        lambda **a: gelu_mlp_reference(**a, approximate="none"),
        bytes_moved=4 * (2 * rows * width + 2 * width * inner),
        flops=4 * rows * width * inner,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("linear_gelu"))
def test_linear_gelu(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"linear_gelu {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "linear_gelu", provider, DTYPES[dtype], backward)
