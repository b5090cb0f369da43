"""A masked-LM training step, bf16 autocast, dropout 0.1: fastbert against transformers' sdpa."""

import pytest

from ..harness import interleaved, speedup
from ..shapes import BASE, DENSE_8X128, RAGGED_32X128, TINY, describe
from .twins import check_equal, masked_lm_steps, padded, twins

BATCHES = {"dense-8x128": DENSE_8X128, "ragged-32x128": RAGGED_32X128}
TINY_SIZE = {**BASE, "hidden_size": 24, "num_hidden_layers": 1, "vocab_size": 99}


@pytest.mark.parametrize("batch", BATCHES)
def test_mlm_step(benchmark, tiny, batch):
    settings = TINY_SIZE if tiny else BASE
    chosen = TINY if tiny else BATCHES[batch]
    models = twins("BertForMaskedLM", settings)
    inputs = padded(chosen, settings["vocab_size"])
    check_equal(models, inputs, 1e-5)
    steps = masked_lm_steps(models, inputs)
    samples = interleaved(steps, 1 if tiny else 3)
    benchmark.extra_info["tokens"] = describe(chosen)
    benchmark.extra_info["times_transformers"] = round(
        speedup(samples, "fastbert", "transformers"), 2
    )
    benchmark.pedantic(steps["fastbert"], rounds=2)
