"""mlm_cross_entropy: the decoder's matmul, 2·P·C·V FLOPs; reads the weight, writes P losses."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(tiny):
    rows, width, vocab = (8, 24, 50) if tiny else (154, 768, 30_522)
    inputs = {
        "hidden": torch.randn(rows, width),
        "weight": torch.randn(vocab, width) * 0.02,
        "bias": torch.randn(vocab),
        "labels": torch.randint(vocab, (rows,)),
    }

    def rival(hidden, weight, bias, labels):
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels, reduction="none")

    return Case(
        "mlm_cross_entropy_fwd",
        inputs,
        mlm_cross_entropy,
        rival,
        4 * (vocab * width + rows * width + rows),
        2 * rows * width * vocab,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("mlm_cross_entropy"))
def test_mlm_cross_entropy(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"mlm_cross_entropy {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "mlm_cross_entropy", provider, DTYPES[dtype], backward)
