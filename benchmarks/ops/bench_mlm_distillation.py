"""mlm_distillation: both decoders' matmuls, 2·P·(C + D)·V FLOPs; reads the weights, writes P losses
of each kind."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.mlm_distillation import mlm_distillation

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

    def rival(hidden, weight, bias, labels, teacher_hidden, teacher_weight, teacher_bias):
        logits = F.linear(hidden, weight, bias)
        with torch.no_grad():
            teacher_logits = F.linear(teacher_hidden, teacher_weight, teacher_bias)
        if logits.dtype != torch.float64:
            logits, teacher_logits = logits.float(), teacher_logits.float()
        divergence = F.kl_div(
            F.log_softmax(logits / 2, -1),
            F.softmax(teacher_logits / 2, -1),
            reduction="none",
        )
        return F.cross_entropy(logits, labels, reduction="none") + 4 * divergence.sum(-1)

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
