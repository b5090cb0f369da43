"""Forward of ModernBERT-base, bf16 and fp32: fastbert against transformers' sdpa."""

import pytest
import torch

from ..shapes import DENSE_4X2048, MODERNBERT, RAGGED_32X128, TINY
from .twins import check_equal, forwards, padded, time_both, twins

DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 3e-2)}
BATCHES = {"ragged-32x128": RAGGED_32X128, "dense-4x2048": DENSE_4X2048}
TINY_SIZE = {**MODERNBERT, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 36}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_modernbert(benchmark, tiny, batch, dtype):
    kind, tolerance = DTYPES[dtype]
    chosen = TINY if tiny else BATCHES[batch]
    # In fp32 the long batch takes transformers most of a minute at 22 layers.
    layers = {} if tiny or dtype == "bf16" else {"num_hidden_layers": 4}
    settings = {**(TINY_SIZE if tiny else MODERNBERT), **layers}
    models = twins("ModernBertModel", settings, kind)
    inputs = padded(chosen, settings["vocab_size"])
    check_equal(models, inputs, tolerance, "modernbert_model")

    benchmark.extra_info["layers"] = settings["num_hidden_layers"]
    time_both(benchmark, forwards(models, inputs), chosen, 1 if tiny else 3)
