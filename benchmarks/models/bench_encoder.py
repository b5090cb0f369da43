"""Forward of BERT-base and MiniLM on padded batches: fastbert against transformers' sdpa."""

import pytest
import torch

from ..shapes import BASE, BATCHES, MINILM, TINY
from .twins import check_equal, forwards, padded, time_both, twins

DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 3e-2)}
SIZES = {"base": BASE, "minilm": MINILM}
TINY_SIZE = {**MINILM, "hidden_size": 24, "num_hidden_layers": 1, "vocab_size": 99}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_encoder(benchmark, tiny, size, batch, dtype):
    kind, tolerance = DTYPES[dtype]
    settings = TINY_SIZE if tiny else SIZES[size]
    chosen = TINY if tiny else BATCHES[batch]
    models = twins("BertModel", settings, kind)
    inputs = padded(chosen, settings["vocab_size"])
    check_equal(models, inputs, tolerance)

    time_both(benchmark, forwards(models, inputs), chosen, 1 if tiny else 3)
