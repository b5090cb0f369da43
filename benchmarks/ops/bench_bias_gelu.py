"""bias_gelu: reads x and writes y, 8 bytes an element in fp32; about 30 FLOPs an element."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.bias_gelu import bias_gelu

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(tiny):
    rows, features = (8, 24) if tiny else (1024, 3072)
    x, bias = torch.randn(rows, features), torch.randn(features)
    return Case(
        "bias_gelu_fwd",
        {"x": x, "bias": bias},
        lambda x, bias: bias_gelu(x, bias, approximate="none"),
        lambda x, bias: F.gelu(x + bias),
        bytes_moved=8 * x.numel(),
        flops=30 * x.numel(),
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("bias_gelu"))
def test_bias_gelu(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"bias_gelu {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "bias_gelu", provider, DTYPES[dtype], backward)
