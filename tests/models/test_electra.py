"""What ELECTRA has to itself: the discriminator's loss, and a summary of the sequence."""

import pytest
import torch

from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import assert_packed, gradients, head_inputs, model_pair
from fastbert.testing.parity import check_parity

LENGTHS = (9, 1, 16, 5)
COUNTER = "electra_model"
DISCRIMINATOR = "ElectraForPreTraining"


def _inputs(name, side="right"):
    batch = padded_batch(LENGTHS, 99, side=side, seed=1)
    return head_inputs(name, batch, small_config("Electra"))


@pytest.fixture
def pair():
    config = small_config("Electra", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours, theirs = model_pair(DISCRIMINATOR, config)
    return ours.train(), theirs.train()


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_discriminator_is_fused_and_ignores_labels_of_padding(pair, side):
    inputs = _inputs(DISCRIMINATOR, side)
    with assert_ran("linear_gelu_fwd"):
        loss = pair[0](**inputs).loss
    padding = inputs["attention_mask"] == 0
    other = {**inputs, "labels": inputs["labels"].masked_fill(padding, -100)}
    assert torch.equal(pair[0](**other).loss, loss)
    pair[0].zero_grad()
    check_parity(*pair, other, counter=COUNTER)


def test_discriminator_without_a_mask(pair):
    inputs = _inputs(DISCRIMINATOR)
    del inputs["attention_mask"]
    results = [model(**inputs) for model in pair]
    for result in results:
        result.loss.backward()
    torch.testing.assert_close(results[0].loss, results[1].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0].logits, results[1].logits, rtol=0, atol=1e-5)
    for name, gradient in gradients(pair[1]).items():
        torch.testing.assert_close(gradients(pair[0])[name], gradient, rtol=1e-3, atol=1e-5)


def _half_judged(labels, mask):
    return labels.masked_fill(torch.arange(labels.shape[1]) % 2 == 0, -100)


@pytest.mark.parametrize(
    "change",
    [
        lambda labels, mask: (labels, mask),
        lambda labels, mask: (labels, None),
        lambda labels, mask: (labels.bool(), mask),
        lambda labels, mask: (labels.float() / 2, mask.float()),
        lambda labels, mask: (labels, mask.bool()),
        # A number like any other there, and so it is here.
        lambda labels, mask: (_half_judged(labels, mask), mask),
        lambda labels, mask: (torch.full_like(labels, -100), mask),
        lambda labels, mask: (torch.full_like(labels, -100), None),
        # Attended to, but not judged.
        lambda labels, mask: (labels, mask.index_fill(1, torch.tensor([3]), 2) * mask),
    ],
)
def test_discriminator_labels_mean_what_transformers_takes_them_for(pair, change):
    """The loss and its gradient, whatever the labels hold; what counts is where the mask is 1."""
    inputs = _inputs(DISCRIMINATOR)
    labels, mask = change(inputs.pop("labels"), inputs.pop("attention_mask"))
    losses = [model(**inputs, labels=labels, attention_mask=mask).loss for model in pair]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    for name, gradient in gradients(pair[1]).items():
        ours = gradients(pair[0])[name]
        torch.testing.assert_close(ours, gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_discriminator_of_nothing_and_of_the_whole_step(pair):
    """An empty batch gives 0, and parts of a step add up to the step's mean."""
    inputs = _inputs(DISCRIMINATOR)
    real = inputs["attention_mask"] != 0
    inputs["labels"] = inputs["labels"].masked_fill(~real, -100)
    whole = pair[0](**inputs).loss
    parts = [{k: v[rows] for k, v in inputs.items()} for rows in (slice(0, 1), slice(1, 4))]
    summed = sum(pair[0](**part, num_items_in_batch=int(real.sum())).loss for part in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-6)
    inputs["attention_mask"] = torch.zeros_like(inputs["attention_mask"])
    loss = pair[0](**inputs).loss
    loss.backward()
    assert loss == 0
    assert not any(g.any() for g in gradients(pair[0]).values() if g is not None)


def test_discriminator_on_packed_rows(pair):
    """Texts end to end with idle rows behind them: the loss of the padded batch."""
    inputs = _inputs(DISCRIMINATOR)
    real = inputs["attention_mask"] != 0
    expected = pair[0](**inputs)
    count = int(real.sum())
    filled = {k: torch.nn.functional.pad(inputs[k][real], (0, 4))[None] for k in inputs}
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    with assert_packed(COUNTER):
        actual = pair[0](**filled, cu_seq_lens_q=starts)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.logits[0, :count], expected.logits[real], rtol=0, atol=1e-5)


def test_discriminator_of_another_activation():
    config = small_config("Electra", hidden_act="relu")
    ours, theirs = model_pair(DISCRIMINATOR, config)
    check_parity(ours, theirs, _inputs(DISCRIMINATOR), counter=COUNTER)


def test_discriminator_labels_of_another_shape_raise(pair):
    inputs = _inputs(DISCRIMINATOR)
    with pytest.raises(ValueError, match="labels must have shape"):
        pair[0](**{**inputs, "labels": inputs["labels"][:, 1:]})


@pytest.mark.parametrize("kind", ["first", "last", "mean"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_summaries_read_padding(kind, side):
    config = small_config("Electra", summary_type=kind)
    name = "ElectraForMultipleChoice"
    ours, theirs = model_pair(name, config)
    check_parity(ours, theirs, _inputs(name, side), counter=COUNTER)


def test_embeddings_as_wide_as_the_layers():
    config = small_config("Electra", embedding_size=64)
    ours, theirs = model_pair("ElectraForMaskedLM", config)
    assert not hasattr(ours.electra, "embeddings_project")
    check_parity(ours, theirs, _inputs("ElectraForMaskedLM"), counter=COUNTER)
