"""What DistilBERT has to itself: no token types, sinusoidal positions."""

import pytest
import torch

from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair
from fastbert.testing.parity import check_parity

LENGTHS = (9, 1, 16, 5)
COUNTER = "distilbert_model"


@pytest.fixture
def inputs():
    return head_inputs("DistilBertModel", padded_batch(LENGTHS, 99, seed=1), None)


def test_token_types_are_ignored_as_in_transformers(inputs):
    ours, theirs = model_pair("DistilBertModel", small_config("DistilBert"))
    types = torch.ones_like(inputs["input_ids"])
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed(COUNTER):
        actual = ours(**inputs, token_type_ids=types).last_hidden_state
        assert torch.equal(actual, ours(**inputs).last_hidden_state)
    expected = theirs(**inputs, token_type_ids=types).last_hidden_state
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)


def test_sinusoidal_positions_stay_without_gradient():
    config = small_config("DistilBert", sinusoidal_pos_embds=True)
    ours, theirs = model_pair("DistilBertForMaskedLM", config)
    for model in (ours, theirs):
        model.distilbert.embeddings.position_embeddings.requires_grad_(False)
    batch = head_inputs("DistilBertForMaskedLM", padded_batch(LENGTHS, 99, seed=1), config)
    check_parity(ours, theirs, batch, counter=COUNTER)
    assert ours.distilbert.embeddings.position_embeddings.weight.grad is None


def test_attention_weights_come_from_transformers(inputs):
    """Its own forward takes no token types, and so must not be given any."""
    ours, theirs = model_pair("DistilBertModel", small_config("DistilBert"))
    with torch.no_grad():
        actual = ours(**inputs, output_attentions=True)
        expected = theirs(**inputs, output_attentions=True)
    assert len(actual.attentions) == 2
    torch.testing.assert_close(actual.attentions[0], expected.attentions[0], rtol=0, atol=1e-5)
