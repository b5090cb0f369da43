"""add_layer_norm with dropout: reads x and residual, writes h and y: 16 bytes an
element in fp32."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.ops.philox import row_keep_mask

from ..device import DEVICE
from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RNG = torch.tensor([1, 2], device=DEVICE)
P = 0.1


def _case(tiny):
    rows, width = (8, 24) if tiny else (4096, 768)
    inputs = {
        "x": torch.randn(rows, width),
        "residual": torch.randn(rows, width),
        "weight": torch.randn(width),
        "bias": torch.randn(width),
    }

    def ours(x, residual, weight, bias):
        return add_layer_norm(x, residual, weight, bias, eps=1e-12, dropout_p=P, rng_state=RNG)

    def rival(x, residual, weight, bias):
        return F.layer_norm(F.dropout(x, P) + residual, (width,), weight, bias, 1e-12)

    def check(x, residual, weight, bias):
        keep = row_keep_mask(RNG, rows, width, dropout_p=P, site=0)
        h = torch.where(keep, x, 0) * (65536 / (65536 - 6554)) + residual
        return F.layer_norm(h, (width,), weight, bias, 1e-12)

    elements = rows * width
    return Case(
        "add_layer_norm_fwd", inputs, ours, rival, 16 * elements, 12 * elements, check=check
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("add_layer_norm"))
def test_add_layer_norm(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"add_layer_norm {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "add_layer_norm", provider, DTYPES[dtype], backward)
