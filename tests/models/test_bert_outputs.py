"""Containers, captured states, attention weights, and logits that wait to be read."""

import copy
import pickle

import pytest
import torch
import transformers

from fastbert.models.outputs import LazyLogits
from fastbert.testing.compare import assert_close_to_oracle
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import HEADS, assert_packed, head_inputs, model_pair

LENGTHS = (7, 1, 12, 4)
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _setup(name="BertForMaskedLM", **overrides):
    config = small_bert_config(**OFF, **overrides)
    ours, theirs = model_pair(name, config)
    batch = padded_batch(LENGTHS, config.vocab_size, seed=1)
    return ours, theirs, head_inputs(name, batch, config)


@pytest.mark.parametrize("name", ["BertModel", *HEADS])
def test_outputs_have_transformers_fields_and_order(name):
    ours, theirs, inputs = _setup(name)
    for options in ({}, {"return_dict": False}, {"output_hidden_states": True}):
        with torch.no_grad():
            mine, reference = ours(**inputs, **options), theirs(**inputs, **options)
        if options.get("return_dict") is False:
            assert isinstance(mine, tuple)
            assert [v.shape for v in mine] == [v.shape for v in reference]
            continue
        assert isinstance(mine, type(reference))
        assert list(mine.keys()) == list(reference.keys())
        for key, value in reference.items():
            if torch.is_tensor(value):
                assert (mine[key].shape, mine[key].dtype) == (value.shape, value.dtype), key


def test_outputs_hidden_states_are_padded_again():
    ours, theirs, inputs = _setup("BertModel")
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed():
        mine = ours(**inputs, output_hidden_states=True)
    reference = theirs(**inputs, output_hidden_states=True)
    assert len(mine.hidden_states) == ours.config.num_hidden_layers + 1
    for state, expected in zip(mine.hidden_states, reference.hidden_states, strict=True):
        assert state.shape == expected.shape
        torch.testing.assert_close(state[real], expected[real], rtol=0, atol=1e-5)
        assert not state[~real].any()
    assert mine.hidden_states[-1] is mine.last_hidden_state


def test_outputs_hidden_states_by_configuration():
    ours, _, inputs = _setup("BertModel")
    ours.config.output_hidden_states = True
    assert len(ours(**inputs).hidden_states) == ours.config.num_hidden_layers + 1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_outputs_attention_weights(implementation):
    """sdpa computes no weights; transformers then returns an empty tuple, we the weights."""
    ours, theirs, inputs = _setup("BertModel")
    ours.config._attn_implementation = implementation
    with torch.no_grad():
        mine = ours(**inputs, output_attentions=True)
        reference = theirs(**inputs, output_attentions=True)
    assert len(mine.attentions) == ours.config.num_hidden_layers
    for weights, expected in zip(mine.attentions, reference.attentions, strict=True):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)
    assert ours.config._attn_implementation == implementation


def test_outputs_without_pooler():
    config = small_bert_config()
    ours, _ = model_pair("BertModel", config, add_pooling_layer=False)
    ids = torch.randint(5, 99, (2, 5))
    assert ours(ids).pooler_output is None


def test_logits_cost_nothing_until_read():
    ours, theirs, inputs = _setup()
    ours.train(), theirs.train()
    with assert_ran("mlm_cross_entropy_fwd"):
        outputs = ours(**inputs)
    assert list(outputs.keys()) == ["loss", "logits"]
    lazy = dict(outputs.items())["logits"]
    assert type(lazy) is LazyLogits
    assert lazy.shape == (*inputs["input_ids"].shape, ours.config.vocab_size)
    assert lazy.deferred._value is None
    outputs.loss.backward()
    assert lazy.deferred._value is None
    reference = theirs(**inputs)
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(outputs.logits[real], reference.logits[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["attribute", "key", "index", "slice", "to_tuple", "get", "pickle"])
def test_logits_are_ordinary_however_they_are_read(how):
    ours, _, inputs = _setup()
    outputs = ours.train()(**inputs)
    logits = {
        "attribute": lambda: outputs.logits,
        "key": lambda: outputs["logits"],
        "index": lambda: outputs[1],
        "slice": lambda: outputs[:2][1],
        "to_tuple": lambda: outputs.to_tuple()[1],
        "get": lambda: outputs.get("logits"),
        "pickle": lambda: pickle.loads(pickle.dumps(outputs.logits.detach())),
    }[how]()
    assert type(logits) is torch.Tensor
    assert logits.shape == (*inputs["input_ids"].shape, ours.config.vocab_size)
    assert isinstance(outputs, transformers.modeling_outputs.MaskedLMOutput)


def test_logits_gradients_are_the_reference_ones():
    ours, theirs, inputs = _setup()
    real = inputs["attention_mask"] != 0
    for model in (ours.train(), theirs.train()):
        outputs = model(**inputs)
        (outputs.loss + outputs.logits[real].square().mean()).backward()
    for (name, mine), (_, reference) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_logits_of_containers_behave_as_tensors():
    """What Accelerate does to outputs (rebuild, `.float()`) stays free; arithmetic computes."""
    ours, _, inputs = _setup()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = ours.train()(**inputs)
        hidden = ours.bert(
            inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"]
        ).last_hidden_state
        plain = ours.cls(hidden)
    oracle = copy.deepcopy(ours.cls).double()(hidden.double())
    rebuilt = type(outputs)({k: v.float() for k, v in outputs.items()})
    lazy = dict(rebuilt.items())["logits"]
    assert type(lazy) is LazyLogits
    assert lazy.dtype == torch.float32
    assert lazy.deferred._value is None
    real = inputs["attention_mask"] != 0
    assert rebuilt.logits.dtype == torch.float32
    assert_close_to_oracle(
        rebuilt.logits[real],
        oracle[real],
        plain.float()[real],
        "logits",
        compute_dtype=torch.bfloat16,
    )
    assert type(lazy + 1) is torch.Tensor
    assert torch.equal(lazy.argmax(-1), rebuilt.logits.argmax(-1))


def test_logits_in_a_pytree():
    ours, _, inputs = _setup()
    outputs = ours.train()(**inputs)
    leaves, spec = torch.utils._pytree.tree_flatten(outputs)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert leaves[1].deferred._value is None
    assert again.loss is outputs.loss
    assert type(again.logits) is torch.Tensor


@pytest.mark.parametrize("write", ["optimizer", "in_place", "data"])
def test_logits_read_after_the_weights_changed_raise(write):
    ours, _, inputs = _setup()
    outputs = ours.train()(**inputs)
    weight = ours.cls.predictions.transform.dense.weight
    if write == "optimizer":
        outputs.loss.backward()
        torch.optim.AdamW(ours.parameters(), fused=True).step()
    elif write == "in_place":
        with torch.no_grad():
            weight.mul_(2)
    else:
        weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="read after the weights changed"):
        _ = outputs.logits


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_logits_have_the_gradient_mode_of_their_forward(mode):
    ours, theirs, inputs = _setup()
    with mode():
        outputs, reference = ours.train()(**inputs), theirs.train()(**inputs)
    with torch.no_grad():
        assert outputs.logits.requires_grad == reference.logits.requires_grad


def test_logits_can_be_refused():
    ours, _, inputs = _setup()
    for model in (ours.train(), ours.eval()):
        outputs = model(**inputs, return_logits=False)
        assert list(outputs.keys()) == ["loss"]


def test_logits_are_eager_in_eval():
    ours, theirs, inputs = _setup()
    outputs = ours(**inputs)
    assert type(outputs) is transformers.modeling_outputs.MaskedLMOutput
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(
        outputs.logits[real], theirs(**inputs).logits[real], rtol=0, atol=1e-5
    )
    blank = outputs.logits[~real]
    assert torch.equal(blank, blank[:1].expand_as(blank))


def test_loss_of_a_half_precision_model_is_fp32():
    """transformers rounds it to bf16 (11.1875 for 11.2400)."""
    config = small_bert_config(**OFF)
    ours, theirs = model_pair("BertForMaskedLM", config, dtype=torch.bfloat16)
    batch = padded_batch(LENGTHS, config.vocab_size, seed=1)
    inputs = head_inputs("BertForMaskedLM", batch, config)
    loss = ours(**inputs).loss
    logits = theirs(**inputs).logits.float()
    expected = torch.nn.functional.cross_entropy(
        logits.view(-1, config.vocab_size), inputs["labels"].view(-1)
    )
    assert loss.dtype == torch.float32
    assert (loss - expected).abs() < 0.02


@pytest.mark.parametrize("name", HEADS)
def test_num_items_in_batch_is_the_denominator(name):
    """Gradient accumulation: micro-batches with the step's count add up to the whole batch."""
    config = small_bert_config(**OFF)
    ours, _ = model_pair(name, config)
    batch = padded_batch(LENGTHS, config.vocab_size, seed=1)
    inputs = head_inputs(name, batch, config)
    if "labels" not in inputs:  # question answering: Trainer has no labels to count
        assert torch.equal(ours(**inputs, num_items_in_batch=None).loss, ours(**inputs).loss)
        return
    ours.train()
    count = (inputs["labels"] != -100).sum()
    ours(**inputs).loss.backward()
    whole = {n: p.grad.clone() for n, p in ours.named_parameters()}
    ours.zero_grad()
    half = len(inputs["input_ids"]) // 2
    if name == "BertForPreTraining":
        # Its pair loss is weighed by labelled tokens; equal halves make the two means agree.
        inputs = {k: torch.cat([v[:half]] * 2) for k, v in inputs.items()}
        count = (inputs["labels"] != -100).sum()
        ours(**inputs).loss.backward()
        whole = {n: p.grad.clone() for n, p in ours.named_parameters()}
        ours.zero_grad()
    for part in (slice(None, half), slice(half, None)):
        micro = {k: v[part] for k, v in inputs.items()}
        ours(**micro, num_items_in_batch=count).loss.backward()
    for parameter_name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, whole[parameter_name], rtol=1e-3, atol=1e-6, msg=parameter_name
        )


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "BertForTokenClassification", "BertForSequenceClassification"]
)
def test_no_label_gives_loss_and_gradients_of_zero(name):
    ours, _, inputs = _setup(name)
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    ours.train()
    loss = ours(**inputs).loss
    loss.backward()
    assert loss == 0
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_every_trainable_parameter_has_a_gradient():
    """DDP stops at a parameter without one."""
    for name in HEADS:
        ours, _, inputs = _setup(name)
        ours.train()(**inputs).loss.backward()
        assert [n for n, p in ours.named_parameters() if p.grad is None] == []
