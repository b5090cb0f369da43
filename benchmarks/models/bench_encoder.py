"""Forward of BERT-base and MiniLM on padded batches: fastbert against transformers' sdpa."""

import pytest
import torch

from ..harness import interleaved, speedup
from ..shapes import BASE, BATCHES, MINILM, TINY, describe
from .twins import check_equal, padded, twins

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

    def forward(model):
        with torch.no_grad():
            return model(**inputs)

    samples = interleaved(
        {name: (lambda m=model: forward(m)) for name, model in models.items()}, 1 if tiny else 3
    )
    benchmark.extra_info["tokens"] = describe(chosen)
    benchmark.extra_info["times_transformers"] = round(
        speedup(samples, "fastbert", "transformers"), 2
    )
    benchmark.pedantic(lambda: forward(models["fastbert"]), rounds=3)
