"""`register_auto_classes`: transformers' AutoModel giving fastbert's classes, on request."""

import subprocess
import sys

import pytest
import torch
import transformers

import fastbert
from fastbert.models.auto_classes import _auto_classes
from fastbert.testing.inputs import padded_batch, small_bert_config, small_config
from fastbert.testing.models import FAMILIES, assert_packed


@pytest.fixture(autouse=True)
def restored():
    """What a test registers is forgotten after it."""
    before = [(auto, dict(auto._model_mapping._extra_content)) for auto in _auto_classes()]
    yield
    for auto, content in before:
        auto._model_mapping._extra_content = content


def test_auto_models_are_ours_only_after_asking(tmp_path):
    transformers.BertForMaskedLM(small_bert_config()).save_pretrained(tmp_path)
    load = transformers.AutoModelForMaskedLM.from_pretrained
    before = load(tmp_path)
    assert type(before) is transformers.BertForMaskedLM
    replaced = fastbert.register_auto_classes()
    assert replaced == fastbert.register_auto_classes()
    assert {"AutoModel: BertModel", "AutoModelForMaskedLM: BertForMaskedLM"} <= set(replaced)
    after = load(tmp_path)
    assert type(after) is fastbert.BertForMaskedLM
    inputs = padded_batch((7, 3), 99, seed=1)
    with torch.no_grad(), assert_packed():
        actual = after.eval()(**inputs).logits
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        expected = before.eval()(**inputs).logits
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)


def test_every_family_is_replaced_though_none_was_imported():
    code = "import fastbert; print(*fastbert.register_auto_classes(), sep='\\n')"
    replaced = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert {"AutoModel: BertModel", "AutoModel: ModernBertModel"} <= set(replaced)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_head_is_replaced_and_nothing_else(family):
    replaced = fastbert.register_auto_classes()
    config = small_config(family)
    for task in ("Model", *FAMILIES[family]):
        assert any(row.endswith(f": {family}{task}") for row in replaced)
    for auto in _auto_classes():
        if type(config) in auto._model_mapping:
            theirs = auto._model_mapping[type(config)]
            name = theirs.__name__
            assert theirs is getattr(fastbert, name, theirs), f"{auto.__name__} gives {theirs}"
    gpt = transformers.AutoModel.from_config(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2))
    assert type(gpt) is transformers.GPT2Model


def test_pipelines_load_ours(real_checkpoint):
    fastbert.register_auto_classes()
    pipe = transformers.pipeline("feature-extraction", model=real_checkpoint, device="cpu")
    assert type(pipe.model) is fastbert.BertModel
    with assert_packed():
        pipe("A sentence.")
