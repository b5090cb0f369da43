"""mlm_distillation: both decoders' matmuls, 2·P·(C + D)·V FLOPs; reads the weights, writes P losses
of each kind."""

import pytest
import torch

from fastbert.ops.mlm_distillation import mlm_distillation
from fastbert.testing.plain import plain_mlm_distillation

from ..harness import Case, providers, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _case(tiny):
    rows, width, vocab = (8, 24, 50) if tiny else (614, 768, 30_522)
    inputs = {
        "hidden": torch.randn(rows, width),
        "weight": torch.randn(vocab, width) * 0.02,
        "bias": torch.randn(vocab),
        "labels": torch.randint(vocab, (rows,)),
        "teacher_hidden": torch.randn(rows, width),
        "teacher_weight": torch.randn(vocab, width) * 0.02,
        "teacher_bias": torch.randn(vocab),
    }

    def ours(**inputs):
        return sum(mlm_distillation(**inputs))

    def rival(**inputs):
        return sum(plain_mlm_distillation(**inputs))

    return Case(
        "mlm_distillation_fwd",
        inputs,
        ours,
        rival,
        4 * 2 * (vocab * width + rows * width + rows),
        2 * 2 * rows * width * vocab,
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("provider", providers("mlm_distillation"))
def test_mlm_distillation(benchmark, tiny, provider, dtype, backward):
    benchmark.group = f"mlm_distillation {dtype} {'forward+backward' if backward else 'forward'}"
    run(benchmark, _case(tiny), "mlm_distillation", provider, DTYPES[dtype], backward)
