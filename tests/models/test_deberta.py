"""The first DeBERTa against transformers on the same weights: what differs from the second."""

import functools

import pytest
import torch

from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing.counters import assert_ran
from fastbert.testing.dropout import StreamDropout
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import (
    DEBERTA_HEADS,
    head_inputs,
    model_pair,
)
from fastbert.testing.parity import check_dropout_parity, check_parity

LENGTHS = (19, 1, 16, 5)
COUNTER = "deberta_model"


def _config(**overrides):
    nothing = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"num_hidden_layers": 3, "hidden_size": 48}
    return small_config("Deberta", **{**size, **nothing, **overrides})


def _batch(name, config, lengths=LENGTHS):
    return head_inputs(name, padded_batch(lengths, config.vocab_size, seed=1), config)


_check = functools.partial(check_parity, counter=COUNTER, ops=["disentangled_attention_fwd"])


@pytest.mark.parametrize("name", DEBERTA_HEADS)
def test_heads_match_in_training(name):
    config = _config()
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch(name, config), packed="Answering" not in name)


@pytest.mark.parametrize("name", ["DebertaModel", "DebertaForQuestionAnswering"])
def test_heads_match_in_eval_without_padding(name):
    config = _config()
    ours, theirs = model_pair(name, config)
    _check(ours, theirs, _batch(name, config, lengths=(19, 19)))


@pytest.mark.parametrize(
    ("overrides", "packed"),
    [
        ({"pos_att_type": ["c2p"]}, True),
        ({"pos_att_type": ["p2c"]}, True),
        ({"max_relative_positions": -1}, True),
        ({"relative_attention": False}, True),
        ({"position_biased_input": True, "legacy": False, "type_vocab_size": 0}, True),
        ({"talking_head": True}, False),
    ],
    ids=str,
)
def test_configurations(overrides, packed):
    config = _config(**overrides)
    ours, theirs = model_pair("DebertaForMaskedLM", config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch("DebertaForMaskedLM", config), packed=packed)


def test_half_precision():
    config = _config()
    ours, theirs = model_pair("DebertaForMaskedLM", config, dtype=torch.bfloat16)
    ours.train(), theirs.train()
    with assert_ran("add_layer_norm_fwd"):
        _check(ours, theirs, _batch("DebertaForMaskedLM", config))


def test_dropout_is_where_transformers_has_it():
    """As for the second version: transformers' own model with our masks."""
    p, size, length = 0.25, 3, 19
    config = _config(hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    ours, theirs = model_pair("DebertaForMaskedLM", config)
    ours.train(), theirs.train()
    inputs = _batch("DebertaForMaskedLM", config, lengths=(length,) * size)
    rng_state = torch.tensor([99, 3])

    theirs.deberta.embeddings.dropout = StreamDropout(rng_state, [SITE_EMBEDDING], p)
    for index, layer in enumerate(theirs.deberta.encoder.layer):
        layer.attention.self.pos_dropout = StreamDropout(rng_state, [8 * index + 4], p)
        layer.attention.output.dropout = StreamDropout(rng_state, [8 * index + 1], p)
        layer.output.dropout = StreamDropout(rng_state, [8 * index + 2], p)
    check_dropout_parity(ours, theirs, inputs, rng_state, counter=COUNTER)
