"""freeze: the same bits from packed weights alone, and what needs the originals refused."""

import copy
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import fastbert
from fastbert import dispatch, extension
from fastbert.dispatch import use_backend
from fastbert.ops.encoder import pack_layers
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import FAMILIES, family_of, head_inputs, model_pair

pytestmark = pytest.mark.skipif(
    not extension.cpu_isas(), reason="a frozen model runs by C++; the compiled part is not built"
)

GONE = "weights that are gone; the model is frozen .* keep a model that is not, or load it again"
POST_NORM = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert", "Albert")
NAMES = [family + task for family in POST_NORM for task in ("Model", *FAMILIES[family])]


def _model(name="BertModel", dtype=torch.float32, seed=0):
    return model_pair(name, small_config(family_of(name)), dtype=dtype, seed=seed)[0]


def _inputs(name="BertModel", lengths=(7, 3, 40, 12)):
    config = small_config(family_of(name))
    batch = padded_batch(lengths, 99, seed=1, pad_token_id=config.pad_token_id)
    inputs = head_inputs(name, batch, config)
    return {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}


def _forward(model, inputs):
    with torch.no_grad():
        return model(**inputs)


def _hidden(model):
    return _forward(model, _inputs()).last_hidden_state


def _assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_bitwise_equal(value, expected[name], name)


@pytest.fixture
def frozen():
    return fastbert.freeze(_model())


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits(name):
    model, inputs = _model(name), _inputs(name)
    expected = _forward(model, inputs)
    assert fastbert.freeze(model) is model
    before = dispatch.counters()
    _assert_same(_forward(model, inputs), expected)
    assert (dispatch.counters() - before)["encoder_fwd", "cpu"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["BertForMaskedLM", "ElectraModel", "AlbertModel"])
def test_the_same_bits_in_half_precision(name, dtype):
    model, inputs = _model(name, dtype), _inputs(name)
    expected = _forward(copy.deepcopy(model), inputs)
    fastbert.freeze(model)
    for _ in range(2):
        _assert_same(_forward(model, inputs), expected)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_same_bits_in_other_products(precision):
    model = _model()
    torch.set_float32_matmul_precision(precision)
    try:
        expected = _hidden(model)
        assert_bitwise_equal(_hidden(fastbert.freeze(model)), expected, "rows")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_same_bits_where_gradients_would_be_recorded():
    model = _model("BertForSequenceClassification")
    inputs = _inputs("BertForSequenceClassification")
    expected = model(**inputs)
    _assert_same(fastbert.freeze(model)(**inputs), expected)


def test_packed_input():
    model = _model("RobertaModel")
    packed = {
        "input_ids": torch.randint(5, 99, (1, 9)),
        "cu_seq_lens_q": torch.tensor([0, 4, 9], dtype=torch.int32),
    }
    expected = _forward(model, packed)
    _assert_same(_forward(fastbert.freeze(model), packed), expected)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "RobertaForMaskedLM"])
def test_texts_without_tokens_and_padding_on_the_left(name):
    ours, theirs = model_pair(name, small_config(family_of(name)), attention="sdpa")
    inputs = _inputs(name)
    inputs["attention_mask"][0], inputs["attention_mask"][2, :9] = 0, 0
    expected = _forward(ours, inputs)
    actual = _forward(fastbert.freeze(ours), inputs)
    _assert_same(actual, expected)
    real = inputs["attention_mask"].bool() if name.endswith("LM") else slice(None)
    logits = _forward(theirs, inputs).logits
    torch.testing.assert_close(actual.logits[real], logits[real], rtol=0, atol=1e-5)
    inputs["attention_mask"][:] = 0
    _assert_same(_forward(ours, inputs), _forward(model_pair(name, ours.config)[0], inputs))


def test_what_is_kept_may_change():
    """Embeddings, biases, norms and the head are read as they are."""
    plain = _model("BertForMaskedLM")
    frozen = fastbert.freeze(copy.deepcopy(plain))
    inputs = _inputs()
    for change in (
        lambda m: m.resize_token_embeddings(120),
        lambda m: m.bert.encoder.layer[1].output.dense.bias.data.mul_(3),
        lambda m: m.bert.encoder.layer[0].output.LayerNorm.weight.data.add_(1),
        lambda m: m.bert.embeddings.word_embeddings.weight.data.mul_(0.5),
        lambda m: m.cls.predictions.transform.dense.weight.data.mul_(2),
    ):
        before = _forward(frozen, inputs).logits
        for model in (plain, frozen):
            torch.manual_seed(0)
            change(model)
        after = _forward(frozen, inputs).logits
        assert before.shape != after.shape or not torch.equal(before, after)
        assert_bitwise_equal(after, _forward(plain, inputs).logits, "logits")


def test_layers_may_be_left_out(frozen):
    plain = _model()
    for model in (plain, frozen):
        model.encoder.layer = model.encoder.layer[1:]
    assert_bitwise_equal(_hidden(frozen), _hidden(plain), "rows")


def test_what_changes_nothing_is_not_refused(frozen):
    expected = _hidden(frozen)
    again = (
        frozen.eval(),
        frozen.to("cpu"),
        frozen.float(),
        frozen.requires_grad_(False),
        copy.deepcopy(frozen),
        fastbert.freeze(frozen),
        fastbert.accelerate(frozen),
    )
    for same in again:
        assert torch.equal(_hidden(same), expected)
    fastbert.refresh(frozen)
    assert torch.equal(_hidden(frozen), expected)


def test_hooks_around_the_layers_run(frozen):
    plain, calls = _model(), []
    for model in (plain, frozen):
        for module in (model, model.embeddings):
            module.register_forward_hook(lambda module, *_: calls.append(type(module)))
    assert_bitwise_equal(_hidden(frozen), _hidden(plain), "rows")
    assert len(calls) == 4 and calls[:2] == calls[2:]


# --- the weights are gone -------------------------------------------------------------------------


def test_weights_are_dropped(frozen):
    layer, plain = frozen.encoder.layer[0], _model()
    weight = layer.output.dense.weight
    assert weight.device.type == "meta" and weight.shape == (64, 96)
    assert "DroppedWeight((64, 96)" in repr(weight)
    assert layer.output.dense.bias.device.type == "cpu"
    assert not any(p.requires_grad for p in frozen.parameters())
    assert frozen.device.type == "cpu" and frozen.dtype == torch.float32
    assert frozen.num_parameters() == plain.num_parameters()
    assert len(list(frozen.parameters())) == len(list(plain.parameters()))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "AlbertModel"])
def test_the_memory_that_is_held_is_counted(name):
    model = _model(name)
    before, count = model.get_memory_footprint(), model.num_parameters()
    assert before == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    fastbert.freeze(model)
    kept = [t for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"]
    layers = set(model.base_model.packed_layers())
    packed = [t for layer in layers for t in layer.weight_cache.frozen.packed]
    assert model.get_memory_footprint() == sum(t.nbytes for t in (*kept, *packed)) != before
    assert model.num_parameters() == count


def test_threads_freeze_a_model_once(monkeypatch):
    model, calls = _model(), []

    def slowly(*arguments):
        calls.append(arguments)
        time.sleep(0.05)
        return pack_layers(*arguments)

    monkeypatch.setattr("fastbert.models.freeze.pack_layers", slowly)
    expected = _hidden(model)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(fastbert.freeze, [model] * 3)) == [model] * 3
    assert len(calls) == len(model.encoder.layer)
    assert torch.equal(_hidden(model), expected)


def test_a_shared_layer_is_packed_once():
    model = fastbert.freeze(_model("AlbertModel"))
    first, second = model.packed_layers()
    assert first is second
    assert first.ffn.weight.device.type == "meta" and len(first.weight_cache.frozen.packed) == 4
    assert model.encoder.embedding_hidden_mapping_in.weight.device.type == "cpu"


USES = {
    "train": lambda m: m.train(),
    "state_dict": lambda m: m.state_dict(),
    "a part's state_dict": lambda m: m.encoder.layer[0].output.state_dict(),
    "save": lambda m: m.save_pretrained("nowhere"),
    "load": lambda m: m.load_state_dict(_model().state_dict()),
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "meta": lambda m: m.to("meta"),
    "a part's dtype": lambda m: m.encoder.layer[0].intermediate.double(),
    "pickle": lambda m: pickle.dumps(m),
    "requires_grad": lambda m: m.requires_grad_(True),
    "optimizer": lambda m: torch.optim.AdamW(m.parameters()),
    "read": lambda m: m.encoder.layer[0].output.dense.weight.sum(),
    "write": lambda m: m.encoder.layer[0].output.dense.weight.mul_(2),
    "data": lambda m: m.encoder.layer[0].output.dense.weight.data,
    "call of a part": lambda m: m.encoder.layer[0].output.dense(torch.randn(1, 96)),
    "call of a layer": lambda m: m.encoder.layer[0](torch.randn(1, 3, 64)),
    "hidden states": lambda m: m(**_inputs(), output_hidden_states=True),
    "attentions": lambda m: m(**_inputs(), output_attentions=True),
}
WITHIN = ("train", "state_dict", "load", "to", "half", "meta", "pickle", "requires_grad")


@pytest.mark.parametrize("use", USES)
def test_what_needs_the_weights_is_refused(frozen, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = _hidden(frozen)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=GONE):
        USES[use](frozen)
    assert not frozen.training and not list(tmp_path.iterdir())
    frozen.requires_grad_(False)
    assert torch.equal(_hidden(frozen), expected)


@pytest.mark.parametrize("use", WITHIN)
def test_in_another_module_too(frozen, use):
    outer = nn.ModuleDict({"inner": frozen})
    expected = _hidden(frozen)
    with pytest.raises(NotImplementedError, match=GONE):
        USES[use](outer)
    frozen.requires_grad_(False)
    assert torch.equal(_hidden(frozen), expected)


@pytest.mark.parametrize("use", ["train", "save"])
def test_a_head_around_a_frozen_encoder_is_left_as_it_was(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = _model("BertForSequenceClassification")
    fastbert.freeze(model.bert)
    with pytest.raises(NotImplementedError, match=GONE):
        USES[use](model)
    assert not any(module.training for module in model.modules())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["AlbertModel", "DistilBertModel", "ElectraModel"])
def test_other_families_refuse_too(name):
    model = fastbert.freeze(_model(name))
    inputs = _inputs(name)
    expected = _forward(model, inputs)
    for use in ("train", "state_dict", "half", "pickle", "optimizer"):
        with pytest.raises(NotImplementedError, match=GONE):
            USES[use](model)
    for asked in ("output_hidden_states", "output_attentions"):
        with torch.no_grad(), pytest.raises(NotImplementedError, match=GONE):
            model(**inputs, **{asked: True})
    _assert_same(_forward(model, inputs), expected)


def _hook(*_):
    pass


CHANGES = {
    "hook on a Linear": (
        lambda m: m.encoder.layer[1].output.dense.register_forward_hook(_hook),
        "layer 1: a Linear was replaced or has hooks",
    ),
    "hook on a layer": (
        lambda m: m.encoder.layer[1].register_forward_pre_hook(_hook),
        "a layer was replaced or has hooks",
    ),
    "hook on the encoder": (
        lambda m: m.encoder.register_forward_hook(_hook),
        "the encoder was replaced or has hooks",
    ),
    "another Linear": (
        lambda m: setattr(m.encoder.layer[1].output, "dense", nn.Linear(96, 64)),
        "layer 1: a weight was replaced after freezing",
    ),
    "another weight": (
        lambda m: setattr(
            m.encoder.layer[1].output.dense, "weight", nn.Parameter(torch.randn(64, 96))
        ),
        "layer 1: a weight was replaced after freezing",
    ),
    "Linears swapped": (
        lambda m: setattr(m.encoder.layer[1].output, "dense", m.encoder.layer[0].output.dense),
        "layer 1: a weight was replaced after freezing",
    ),
    "a layer that is not frozen": (
        lambda m: m.encoder.layer.append(_model().encoder.layer[0]),
        "some layers are frozen, others are not",
    ),
    "dropout": (lambda m: m.encoder.layer[0].output.dropout.train(), "dropout is in force"),
    "a bias with gradients": (
        lambda m: m.encoder.layer[0].output.dense.bias.requires_grad_(),
        "gradients are recorded",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_layers_is_refused_in_the_forward(frozen, change):
    make, reason = CHANGES[change]
    make(frozen)
    with pytest.raises(NotImplementedError, match=f"{reason}.*{GONE}"):
        frozen(**_inputs())


def test_forwards_that_call_the_layers_are_refused(frozen):
    inputs = _inputs()
    embeds = torch.randn(1, 5, 64, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"gradients are recorded.*{GONE}"):
        frozen(inputs_embeds=embeds)
    refused = pytest.raises(NotImplementedError, match=f"autocast is on.*{GONE}")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), refused:
        frozen(**inputs)
    with use_backend("reference"), pytest.raises(NotImplementedError, match="another backend"):
        frozen(**inputs)
    assert torch.equal(frozen(**inputs)[0], _hidden(frozen))


def test_layers_of_a_frozen_model_in_another(frozen):
    other = _model()
    other.encoder.layer[1] = frozen.encoder.layer[1]
    with torch.no_grad(), pytest.raises(NotImplementedError, match=GONE):
        other(**_inputs())


def test_a_head_can_be_trained_on_a_frozen_encoder():
    plain = _model("BertForSequenceClassification")
    frozen = fastbert.freeze(copy.deepcopy(plain))
    plain.bert.requires_grad_(False)
    inputs, labels = _inputs(), torch.tensor([0, 1, 0, 2])
    for model in (plain, frozen):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    assert not torch.equal(frozen.classifier.weight, _model(type(plain).__name__).classifier.weight)
    _assert_same(_forward(frozen, inputs), _forward(plain, inputs))


def test_another_precision_is_refused(frozen):
    expected = _hidden(frozen)
    if "amx" in extension.cpu_isas():
        with extension.use_cpu_isa("avx2"), pytest.raises(ValueError, match="were dropped"):
            _hidden(frozen)
    assert torch.equal(_hidden(frozen), expected)


# --- what cannot be frozen ------------------------------------------------------------------------


def test_models_that_cannot_be_frozen_are_left_alone():
    model = _model()
    for change, message in (
        (lambda: model.train(), "training mode; call eval"),
        (lambda: model.eval().double(), "float64"),
        (lambda: model.float().encoder.layer[1].register_forward_hook(_hook), "has hooks"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            fastbert.freeze(model)
    with use_backend("reference"), pytest.raises(ValueError, match="another backend"):
        fastbert.freeze(_model())
    both = nn.ModuleList([_model(), model])
    with pytest.raises(ValueError, match="has hooks"):
        fastbert.freeze(both)
    assert all(p.device.type == "cpu" for p in both.parameters())
    both.state_dict()


@pytest.mark.parametrize("name", ["ModernBertModel", "DebertaModel", "DebertaV2Model"])
def test_families_without_the_one_op_say_so(name):
    model = _model(name)
    with pytest.raises(ValueError, match=f"{name} .*no op runs all of its.*use the model as it is"):
        fastbert.freeze(model)
    model.state_dict()


def test_what_is_no_model_of_ours_says_what_to_do():
    with pytest.raises(ValueError, match=r"Linear holds no model of fastbert; call fastbert.acc"):
        fastbert.freeze(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got str"):
        fastbert.freeze("bert-base-uncased")


# --- memory ---------------------------------------------------------------------------------------

MEMORY = """
import re, sys, torch, transformers, fastbert
from pathlib import Path

def resident():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def build(layers, hidden, inner, heads):
    config = transformers.BertConfig(
        vocab_size=999, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner,
        num_attention_heads=heads)
    return fastbert.BertModel(config).eval().to(torch.bfloat16)

inputs = {"input_ids": torch.randint(5, 999, (8, 128))}
with torch.no_grad():
    fastbert.freeze(build(1, 32, 32, 1))(**inputs)
    build(6, 768, 3072, 12).save_pretrained(sys.argv[1])
    before = resident()
    model = fastbert.BertModel.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    model(**inputs)
    used = resident() - before
    fastbert.freeze(model)(**inputs)
    frozen = resident() - before
left = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
packed = sum(t.nbytes for layer in model.encoder.layer for t in layer.weight_cache.frozen.packed)
print(used, frozen, left, packed, sum(p.nbytes for p in model.parameters()) - left)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_memory_is_one_packed_copy(tmp_path):
    """Beside the parameters in use, alone after freezing; 64 MB more are a forward's own."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    used, frozen, left, packed, dropped = map(int, run.stdout.split())
    assert dropped > 64 << 20, "too small a model to tell"
    assert used < left + dropped + packed + (64 << 20), run.stdout
    assert frozen < left + packed + (64 << 20), run.stdout
