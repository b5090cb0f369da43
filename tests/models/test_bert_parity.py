"""Every output, loss and gradient against transformers on the same weights.

The oracle is transformers in float64; our error may be twice that of transformers in the dtype
under test (fastbert.testing.compare).
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import HEADS, assert_packed, head_inputs, model_pair
from fastbert.testing.parity import check_parity

LENGTHS = (9, 1, 16, 5)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("side", ["right", "left", "holes"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_match_in_training(name, side):
    config = small_bert_config(**NO_DROPOUT)
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    batch = padded_batch(LENGTHS, config.vocab_size, side=side, seed=5)
    check_parity(ours, theirs, head_inputs(name, batch, config))


@pytest.mark.parametrize("name", HEADS)
def test_heads_match_in_eval(name):
    config = small_bert_config()
    ours, theirs = model_pair(name, config)
    batch = padded_batch(LENGTHS, config.vocab_size, seed=6)
    check_parity(ours, theirs, head_inputs(name, batch, config))


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        {"hidden_size": 60, "num_attention_heads": 3, "intermediate_size": 77},
        {"hidden_size": 26, "num_attention_heads": 1, "intermediate_size": 5},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "relu"},
    ],
    ids=["base", "odd", "one-head", "gelu_new", "gelu_tanh", "relu"],
)
def test_widths_and_activations(overrides):
    config = small_bert_config(num_hidden_layers=2, **NO_DROPOUT, **overrides)
    ours, theirs = model_pair("BertForMaskedLM", config)
    ours.train(), theirs.train()
    batch = padded_batch(LENGTHS, config.vocab_size, seed=7)
    check_parity(ours, theirs, head_inputs("BertForMaskedLM", batch, config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_half_precision(name, dtype):
    config = small_bert_config(**NO_DROPOUT)
    ours, theirs = model_pair(name, config, dtype=dtype)
    ours.train(), theirs.train()
    batch = padded_batch(LENGTHS, config.vocab_size, seed=8)
    inputs = head_inputs(name, batch, config)
    check_parity(ours, theirs, inputs)
    with torch.no_grad():
        mine, reference = ours.bert(inputs["input_ids"]), theirs.bert(inputs["input_ids"])
    assert mine.last_hidden_state.dtype == reference.last_hidden_state.dtype == dtype


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_autocast(name):
    config = small_bert_config(**NO_DROPOUT)
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    batch = padded_batch(LENGTHS, config.vocab_size, seed=9)
    inputs = head_inputs(name, batch, config)
    check_parity(ours, theirs, inputs, autocast=torch.bfloat16)
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {torch.float32}
    for model in (ours, theirs):
        model.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mine, reference = (model.eval()(**inputs) for model in (ours, theirs))
    assert [mine[k].dtype for k in reference if k != "loss"] == [
        reference[k].dtype for k in reference if k != "loss"
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    extra=st.integers(0, 9),
    side=st.sampled_from(["right", "left", "holes"]),
    seed=st.integers(0, 10**6),
)
def test_any_shape(lengths, extra, side, seed):
    config = small_bert_config(num_hidden_layers=1, **NO_DROPOUT)
    ours, theirs = model_pair("BertForMaskedLM", config, seed=seed)
    batch = padded_batch(lengths, config.vocab_size, side=side, seed=seed)
    padding = torch.zeros(len(lengths), extra, dtype=torch.long)
    batch = {k: torch.cat([v, padding], 1) for k, v in batch.items()}
    check_parity(ours, theirs, head_inputs("BertForMaskedLM", batch, config, seed))


def test_real_checkpoint(real_checkpoint):
    """The 6-layer sentence encoder, fp32: at most 2e-6 relative L2 at real tokens."""
    import transformers

    import fastbert

    texts = [
        "The cat sat on the mat.",
        "Padding is never computed, only put back at the end of the model.",
        "Yes.",
        "A sentence of ordinary length, with commas, numbers such as 42, and a (parenthesis).",
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_checkpoint)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    ours = fastbert.BertModel.from_pretrained(real_checkpoint).eval()
    theirs = transformers.BertModel.from_pretrained(real_checkpoint, attn_implementation="eager")
    with torch.no_grad():
        with assert_packed():
            mine = ours(**inputs)
        reference = theirs.eval()(**inputs)
    real = inputs["attention_mask"] != 0
    a, b = (o.last_hidden_state[real].double() for o in (mine, reference))
    assert ((a - b).norm() / b.norm()).item() <= 2e-6
