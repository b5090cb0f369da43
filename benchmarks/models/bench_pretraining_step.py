"""A whole pretraining step, bf16 autocast, dropout 0.1: data, forward, backward, clipping, AdamW.

fastbert's stream of masked, packed batches into its step, with and without the last layer's subset,
against transformers' model and collator with torch's fused AdamW, on the same sequences of real
text: `--texts FILE_OR_FOLDER ...`, or what the installed packages say.
"""

from itertools import islice

import pytest
import torch

from fastbert.testing.models import assert_packed

from ..compare import check_training
from ..harness import interleaved, speedup
from ..shapes import BASE
from ..texts import paragraphs
from .pretraining import (
    collator,
    features_of,
    full_and_ragged,
    padded,
    step_of,
    stream,
    tokens_of,
)
from .twins import twins

TINY_SIZE = {**BASE, "hidden_size": 24, "num_hidden_layers": 2}
# Sequences of a batch.
BATCHES = {"full": 8, "ragged": 32}


@pytest.fixture(scope="module")
def text(request, tmp_path_factory):
    """The corpora and their tokenizer."""
    is_tiny = request.config.getoption("--tiny")
    found = paragraphs(request.config.getoption("--texts"), at_most=1 << (16 if is_tiny else 21))
    folder = tmp_path_factory.mktemp("text")
    return full_and_ragged(found, folder, 500 if is_tiny else BASE["vocab_size"])


@pytest.mark.parametrize("kind", BATCHES)
def test_pretraining_step(benchmark, tiny, text, kind):
    corpora, tokenizer = text
    rounds = 1 if tiny else 5
    tokens = tokens_of(corpora[kind], tokenizer, 2 if tiny else BATCHES[kind])

    def batches(**options):
        return stream(corpora[kind], tokenizer, tokens, cross_documents=kind == "full", **options)

    models = twins("BertForMaskedLM", TINY_SIZE if tiny else BASE)
    first = next(batches()).inputs
    check_training(models, padded(first, tokenizer.pad_token_id), 1e-5)

    subset = type(models["fastbert"])(models["fastbert"].config)
    subset.load_state_dict(models["fastbert"].state_dict())
    functions, taken = {}, list(islice(batches(), rounds + 1))
    for name, model, options in (
        ("fastbert", models["fastbert"], {}),
        ("fastbert, last layer's subset", subset, {"last_layer_subset": True}),
    ):
        functions[name] = _ours(model, batches(**options))
    functions["transformers"] = _theirs(models["transformers"], taken, tokenizer)
    with assert_packed():
        samples = interleaved(functions, rounds)

    num_tokens = sum(batch.num_tokens for batch in taken) / len(taken)
    sequences = sum(len(batch.lengths) for batch in taken) / len(taken)
    benchmark.extra_info["real_tokens_a_step"] = round(num_tokens)
    benchmark.extra_info["share_of_padding"] = round(1 - num_tokens / (sequences * 128), 2)
    for name in functions:
        benchmark.extra_info[f"{name}: times transformers"] = round(
            speedup(samples, name, "transformers"), 2
        )
    benchmark.pedantic(functions["fastbert"], rounds=2)


def _ours(model, batches):
    step, _ = step_of("fastbert", model, torch.bfloat16)
    return lambda: step(next(batches).inputs)


def _theirs(model, taken, tokenizer):
    """On the sequences of our batches, which the collator pads and masks anew."""
    step, _ = step_of("transformers", model, torch.bfloat16)
    collate = collator(tokenizer)
    features = iter([features_of(batch.inputs) for batch in taken])
    return lambda: step(collate(next(features)))
