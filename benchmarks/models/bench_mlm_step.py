"""A masked-LM training step, dropout 0.1, fp32 and bf16 autocast: fastbert against transformers'
sdpa."""

import pytest

from fastbert.testing.models import assert_packed

from ..compare import check_training
from ..shapes import BASE, DENSE_8X128, RAGGED_32X128, TINY
from .twins import masked_lm_steps, padded, time_both, twins, with_labels

BATCHES = {"dense-8x128": DENSE_8X128, "ragged-32x128": RAGGED_32X128}
TINY_SIZE = {**BASE, "hidden_size": 24, "num_hidden_layers": 1, "vocab_size": 99}
# In fp32 a ragged step of transformers takes a quarter of a minute at 12 layers.
LAYERS = {"fp32": 4, "bf16": 12}


@pytest.mark.parametrize("dtype", LAYERS)
@pytest.mark.parametrize("batch", BATCHES)
def test_mlm_step(benchmark, tiny, batch, dtype):
    settings = TINY_SIZE if tiny else {**BASE, "num_hidden_layers": LAYERS[dtype]}
    chosen = TINY if tiny else BATCHES[batch]
    models = twins("BertForMaskedLM", settings)
    inputs = padded(chosen, settings["vocab_size"])
    check_training(models, with_labels(inputs), 1e-5)
    steps = masked_lm_steps(models, inputs, autocast=dtype == "bf16")
    benchmark.extra_info["layers"] = settings["num_hidden_layers"]
    with assert_packed():
        time_both(benchmark, steps, chosen, 1 if tiny else 3, repeats=2)
