"""Forward (bf16) and masked-LM step (bf16 autocast, dropout 0.1) of RoBERTa, ELECTRA, DistilBERT
and ALBERT at base size: fastbert against transformers' sdpa."""

import pytest
import torch

from fastbert.testing.inputs import small_config

from ..compare import check_training
from ..shapes import FAMILIES, RAGGED_32X128, TINY
from .twins import check_equal, forwards, masked_lm_steps, padded, time_both, twins, with_labels

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

    time_both(benchmark, forwards(models, inputs), batch, 1 if tiny else 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_lm_step(benchmark, family, settings, tiny):
    batch = TINY if tiny else RAGGED_32X128
    models = twins(f"{family}ForMaskedLM", settings)
    inputs = padded(batch, settings["vocab_size"])
    check_training(models, with_labels(inputs), 1e-5, COUNTERS[family])
    time_both(benchmark, masked_lm_steps(models, inputs), batch, 1 if tiny else 5)
