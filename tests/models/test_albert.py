"""What ALBERT has to itself: layers used many times, gelu_new, sentence order."""

from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from fastbert.testing.compare import relative_l2
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair
from fastbert.testing.parity import check_parity

LENGTHS = (9, 1, 16, 5)
COUNTER = "albert_model"
ROOT = Path(__file__).resolve().parents[2]


def _inputs(name, seed=1):
    return head_inputs(name, padded_batch(LENGTHS, 99, seed=seed), small_config("Albert"))


@pytest.mark.parametrize(
    ("layers", "groups", "inner"), [(4, 1, 1), (4, 2, 1), (5, 2, 1), (3, 1, 2), (4, 3, 2)]
)
def test_groups_and_inner_groups(layers, groups, inner):
    """Also where the groups do not divide the layers."""
    config = small_config(
        "Albert",
        num_hidden_layers=layers,
        num_hidden_groups=groups,
        inner_group_num=inner,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ours, theirs = model_pair("AlbertForMaskedLM", config)
    ours.train(), theirs.train()
    inputs = _inputs("AlbertForMaskedLM")
    check_parity(ours, theirs, inputs, counter=COUNTER)
    with torch.no_grad():
        states = [m(**inputs, output_hidden_states=True).hidden_states for m in (ours, theirs)]
    assert len(states[0]) == len(states[1]) == layers * inner + 1


def test_weights_of_a_shared_layer_are_packed_once():
    """As many copies as a model of one place keeps, and the same tensors at every place."""
    counts = []
    for layers in (1, 6):
        ours, _ = model_pair("AlbertModel", small_config("Albert", num_hidden_layers=layers))
        inputs = _inputs("AlbertModel")
        with torch.no_grad(), assert_packed(COUNTER):
            ours(**inputs)
        (layer,) = ours.encoder.albert_layer_groups[0].albert_layers
        counts.append(len(layer.weight_cache))
        assert len(ours.weight_cache) >= 1
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations(activation):
    """`gelu_new` is the tanh form, which differs from the exact one by up to 5e-4."""
    config = small_config("Albert", hidden_act=activation, num_hidden_layers=3)
    ours, theirs = model_pair("AlbertForMaskedLM", config)
    check_parity(ours, theirs, _inputs("AlbertForMaskedLM"), counter=COUNTER)
    assert (ours.albert.encoder.albert_layer_groups[0].albert_layers[0].spec(0).approximate) == {
        "gelu_new": "tanh",
        "gelu": "none",
        "gelu_pytorch_tanh": "tanh",
        "relu": None,
    }[activation]


def test_pretraining_logits_are_lazy_and_right():
    ours, theirs = model_pair("AlbertForPreTraining", small_config("Albert"))
    for module in (*ours.modules(), *theirs.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = _inputs("AlbertForPreTraining")
    actual, expected = ours.train()(**inputs), theirs.train()(**inputs)
    assert isinstance(actual, transformers.models.albert.modeling_albert.AlbertForPreTrainingOutput)
    assert type(dict(actual.items())["prediction_logits"]).__name__ == "LazyLogits"
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(
        actual.prediction_logits[real], expected.prediction_logits[real], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(actual.sop_logits, expected.sop_logits, rtol=0, atol=1e-5)
    one = ours(**{k: v for k, v in inputs.items() if k != "sentence_order_label"})
    assert one.loss is None


def test_real_checkpoint():
    """12 places, 256 features, trained on chemical reactions (rxnmapper)."""
    folder = ROOT / "build" / "models" / "rxnmapper" / "models" / "transformers"
    found = sorted(folder.rglob("config.json"))
    if not found:
        pytest.skip("no rxnmapper; pip install --no-deps --target build/models rxnmapper==0.4.3")
    ours = fastbert.AlbertForMaskedLM.from_pretrained(found[0].parent).eval()
    theirs = transformers.AlbertForMaskedLM.from_pretrained(found[0].parent).eval()
    batch = padded_batch((40, 7, 23), ours.config.vocab_size, seed=3)
    with torch.no_grad(), assert_packed(COUNTER):
        actual, expected = ours(**batch).logits, theirs(**batch).logits
    real = batch["attention_mask"] != 0
    assert relative_l2(actual[real], expected[real]) <= 2e-6
