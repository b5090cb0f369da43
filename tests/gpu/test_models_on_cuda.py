"""The models on CUDA tensors: run by benchmarks/gpu/run_all.py, skipped where there is no GPU."""

import pytest
import torch

from fastbert.testing.compare import relative_l2
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import HEADS, assert_packed, head_inputs, model_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("name", HEADS)
def test_heads_match_transformers(name):
    config = small_bert_config(**OFF)
    pair = [m.cuda().train() for m in model_pair(name, config)]
    batch = padded_batch((9, 1, 16, 5), config.vocab_size, seed=5)
    inputs = {k: v.cuda() for k, v in head_inputs(name, batch, config).items()}
    with assert_packed():
        loss = pair[0](**inputs).loss
    expected = pair[1](**inputs).loss
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    loss.backward()
    expected.backward()
    for (parameter_name, mine), (_, theirs) in zip(
        pair[0].named_parameters(), pair[1].named_parameters(), strict=True
    ):
        scale = theirs.grad.abs().max().clamp(min=1.0)
        torch.testing.assert_close(
            mine.grad / scale, theirs.grad / scale, rtol=0, atol=1e-3, msg=parameter_name
        )


def test_autocast_dtypes_and_dropout():
    config = small_bert_config()
    ours, theirs = (m.cuda() for m in model_pair("BertForMaskedLM", config))
    batch = padded_batch((9, 1, 16, 5), config.vocab_size, seed=5)
    inputs = {k: v.cuda() for k, v in head_inputs("BertForMaskedLM", batch, config).items()}
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        mine, reference = ours(**inputs), theirs(**inputs)
    assert mine.logits.dtype == reference.logits.dtype
    assert relative_l2(mine.logits[real], reference.logits[real]) < 2e-2
    ours.train()
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(ours(**inputs).loss.item())
    assert losses[0] == losses[1]
