"""unpad: reads and writes each kept row, 8 bytes an element in fp32; no FLOPs."""

import pytest
import torch

from fastbert.ops.unpad import unpad

from ..harness import Case, providers, run
from ..shapes import RAGGED_32X128, TINY, describe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(batch):
    lengths, longest = batch
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    indices = keep.flatten().nonzero().view(-1)
    x = torch.randn(len(lengths) * longest, 768)
    return Case(
        "unpad",
        {"x": x},
        lambda x: unpad(x, indices),
        lambda x: x[indices],
        bytes_moved=8 * indices.numel() * 768,
        flops=0,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("unpad"))
def test_unpad(benchmark, tiny, provider, dtype, backward):
    batch = TINY if tiny else RAGGED_32X128
    benchmark.group = f"unpad {dtype} {'forward+backward' if backward else 'forward'}"
    benchmark.extra_info["tokens"] = describe(batch)
    run(benchmark, _case(batch), "unpad", provider, DTYPES[dtype], backward)
