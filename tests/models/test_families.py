"""RoBERTa, XLM-R, CamemBERT against transformers on the same weights: outputs, loss, gradients,
dropout, inputs, checkpoints.

The oracle is transformers in float64; our error may be twice that of transformers in the dtype
under test (fastbert.testing.parity).
"""

import functools
from dataclasses import dataclass

import pytest
import torch
import transformers

import fastbert
from fastbert.padding import pack
from fastbert.reference.philox import (
    PLACE_ATTENTION_OUTPUT,
    PLACE_FFN_OUTPUT,
    SITE_EMBEDDING,
    layer_site,
)
from fastbert.testing.compare import compare_gradients
from fastbert.testing.dropout import StreamDropout, stream_attention_dropout
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import (
    FAMILIES,
    assert_packed,
    family_of,
    gradients,
    head_inputs,
    model_pair,
)
from fastbert.testing.parity import check_parity

LENGTHS = (9, 1, 16, 5)
COUNTERS = {
    "Roberta": "roberta_model",
    "XLMRoberta": "xlm_roberta_model",
    "Camembert": "camembert_model",
}
# What the others of a kind do not repeat.
LEADING = ("Roberta",)
HEADS = [family + task for family in COUNTERS for task in FAMILIES[family]]


def _pair(name, *, train=False, seed=0, **options):
    """Our model and transformers', without dropout, and the configuration."""
    overrides = options.pop("overrides", {})
    config = small_config(family_of(name), **overrides)
    pair = model_pair(name, config, seed=seed, **options)
    for model in pair:
        for module in model.train(train).modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return *pair, config


def _batch(name, config, lengths=LENGTHS, side="right", seed=1):
    batch = padded_batch(
        lengths, config.vocab_size, side=side, seed=seed, pad_token_id=config.pad_token_id
    )
    return head_inputs(name, batch, config)


def _check(ours, theirs, inputs, **options):
    name = type(theirs).__name__
    ops = ["embed_layer_norm_fwd", "attention_fwd", "add_layer_norm_fwd"]
    check_parity(ours, theirs, inputs, counter=COUNTERS[family_of(name)], ops=ops, **options)


@pytest.mark.parametrize("name", HEADS)
def test_heads_match_in_training(name):
    ours, theirs, config = _pair(name, train=True)
    _check(ours, theirs, _batch(name, config))


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("side", ["left", "holes"])
def test_padding_elsewhere(family, task, side):
    """Position 0 is read where it is padding too."""
    ours, theirs, config = _pair(family + task, train=True)
    _check(ours, theirs, _batch(family + task, config, side=side))


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForQuestionAnswering"])
def test_no_padding(family, task):
    ours, theirs, config = _pair(family + task)
    inputs = _batch(family + task, config, lengths=(16, 16))
    _check(ours, theirs, inputs)
    del inputs["attention_mask"]
    with assert_packed(COUNTERS[family]), torch.no_grad():
        actual, expected = ours(**inputs), theirs(**inputs)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_half_precision(family, task, how):
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    ours, theirs, config = _pair(family + task, train=True, dtype=dtype)
    autocast = torch.bfloat16 if how == "autocast" else None
    _check(ours, theirs, _batch(family + task, config), autocast=autocast)
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {dtype}
