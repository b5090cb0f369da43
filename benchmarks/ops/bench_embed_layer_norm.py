"""embed_layer_norm: reads three rows of tables and writes h and y, 20 bytes an element in fp32."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.embed_layer_norm import embed_layer_norm

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(tiny):
    rows, width, vocab = (8, 24, 50) if tiny else (4096, 768, 30_522)
    inputs = {
        "input_ids": torch.randint(vocab, (rows,)),
        "token_type_ids": torch.randint(2, (rows,)),
        "position_ids": torch.arange(rows) % 128,
        "word_weight": torch.randn(vocab, width),
        "token_type_weight": torch.randn(2, width),
        "position_weight": torch.randn(512, width),
        "weight": torch.randn(width),
        "bias": torch.randn(width),
    }

    def rival(
        input_ids,
        token_type_ids,
        position_ids,
        word_weight,
        token_type_weight,
        position_weight,
        weight,
        bias,
    ):
        h = F.embedding(input_ids, word_weight) + F.embedding(token_type_ids, token_type_weight)
        h = h + F.embedding(position_ids, position_weight)
        return F.layer_norm(h, (width,), weight, bias, 1e-12)

    elements = rows * width
    return Case(
        "embed_layer_norm_fwd",
        inputs,
        lambda **a: embed_layer_norm(**a, eps=1e-12),
        rival,
        20 * elements,
        10 * elements,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("embed_layer_norm"))
def test_embed_layer_norm(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"embed_layer_norm {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "embed_layer_norm", provider, DTYPES[dtype], backward)
