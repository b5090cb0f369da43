"""The first DeBERTa against transformers on the same weights: what differs from the second."""

import copy

import pytest
import torch

from fastbert.dispatch import counters
from fastbert.ops.philox import row_keep_mask, score_keep_mask
from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing.compare import assert_close_to_oracle, compare_gradients
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import (
    DEBERTA_HEADS,
    assert_packed,
    gradients,
    head_inputs,
    model_pair,
)

LENGTHS = (19, 1, 16, 5)
COUNTER = "deberta_model"


def _config(**overrides):
    nothing = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    size = {"num_hidden_layers": 3, "hidden_size": 48}
    return small_config("Deberta", **{**size, **nothing, **overrides})


def _batch(name, config, lengths=LENGTHS):
    return head_inputs(name, padded_batch(lengths, config.vocab_size, seed=1), config)


def _fields(outputs, mask):
    """Named float outputs at real positions (everything, where an output has no positions)."""
    named = {}
    for key, value in outputs.items():
        if torch.is_tensor(value):
            per_token = value.dim() > 1 and value.shape[:2] == mask.shape
            named[key] = value[mask != 0] if per_token else value
    return named


def _check(ours, theirs, inputs, *, packed=True):
    mask = inputs["attention_mask"]
    oracle_model = copy.deepcopy(theirs).double()
    if packed:
        with assert_packed(COUNTER), assert_ran("disentangled_attention_fwd"):
            actual = ours(**inputs)
    else:
        before = counters()
        actual = ours(**inputs)
        assert (counters() - before)[COUNTER, "padded"] == 1
    same, oracle = theirs(**inputs), oracle_model(**inputs)
    expected, plain = _fields(oracle, mask), _fields(same, mask)
    assert expected.keys() == _fields(actual, mask).keys()
    for name, value in _fields(actual, mask).items():
        value = value.to(plain[name].dtype) if name == "loss" else value
        assert_close_to_oracle(value, expected[name], plain[name], name, op="model")
    if actual.get("loss") is None:
        return
    for outputs in (actual, same, oracle):
        outputs.loss.backward()
    compare_gradients(gradients(ours), gradients(oracle_model), gradients(theirs), op="model")


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

    class Rows(torch.nn.Module):
        def __init__(self, site):
            super().__init__()
            self.site = site

        def forward(self, x):
            rows, columns = x[..., 0].numel(), x.shape[-1]
            keep = row_keep_mask(rng_state, rows, columns, dropout_p=p, site=self.site)
            return torch.where(keep.view_as(x), x, 0) / (1 - p)

    class Scores(Rows):
        def forward(self, x):
            shape = (torch.arange(size), x.shape[1], length, length)
            keep = score_keep_mask(rng_state, *shape, dropout_p=p, site=self.site)
            return torch.where(keep, x, 0) / (1 - p)

    theirs.deberta.embeddings.dropout = Rows(SITE_EMBEDDING)
    for index, layer in enumerate(theirs.deberta.encoder.layer):
        layer.attention.self.dropout = Scores(8 * index)
        layer.attention.self.pos_dropout = Rows(8 * index + 4)
        layer.attention.output.dropout = Rows(8 * index + 1)
        layer.output.dropout = Rows(8 * index + 2)
    with assert_packed(COUNTER):
        mine = ours(**inputs, rng_state=rng_state)
    expected = theirs(**inputs)
    torch.testing.assert_close(mine.loss, expected.loss, rtol=1e-5, atol=1e-5)
    mine.loss.backward()
    expected.loss.backward()
    compare_gradients(
        gradients(ours),
        {k: v.double() for k, v in gradients(theirs).items()},
        gradients(theirs),
        op="model",
    )
