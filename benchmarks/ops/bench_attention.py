"""attention over packed sequences: 4·Σ L²·N·D FLOPs; reads q, k, v, writes out. The rival is
torch's scaled_dot_product_attention on the padded batch with its mask, as transformers runs it."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.attention import attention
from fastbert.testing.inputs import cu_seqlens

from ..device import DEVICE
from ..harness import Case, providers, run
from ..shapes import BASE, BATCHES, TINY, describe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(batch):
    lengths, longest = batch
    heads = BASE["num_attention_heads"]
    dim = BASE["hidden_size"] // heads
    rows = sum(lengths)
    starts = cu_seqlens(lengths).to(DEVICE)
    keep = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(DEVICE)
    inputs = {name: torch.randn(rows, heads, dim) for name in ("q", "k", "v")}

    def ours(q, k, v):
        return attention(q, k, v, starts, starts, max_seqlen_q=longest, max_seqlen_k=longest)[0]

    def rival(q, k, v):
        padded = []
        for x in (q, k, v):
            full = x.new_zeros(len(lengths), longest, heads, dim)
            full[keep] = x
            padded.append(full.transpose(1, 2))
        mask = keep[:, None, None, :]
        return F.scaled_dot_product_attention(*padded, attn_mask=mask).transpose(1, 2)[keep]

    return Case(
        "attention_fwd",
        inputs,
        ours,
        rival,
        bytes_moved=4 * 4 * rows * heads * dim,
        flops=4 * sum(n * n for n in lengths) * heads * dim,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("provider", providers("attention"))
def test_attention(benchmark, tiny, provider, batch, dtype, backward):
    size = TINY if tiny else BATCHES[batch]
    benchmark.group = f"attention {batch} {dtype} {'forward+backward' if backward else 'forward'}"
    benchmark.extra_info["tokens"] = describe(size)
    run(benchmark, _case(size), "attention", provider, DTYPES[dtype], backward)
