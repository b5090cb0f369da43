"""Forward (bf16) and masked-LM step (bf16 autocast, dropout 0.1) of RoBERTa, ELECTRA, DistilBERT
and ALBERT at base size: fastbert against transformers' sdpa."""

import pytest
import torch

from fastbert.testing.inputs import small_config

from ..compare import check_training
from ..harness import interleaved, speedup
from ..shapes import FAMILIES, RAGGED_32X128, TINY, describe
from .twins import check_equal, masked_lm_steps, padded, twins, with_labels

COUNTERS = {family: f"{family.lower()}_model" for family in FAMILIES}


@pytest.fixture
def settings(family, tiny):
    if not tiny:
        return FAMILIES[family]
    config = small_config(family)
    return {name: getattr(config, name) for name in (*FAMILIES[family], "max_position_embeddings")}


@pytest.mark.parametrize("family", FAMILIES)
def test_forward(benchmark, family, settings, tiny):
    batch = TINY if tiny else RAGGED_32X128
    models = twins(f"{family}Model", settings, torch.bfloat16)
    inputs = padded(batch, settings["vocab_size"])
    check_equal(models, inputs, 3e-2, COUNTERS[family])

    def forward(model):
        with torch.no_grad():
            return model(**inputs)

    functions = {name: (lambda m=model: forward(m)) for name, model in models.items()}
    _report(benchmark, functions, batch, tiny)


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_lm_step(benchmark, family, settings, tiny):
    batch = TINY if tiny else RAGGED_32X128
    models = twins(f"{family}ForMaskedLM", settings)
    inputs = padded(batch, settings["vocab_size"])
    check_training(models, with_labels(inputs), 1e-5, COUNTERS[family])
    _report(benchmark, masked_lm_steps(models, inputs), batch, tiny)


def _report(benchmark, functions, batch, tiny: bool) -> None:
    samples = interleaved(functions, 1 if tiny else 5)
    benchmark.extra_info["tokens"] = describe(batch)
    benchmark.extra_info["times_transformers"] = round(
        speedup(samples, "fastbert", "transformers"), 2
    )
    benchmark.pedantic(functions["fastbert"], rounds=3)
