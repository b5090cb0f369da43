"""disentangled_attention over packed sequences: 4·Σ L²·N·D FLOPs of the content and as many of the
positions; reads q, k, v and the tables, writes out. The rival is transformers' eager attention on
the padded batch, which gathers both terms for every pair."""

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from fastbert.ops.disentangled_attention import disentangled_attention
from fastbert.testing.inputs import cu_seqlens

from ..harness import Case, providers, run
from ..shapes import BASE, BATCHES, TINY, describe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BUCKETS, REACH = 256, 512


def _case(batch):
    lengths, longest = batch
    heads = BASE["num_attention_heads"]
    head_dim = BASE["hidden_size"] // heads
    size = sum(lengths)
    scale = (3 * head_dim) ** -0.5
    starts = cu_seqlens(lengths)
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    like = torch.empty(1, longest, 1)
    bucket = build_relative_position(like, like, BUCKETS, REACH)[0] + BUCKETS
    bucket = bucket.clamp(0, 2 * BUCKETS - 1)

    def ours(q, k, v, position_key, position_query):
        return disentangled_attention(
            q,
            k,
            v,
            position_key,
            position_query,
            starts,
            max_seqlen=longest,
            position_buckets=BUCKETS,
            max_relative_positions=REACH,
            softmax_scale=scale,
        )[0]

    def rival(q, k, v, position_key, position_query):
        padded = []
        for t in (q, k, v):
            rows = t.new_zeros(len(lengths), longest, heads, head_dim)
            rows[keep] = t
            padded.append(rows.transpose(1, 2))
        query, key, value = padded
        index = bucket.expand(len(lengths), heads, -1, -1)
        scores = query @ key.transpose(2, 3)
        scores = scores + (query @ position_key.permute(1, 2, 0)).gather(-1, index)
        by_key = (key @ position_query.permute(1, 2, 0)).gather(-1, index.transpose(2, 3))
        scores = (scores + by_key.transpose(2, 3)) * scale
        scores = scores.masked_fill(~keep[:, None, None], torch.finfo(q.dtype).min)
        return (scores.softmax(-1) @ value).transpose(1, 2)[keep]

    tables = dict.fromkeys(("position_key", "position_query"), (2 * BUCKETS, heads, head_dim))
    shapes = {**dict.fromkeys(("q", "k", "v"), (size, heads, head_dim)), **tables}
    return Case(
        "disentangled_attention_fwd",
        {name: torch.randn(shape) for name, shape in shapes.items()},
        ours,
        rival,
        bytes_moved=4 * (4 * size + 4 * BUCKETS) * heads * head_dim,
        flops=8 * sum(n * n for n in lengths) * heads * head_dim,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("provider", providers("disentangled_attention"))
def test_disentangled_attention(benchmark, tiny, provider, batch, dtype, backward):
    size = TINY if tiny else BATCHES[batch]
    direction = "forward+backward" if backward else "forward"
    benchmark.group = f"disentangled_attention {batch} {dtype} {direction}"
    benchmark.extra_info["tokens"] = describe(size)
    run(benchmark, _case(size), "disentangled_attention", provider, DTYPES[dtype], backward)
