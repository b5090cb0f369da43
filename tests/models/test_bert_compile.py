"""torch.compile, torch.jit.trace, torch.export: one graph, every mask."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import head_inputs, model_pair

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _inputs(length, config, side="right"):
    batch = padded_batch((length, 1, length // 2), config.vocab_size, side=side, seed=length)
    return head_inputs("BertModel", batch, config)


@pytest.mark.parametrize("side", ["right", "left"])
def test_compile_fullgraph_with_few_recompilations(side):
    config = small_bert_config(num_hidden_layers=2)
    ours, theirs = model_pair("BertModel", config)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for length in (8, 9, 13, 20, 21):
        inputs = _inputs(length, config, side)
        real = inputs["attention_mask"] != 0
        with torch.no_grad():
            actual, expected = compiled(**inputs), theirs(**inputs)
        torch.testing.assert_close(
            actual.last_hidden_state[real], expected.last_hidden_state[real], rtol=0, atol=1e-5
        )
        assert not actual.last_hidden_state[~real].any()
        torch.testing.assert_close(actual.pooler_output, expected.pooler_output, rtol=0, atol=1e-5)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_compile_training(name):
    config = small_bert_config(num_hidden_layers=2, **OFF)
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    batch = padded_batch((9, 3, 5), config.vocab_size, seed=1)
    inputs = head_inputs(name, batch, config)
    loss = torch.compile(ours, backend="aot_eager", fullgraph=True)(**inputs).loss
    expected = theirs(**inputs).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    for (parameter_name, mine), (_, reference) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            mine.grad, reference.grad, rtol=1e-3, atol=1e-5, msg=parameter_name
        )


def test_compile_training_with_dropout():
    """The stream does not depend on compilation: the same rng_state drops the same elements."""
    config = small_bert_config(num_hidden_layers=2)
    ours, _ = model_pair("BertForMaskedLM", config)
    ours.train()
    batch = padded_batch((9, 3, 5), config.vocab_size, seed=1)
    inputs = head_inputs("BertForMaskedLM", batch, config)
    state = torch.tensor([5, 6])
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(**inputs, rng_state=state).loss, ours(**inputs, rng_state=state).loss
    )
    losses = [compiled(**inputs).loss.item() for _ in range(3)]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForQuestionAnswering"])
def test_shapes_without_values(name):
    """On the meta device and under fake tensors: what memory estimators and init_empty_weights
    run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = small_bert_config(num_hidden_layers=2, num_labels=2)
    batch = padded_batch((9, 3, 5), config.vocab_size, seed=1)
    inputs = head_inputs(name, batch, config)
    for where in (torch.device("meta"), FakeTensorMode()):
        with where:
            ours = getattr(fastbert, name)(config)
            empty = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in inputs.items()}
            outputs = ours.train()(**empty)
        first = outputs.last_hidden_state if name == "BertModel" else outputs.loss
        assert first.shape == ((3, 9, 48) if name == "BertModel" else ())


def test_functorch_and_forward_mode_run_transformers():
    config = small_bert_config(num_hidden_layers=1, **OFF)
    ours, theirs = model_pair("BertForMaskedLM", config)
    batch = padded_batch((9, 3), config.vocab_size, seed=1)
    inputs = head_inputs("BertForMaskedLM", batch, config)
    results = []
    for model in (ours, theirs):

        def loss(parameters, model=model):
            return torch.func.functional_call(model, parameters, kwargs=inputs).loss

        results.append(torch.func.grad(loss)(dict(model.named_parameters())))
    for key, value in results[1].items():
        torch.testing.assert_close(results[0][key], value, rtol=1e-4, atol=1e-6, msg=key)
    with torch.autograd.forward_ad.dual_level():
        embeds = torch.randn(2, 9, 48)
        dual = torch.autograd.forward_ad.make_dual(embeds, torch.randn_like(embeds))
        tangents = [
            torch.autograd.forward_ad.unpack_dual(m(inputs_embeds=dual).logits).tangent
            for m in (ours, theirs)
        ]
    torch.testing.assert_close(*tangents, rtol=1e-4, atol=1e-5)


def test_traced_model_keeps_the_mask():
    """Traced with an example without padding, used with one that has some."""
    config = small_bert_config(num_hidden_layers=2)
    ours, theirs = model_pair("BertModel", config)
    ours.config.return_dict = False
    example = torch.randint(5, 99, (3, 8))
    traced = torch.jit.trace(ours, (example, torch.ones_like(example)), check_trace=False)
    inputs = _inputs(8, config)
    real = inputs["attention_mask"] != 0
    inputs.pop("token_type_ids")
    with torch.no_grad():
        actual = traced(inputs["input_ids"], inputs["attention_mask"])[0]
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)


def test_exported_model_keeps_the_mask():
    config = small_bert_config(num_hidden_layers=2)
    ours, theirs = model_pair("BertModel", config)
    example = torch.randint(5, 99, (3, 8))
    program = torch.export.export(
        ours, (), {"input_ids": example, "attention_mask": torch.ones_like(example)}, strict=False
    )
    inputs = _inputs(8, config)
    inputs.pop("token_type_ids")
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        actual = program.module()(**inputs).last_hidden_state
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)
