"""unpad and pad: each kept row is read and written once, 8 bytes an element in fp32, and pad writes
the rows between them; no FLOPs."""

import pytest
import torch

from fastbert.ops.unpad import pad, unpad

from ..device import DEVICE
from ..harness import Case, providers, run
from ..shapes import RAGGED_32X128, TINY, describe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(name, batch):
    lengths, longest = batch
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    indices = keep.flatten().nonzero().view(-1).to(DEVICE)
    rows = len(lengths) * longest
    if name == "pad":
        return Case(
            "pad",
            {"x": torch.randn(indices.numel(), 768)},
            lambda x: pad(x, indices, rows),
            lambda x: x.new_zeros(rows, 768).index_copy(0, indices, x),
            bytes_moved=4 * (indices.numel() + rows) * 768,
            flops=0,
        )
    return Case(
        "unpad",
        {"x": torch.randn(rows, 768)},
        lambda x: unpad(x, indices),
        lambda x: x[indices],
        bytes_moved=8 * indices.numel() * 768,
        flops=0,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["unpad", "pad"])
@pytest.mark.parametrize("provider", providers("unpad"))
def test_unpad(benchmark, tiny, provider, name, dtype, backward):
    batch = TINY if tiny else RAGGED_32X128
    benchmark.group = f"{name} {dtype} {'forward+backward' if backward else 'forward'}"
    benchmark.extra_info["tokens"] = describe(batch)
    run(benchmark, _case(name, batch), "unpad", provider, DTYPES[dtype], backward)
