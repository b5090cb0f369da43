"""A masked-LM training step, bf16 autocast, dropout 0.1: fastbert against transformers' sdpa."""

import pytest
import torch

from ..harness import interleaved, speedup
from ..shapes import BASE, DENSE_8X128, RAGGED_32X128, TINY, describe
from .twins import check_equal, masked_lm_step, padded, twins, with_labels

BATCHES = {"dense-8x128": DENSE_8X128, "ragged-32x128": RAGGED_32X128}
TINY_SIZE = {**BASE, "hidden_size": 24, "num_hidden_layers": 1, "vocab_size": 99}


@pytest.mark.parametrize("batch", BATCHES)
def test_mlm_step(benchmark, tiny, batch):
    settings = TINY_SIZE if tiny else BASE
    chosen = TINY if tiny else BATCHES[batch]
    models = twins("BertForMaskedLM", settings)
    inputs = padded(chosen, settings["vocab_size"])
    check_equal(models, inputs, 1e-5)
    steps = {
        name: masked_lm_step(
            model.train(),
            with_labels(inputs),
            torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
            autocast=True,
        )
        for name, model in models.items()
    }
    samples = interleaved(steps, 1 if tiny else 3)
    benchmark.extra_info["tokens"] = describe(chosen)
    benchmark.extra_info["times_transformers"] = round(
        speedup(samples, "fastbert", "transformers"), 2
    )
    benchmark.pedantic(steps["fastbert"], rounds=2)
