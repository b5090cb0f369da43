"""rotary: reads and writes queries, keys and values once, 24 bytes a feature of one of them in
fp32; 12 FLOPs."""

import pytest
import torch
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from fastbert.ops.rotary import rotary

from ..device import DEVICE
from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(tiny):
    rows, heads, head_dim = (8, 2, 8) if tiny else (2048, 12, 64)
    index = torch.arange(rows, device=DEVICE)
    frequency = 10_000.0 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    angles = index[:, None] * frequency
    cos, sin = angles.cos(), angles.sin()

    def as_transformers(qkv):
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
        doubled = (torch.cat([t, t], -1).to(qkv.dtype) for t in (cos, sin))
        q, k = apply_rotary_pos_emb(q, k, *doubled)
        return torch.stack([q, k, v], 1).flatten(1)

    return Case(
        "rotary",
        {"qkv": torch.randn(rows, 3 * heads * head_dim)},
        lambda qkv: rotary(qkv, heads, cos, sin, index),
        as_transformers,
        bytes_moved=24 * rows * heads * head_dim,
        flops=12 * rows * heads * head_dim,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("rotary"))
def test_rotary(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"rotary {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "rotary", provider, DTYPES[dtype], backward)
