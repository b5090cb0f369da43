"""PEFT: LoRA is trained, saved, loaded and merged on our models as on transformers'."""

import copy

import pytest
import torch

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair

peft = pytest.importorskip("peft")

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NAME = "BertForSequenceClassification"


def _adapted(model):
    config = peft.LoraConfig(
        r=4, target_modules=["query", "value", "dense"], modules_to_save=["classifier"]
    )
    torch.manual_seed(7)
    return peft.get_peft_model(model, config)


def _train(model, inputs, steps=4):
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_lora_trains_saves_loads_and_merges(tmp_path):
    config = small_bert_config(**OFF, num_labels=3)
    ours, theirs = model_pair(NAME, config)
    base = copy.deepcopy(ours)
    inputs = head_inputs(NAME, padded_batch((7, 3, 9, 2), 99, seed=1), config)
    adapted = _adapted(ours)
    with assert_packed():
        losses = _train(adapted, inputs)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(_train(_adapted(theirs), inputs)), rtol=1e-4, atol=1e-5
    )

    adapted.eval()
    with torch.no_grad():
        expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad(), assert_packed():
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=0, atol=1e-6)

    merged = loaded.merge_and_unload()
    assert type(merged) is fastbert.BertForSequenceClassification
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    with torch.no_grad(), assert_packed():
        torch.testing.assert_close(merged(**inputs).logits, expected, rtol=0, atol=1e-5)


def test_switching_adapters_off_gives_the_base_model():
    config = small_bert_config(**OFF, num_labels=3)
    ours, theirs = model_pair(NAME, config)
    inputs = head_inputs(NAME, padded_batch((7, 3), 99, seed=1), config)
    adapted = _adapted(ours)
    _train(adapted, inputs)
    with torch.no_grad(), adapted.disable_adapter(), assert_packed():
        actual = adapted.eval()(**inputs).logits
    torch.testing.assert_close(actual, theirs(**inputs).logits.detach(), rtol=0, atol=1e-5)
