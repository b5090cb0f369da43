"""safetensors: our models' files read without us, and files written without us read by us."""

import pytest
import torch

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair

safetensors = pytest.importorskip("safetensors.torch")

NAME = "BertForMaskedLM"


def test_saved_file_holds_the_weights_once(tmp_path):
    """A forward fills the cache of packed weights, which is no weight; tied tensors are one."""
    ours, theirs = model_pair(NAME, small_bert_config())
    with torch.no_grad():
        ours(**padded_batch((7, 3), 99, seed=1))
    ours.save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "theirs")
    stored, expected = (
        safetensors.load_file(folder / "model.safetensors")
        for folder in (tmp_path, tmp_path / "theirs")
    )
    assert stored.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(stored[key], value), key


def test_shards(tmp_path):
    ours, _ = model_pair(NAME, small_bert_config())
    ours.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = fastbert.BertForMaskedLM.from_pretrained(tmp_path).eval()
    inputs = padded_batch((7, 3), 99, seed=1)
    with torch.no_grad(), assert_packed():
        assert torch.equal(loaded(**inputs).logits, ours(**inputs).logits)


def test_save_model_and_load_model(tmp_path):
    """safetensors' own pair of functions, which asks which tensors share storage."""
    ours, theirs = model_pair(NAME, small_bert_config())
    inputs = head_inputs(NAME, padded_batch((7, 3), 99, seed=1), ours.config)
    path = str(tmp_path / "model.safetensors")
    safetensors.save_model(theirs, path)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
        ours(**inputs)
    missing, unexpected = safetensors.load_model(ours, path)
    assert not missing
    assert not unexpected
    with torch.no_grad(), assert_packed():
        actual = ours(**inputs).logits
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(
        actual[real], theirs(**inputs).logits.detach()[real], rtol=0, atol=1e-5
    )
