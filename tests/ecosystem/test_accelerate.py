"""Accelerate: the prepared loop, accumulation, saved states, and device_map on a CPU."""

import pytest
import torch
import transformers

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair

accelerate = pytest.importorskip("accelerate")

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NAME = "BertForSequenceClassification"


@pytest.fixture(autouse=True)
def own_state():
    """Accelerate keeps one in a process: a Trainer's bf16 would be met here, ours there."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _batches(config):
    batches = [padded_batch((7, 3), 99, seed=s) for s in range(4)]
    return [head_inputs(NAME, b, config, seed=s) for s, b in enumerate(batches)]


def _trained(model, batches, accumulate):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loop_trains_as_on_transformers(accumulate, tmp_path):
    config = small_bert_config(**OFF, num_labels=3)
    ours, theirs = model_pair(NAME, config)
    batches = _batches(config)
    with assert_packed():
        accelerator, trained = _trained(ours, batches, accumulate)
    _, expected = _trained(theirs, batches, accumulate)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-3, atol=1e-5, msg=key)

    accelerator.save_state(tmp_path)
    before = {k: v.clone() for k, v in trained.state_dict().items()}
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    for key, value in before.items():
        assert torch.equal(trained.state_dict()[key], value), key


def test_device_map_auto(tmp_path):
    """Everything lands on the CPU; hooks that move tensors to where they are keep rows packed."""
    config = small_bert_config(num_labels=3)
    _, theirs = model_pair(NAME, config)
    theirs.save_pretrained(tmp_path)
    loaded = fastbert.BertForSequenceClassification.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": "1GiB"}
    )
    assert {p.device.type for p in loaded.parameters()} == {"cpu"}
    inputs = head_inputs(NAME, padded_batch((7, 3), 99, seed=1), config)
    with torch.no_grad(), assert_packed():
        actual = loaded.eval()(**inputs).logits
    torch.testing.assert_close(actual, theirs(**inputs).logits.detach(), rtol=0, atol=1e-5)


def test_offloaded_layers_give_the_same_numbers():
    """Weights that live elsewhere between two calls: the hooks sit inside the layers."""
    ours, theirs = model_pair("BertModel", small_bert_config())
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    inputs = padded_batch((7, 3), 99, seed=1)
    real = inputs["attention_mask"] != 0
    for _ in range(2):
        with torch.no_grad():
            actual = ours(**inputs).last_hidden_state
            expected = theirs(**inputs).last_hidden_state
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)


def test_trainer_finds_the_executable_batch_size():
    """Accelerate halves the batch when memory is short; our errors must not look like that."""
    seen = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=8)
    def run(batch_size):
        seen.append(batch_size)
        model = fastbert.BertModel(small_bert_config()).eval()
        return model(torch.full((batch_size, 4), 99))

    with pytest.raises(ValueError, match="input_ids holds 99"):
        run()
    assert seen == [8]


def test_meta_device_then_loading(tmp_path):
    ours, theirs = model_pair("BertModel", small_bert_config())
    ours.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = fastbert.BertModel(transformers.BertConfig.from_pretrained(tmp_path))
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"})
    inputs = padded_batch((7, 3), 99, seed=1)
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed():
        actual = loaded.eval()(**inputs).last_hidden_state
    with torch.no_grad():
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)
