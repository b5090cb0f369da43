"""DeBERTa-v3-base: forward (bf16) and masked-LM step (bf16 autocast, dropout 0.1), fastbert against
transformers, which has eager attention alone for it."""

import pytest
import torch

from ..compare import check_training
from ..shapes import DEBERTA_V3, DENSE_8X512, RAGGED_32X128, TINY
from .twins import check_equal, forwards, masked_lm_steps, padded, time_both, twins, with_labels

BATCHES = {"ragged-32x128": RAGGED_32X128, "dense-8x512": DENSE_8X512}
TINY_SIZE = {
    **DEBERTA_V3,
    "vocab_size": 99,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 36,
}


@pytest.mark.parametrize("batch", BATCHES)
def test_forward(benchmark, tiny, batch):
    chosen, settings = (TINY, TINY_SIZE) if tiny else (BATCHES[batch], DEBERTA_V3)
    models = twins("DebertaV2Model", settings, torch.bfloat16, attention="eager")
    inputs = padded(chosen, settings["vocab_size"])
    check_equal(models, inputs, 3e-2, "deberta_v2_model")
    time_both(benchmark, forwards(models, inputs), chosen, 1 if tiny else 3)


def test_masked_lm_step(benchmark, tiny):
    batch, settings = (TINY, TINY_SIZE) if tiny else (RAGGED_32X128, DEBERTA_V3)
    models = twins("DebertaV2ForMaskedLM", settings, attention="eager")
    inputs = padded(batch, settings["vocab_size"])
    check_training(models, with_labels(inputs), 1e-5, "deberta_v2_model")
    time_both(benchmark, masked_lm_steps(models, inputs), batch, 1 if tiny else 3)
