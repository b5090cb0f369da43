"""The last layer computed for some rows: the same losses and gradients as for all."""

import pytest
import torch

from fastbert import encoder
from fastbert.padding import pack
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed, gradients, model_pair
from fastbert.train.building import checkpoint_activations

CAPACITY = {"num_tokens": 40, "num_sequences": 5, "num_labels": 12}
LENGTHS = (9, 1, 14, 4)


def _batch(vocab_size: int, pairs: bool = False) -> dict:
    generator = torch.Generator().manual_seed(7)
    features = []
    for length in LENGTHS:
        ids = torch.randint(5, vocab_size, (length,), generator=generator)
        chosen = torch.rand(length, generator=generator) < 0.3
        features.append({"input_ids": ids, "labels": ids.where(chosen, -100)})
        if pairs:
            features[-1]["next_sentence_label"] = length % 2
    return pack(features, **CAPACITY, last_layer_subset=True)


def _model(name: str, dropout: float):
    config = small_bert_config(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_hidden_layers=2
    )
    model, _ = model_pair(name, config)
    return model.train()


def _loss_and_gradients(model, batch: dict, rng_state=None):
    model.zero_grad(set_to_none=True)
    with assert_packed():
        loss = model(**batch, rng_state=rng_state).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_loss_and_gradients_of_all_rows(name, checkpointing):
    """To the rounding of fp32: sums over rows are taken in another order."""
    model = _model(name, 0.0)
    if checkpointing:
        checkpoint_activations(model)
    batch = _batch(model.config.vocab_size, name == "BertForPreTraining")
    loss, actual = _loss_and_gradients(model, batch)
    del batch["last_layer_rows"]
    expected_loss, expected = _loss_and_gradients(model, batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert actual.keys() == expected.keys()
    for parameter, gradient in expected.items():
        if gradient is None:
            assert actual[parameter] is None
        else:
            assert (actual[parameter] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, parameter


def test_rows_that_are_not_computed_are_zero():
    model = _model("BertForMaskedLM", 0.0)
    batch = _batch(model.config.vocab_size)
    rows, labels = batch["last_layer_rows"], batch.pop("labels")
    del batch["label_rows"]
    assert set(labels[0].ne(-100).nonzero().flatten().tolist()) <= set(rows.tolist())
    part = model.bert(**batch).last_hidden_state[0]
    del batch["last_layer_rows"]
    whole = model.bert(**batch).last_hidden_state[0]
    real = rows[batch["attention_mask"][0, rows] != 0]
    torch.testing.assert_close(part[real], whole[real], rtol=1e-5, atol=1e-6)
    others = torch.ones(len(part), dtype=torch.bool)
    others[rows] = False
    assert others.any() and not part[others].any() and whole[others].any()


def test_attention_of_the_last_layer_has_those_queries(monkeypatch):
    """Of two layers one goes through `attention` with queries of its own, R of T."""
    model = _model("BertForMaskedLM", 0.0)
    batch = _batch(model.config.vocab_size)
    seen, attention = [], encoder.attention

    def counted(q, k, *args, **options):
        seen.append((len(q), len(k)))
        return attention(q, k, *args, **options)

    monkeypatch.setattr(encoder, "attention", counted)
    model(**batch)
    assert seen == [(len(batch["last_layer_rows"]), CAPACITY["num_tokens"])]


def test_dropout_repeats_and_is_unchanged_below():
    """The layers below drop what they drop without it; the last one counts the rows it has."""
    model = _model("BertForMaskedLM", 0.2)
    batch = _batch(model.config.vocab_size)
    state = torch.tensor([5, 3])
    loss, first = _loss_and_gradients(model, batch, state)
    again, second = _loss_and_gradients(model, batch, state)
    assert torch.equal(loss, again)
    assert all(torch.equal(first[n], second[n]) for n in first if first[n] is not None)
    other, _ = _loss_and_gradients(model, batch, torch.tensor([6, 3]))
    assert not torch.equal(loss, other)
    part = model(**batch, rng_state=state, output_hidden_states=True).hidden_states
    del batch["last_layer_rows"]
    whole = model(**batch, rng_state=state, output_hidden_states=True).hidden_states
    assert len(part) == len(whole) == 3
    assert all(torch.equal(a, b) for a, b in zip(part[:-1], whole[:-1], strict=True))


def test_transformers_path_computes_all():
    """Where our layers cannot run, the argument is no hindrance."""
    model = _model("BertForMaskedLM", 0.0)
    batch = _batch(model.config.vocab_size)
    with assert_packed():
        loss = model(**batch).loss
    hook = model.bert.encoder.register_forward_hook(lambda *_: None)
    padded = model(**batch).loss
    hook.remove()
    torch.testing.assert_close(padded, loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.flip(0), "must rise within 0 to 39"),
        (lambda rows: torch.cat([rows, rows[-1:] + 40]), "must rise within 0 to 39"),
        (lambda rows: rows - 1, "must rise within 0 to 39"),
        (lambda rows: rows.int(), "one-dimensional int64"),
    ],
)
def test_rows_that_are_none_are_refused(change, words):
    model = _model("BertForMaskedLM", 0.0).bert
    batch = _batch(model.config.vocab_size)
    for name in ("labels", "label_rows"):
        del batch[name]
    batch["last_layer_rows"] = change(batch["last_layer_rows"])
    with pytest.raises(ValueError, match=words):
        model(**batch)


def test_labels_beside_the_rows_are_refused():
    model = _model("BertForMaskedLM", 0.0)
    batch = _batch(model.config.vocab_size)
    batch["last_layer_rows"] = batch["last_layer_rows"][::3].contiguous()
    with pytest.raises(ValueError, match="last_layer_rows must list every labelled row"):
        model(**batch)


def test_padded_input_is_refused():
    model = _model("BertForMaskedLM", 0.0)
    with pytest.raises(ValueError, match="last_layer_rows are rows of packed input"):
        model(torch.full((1, 4), 7), last_layer_rows=torch.arange(2))
