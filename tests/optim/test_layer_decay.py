"""Learning rates by depth."""

import pytest
import torch
import transformers

import fastbert
from fastbert.optim import layer_decay_groups
from fastbert.testing.inputs import small_bert_config


def _rates(model, groups):
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    return {name: rates.get(id(p)) for name, p in model.named_parameters()}


def test_rate_falls_towards_the_embeddings():
    model = fastbert.BertForSequenceClassification(small_bert_config(num_hidden_layers=2))
    groups = layer_decay_groups(model, lr=1.0, layer_decay=0.5, weight_decay=0.1)
    rates = _rates(model, groups)
    assert len(rates) == sum(len(g["params"]) for g in groups)
    assert rates["classifier.weight"] == (1.0, 0.1)
    assert rates["classifier.bias"] == (1.0, 0.0)
    assert rates["bert.pooler.dense.weight"] == (1.0, 0.1)
    assert rates["bert.encoder.layer.1.output.dense.weight"] == (0.5, 0.1)
    assert rates["bert.encoder.layer.1.output.LayerNorm.weight"] == (0.5, 0.0)
    assert rates["bert.encoder.layer.0.output.dense.weight"] == (0.25, 0.1)
    assert rates["bert.embeddings.word_embeddings.weight"] == (0.125, 0.1)
    assert rates["bert.embeddings.LayerNorm.bias"] == (0.125, 0.0)


def test_tied_and_frozen_parameters():
    model = transformers.BertForMaskedLM(small_bert_config(num_hidden_layers=1))
    model.bert.encoder.requires_grad_(False)
    groups = layer_decay_groups(model, lr=1.0, layer_decay=0.5, weight_decay=0.0)
    rates = _rates(model, groups)
    # The decoder is the table of embeddings and learns as that.
    assert rates["bert.embeddings.word_embeddings.weight"] == (0.25, 0.0)
    assert rates["cls.predictions.transform.dense.weight"] == (1.0, 0.0)
    assert rates["bert.encoder.layer.0.output.dense.weight"] is None


def test_a_scheduler_scales_every_group():
    model = fastbert.BertModel(small_bert_config())
    groups = layer_decay_groups(model, lr=1.0, layer_decay=0.5, weight_decay=0.0)
    before = [g["lr"] for g in groups]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert scheduler.get_last_lr() == [0.1 * lr for lr in before]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"lr": -1}, "lr must be"), ({"layer_decay": 0}, "layer_decay"), ({"layer_decay": 2}, "1")],
)
def test_refusals(arguments, message):
    model = fastbert.BertModel(small_bert_config())
    given = {"lr": 1.0, "layer_decay": 0.5, "weight_decay": 0.0} | arguments
    with pytest.raises(ValueError, match=message):
        layer_decay_groups(model, **given)


def test_a_model_without_layers_is_refused():
    model = fastbert.BertModel(small_bert_config(num_hidden_layers=0))
    with pytest.raises(ValueError, match="no list of layers"):
        layer_decay_groups(model, lr=1.0, layer_decay=0.5, weight_decay=0.0)
