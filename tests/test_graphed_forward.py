"""`GraphedForward`: batches of any lengths in fixed shapes, the same numbers, nothing read."""

import pytest
import torch

import fastbert
from fastbert import GraphedForward
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import model_pair

BATCHES = ((9, 1, 14), (5,), (20, 20), (3, 3, 3, 2))


def _features(inputs, lengths):
    names = ("input_ids", "token_type_ids")
    return [{n: inputs[n][i, :length] for n in names} for i, length in enumerate(lengths)]


def test_forward_gives_the_real_tokens_in_order():
    model, _ = model_pair("BertModel", small_bert_config())
    forward = GraphedForward(model, token_buckets=(40, 16, 24), num_sequences=4)
    for lengths in BATCHES:
        inputs = padded_batch(lengths, 99, seed=sum(lengths))
        outputs = forward(_features(inputs, lengths))
        with torch.no_grad():
            expected = model(**inputs)
        real = inputs["attention_mask"] != 0
        assert torch.equal(outputs.last_hidden_state[0], expected.last_hidden_state[real])
        assert torch.equal(outputs.pooler_output, expected.pooler_output)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_forward_of_heads(name):
    model, theirs = model_pair(name, small_bert_config())
    forward = GraphedForward(model, token_buckets=(32,), num_sequences=4, max_seqlen=16)
    inputs = padded_batch((9, 1, 14), 99, seed=1)
    logits = forward(_features(inputs, (9, 1, 14))).logits
    with torch.no_grad():
        expected = theirs(**inputs).logits
    if name == "BertForTokenClassification":
        logits, expected = logits[0], expected[inputs["attention_mask"] != 0]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_forward_outputs_outlive_the_next_call():
    model, _ = model_pair("BertModel", small_bert_config())
    forward = GraphedForward(model, token_buckets=(32,), num_sequences=4)
    first = forward([{"input_ids": [5, 6, 7]}])
    kept = first.last_hidden_state.clone()
    forward([{"input_ids": [8, 9, 10, 11]}])
    assert torch.equal(first.last_hidden_state, kept)


def test_forward_refuses():
    model = fastbert.BertModel(small_bert_config())
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        GraphedForward(model.train(), token_buckets=(8,), num_sequences=1)
    model.eval()
    with pytest.raises(ValueError, match="token_buckets"):
        GraphedForward(model, token_buckets=(), num_sequences=1)
    with pytest.raises(ValueError, match="needs a model on a GPU"):
        GraphedForward(model, token_buckets=(8,), num_sequences=1, graph=True)
    forward = GraphedForward(model, token_buckets=(8, 4), num_sequences=1)
    with pytest.raises(ValueError, match="9 tokens, the largest of token_buckets is 8"):
        forward([{"input_ids": [1] * 9}])
