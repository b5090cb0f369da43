"""Linears that other libraries quantised are called as they are, on packed rows; the rest stays
fused. torchao and bitsandbytes are no part of the `test` extra: where they are installed
transformers imports them, and every process of the suite would wait for that."""

import copy

import pytest
import torch

from fastbert.testing.compare import assert_close_to_oracle
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, model_pair


def _outputs(ours, theirs):
    """Hidden states of the real tokens, ours and theirs."""
    inputs = padded_batch((7, 3), 99, seed=1)
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        with assert_packed():
            actual = ours(**inputs).last_hidden_state
        return actual[real], theirs(**inputs).last_hidden_state[real]


def test_torchao_weights():
    quantization = pytest.importorskip("torchao.quantization")
    ours, theirs = model_pair("BertModel", small_bert_config())
    for model in (ours, theirs):
        quantization.quantize_(model.encoder, quantization.Int8WeightOnlyConfig())
    assert type(ours.encoder.layer[0].output.dense.weight) is not torch.nn.Parameter
    torch.testing.assert_close(*_outputs(ours, theirs), rtol=0, atol=1e-5)


def test_torchao_activations():
    """A row's range is its own, but a last bit before rounding can move a value by one of 255
    steps: both are as far from the unquantised model."""
    quantization = pytest.importorskip("torchao.quantization")
    ours, theirs = model_pair("BertModel", small_bert_config())
    exact = copy.deepcopy(theirs).double()
    for model in (ours, theirs):
        quantization.quantize_(model.encoder, quantization.Int8DynamicActivationInt8WeightConfig())
    actual, plain = _outputs(ours, theirs)
    inputs = padded_batch((7, 3), 99, seed=1)
    with torch.no_grad():
        oracle = exact(**inputs).last_hidden_state[inputs["attention_mask"] != 0]
    assert not torch.allclose(plain.double(), oracle, rtol=0, atol=1e-3)
    assert_close_to_oracle(actual, oracle, plain, "dynamic int8")


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes_weights(bits):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ours, theirs = model_pair("BertModel", small_bert_config())
    for model in (ours, theirs):
        for layer in model.encoder.layer:
            layer.intermediate.dense = _quantised(bitsandbytes, layer.intermediate.dense, bits)
    assert not ours.encoder.layer[0].intermediate.dense.weight.is_floating_point()
    torch.testing.assert_close(*_outputs(ours, theirs), rtol=0, atol=1e-5)


def _quantised(bitsandbytes, linear, bits):
    nn = bitsandbytes.nn
    size = linear.in_features, linear.out_features
    weight = linear.weight.detach().clone()
    if bits == 8:
        result = nn.Linear8bitLt(*size, has_fp16_weights=False)
        result.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        result = nn.Linear4bit(*size, compute_dtype=torch.float32)
        result.weight = nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=result)
    result.bias = linear.bias
    return result.to("cpu")
