"""The forward by one call: the bits of the packed forward, taken where nothing changed, and only
there."""

import contextlib
import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import fastbert
from fastbert import dispatch, extension
from fastbert.dispatch import use_backend
from fastbert.models.prepared import COUNTED
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import padded_batch, small_bert_config, small_config
from fastbert.testing.models import FAMILIES, family_of, head_inputs, model_pair

pytestmark = pytest.mark.skipif(
    extension.load() is not None, reason=f"the one call is C++: {extension.load()}"
)
LENGTHS = (9, 1, 16, 5)
MODELS = [
    "BertModel",
    "RobertaModel",
    "XLMRobertaModel",
    "CamembertModel",
    "ElectraModel",
    "DistilBertModel",
    "AlbertModel",
]


def _calls():
    return dispatch.counters()["prepared_model", "cpu"]


def _forward(model, inputs, **more):
    with torch.no_grad():
        return model(**inputs, **more)


def _asked_anew(model, inputs, **more):
    """The outputs of a copy, of which nothing is known."""
    before = _calls()
    outputs = _forward(copy.deepcopy(model), inputs, **more)
    assert _calls() == before
    return outputs


def _at_once(model, inputs, **more):
    with contextlib.ExitStack() as stack:
        for name in COUNTED:
            stack.enter_context(assert_ran(name, "cpu"))
        return _forward(model, inputs, **more)


def _assert_same(ours, expected):
    assert type(ours) is type(expected)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def _model(name="BertModel", dtype=torch.float32, **overrides):
    config = small_config(family_of(name), **overrides)
    return model_pair(name, config, dtype=dtype)[0].eval()


def _inputs(model, lengths=LENGTHS, **options):
    config = model.config
    batch = padded_batch(
        lengths, config.vocab_size, seed=1, pad_token_id=config.pad_token_id, **options
    )
    return head_inputs(type(model).__name__, batch, config)


@pytest.fixture
def model():
    return _model()


@pytest.fixture
def inputs(model):
    return _inputs(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_same_bits(name, dtype):
    model = _model(name, dtype)
    for lengths in (LENGTHS, (1,), (7, 7)):
        inputs = _inputs(model, lengths)
        expected = _asked_anew(model, inputs)
        _forward(model, inputs)
        _assert_same(_at_once(model, inputs), expected)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_family_gives_the_same_bits_under_autocast(name, autocast):
    """Those of the layers called one by one; hidden states are fp32 where Linears give less."""
    for dtype in (torch.float32, autocast):
        model = _model(name, dtype)
        inputs = _inputs(model)
        for enabled in (True, False, True):
            with torch.autocast("cpu", autocast, enabled=enabled):
                with use_backend(encoder="reference"):
                    expected = _asked_anew(model, inputs)
                _forward(model, inputs)
                _assert_same(_at_once(model, inputs), expected)


def test_the_families_are_all():
    with_one_call = set(MODELS)
    others = {"DebertaModel", "DebertaV2Model", "ModernBertModel"}
    assert with_one_call | others == {f"{family}Model" for family in FAMILIES}


@pytest.mark.parametrize("change", [fastbert.freeze, fastbert.quantize], ids=lambda f: f.__name__)
def test_frozen_and_quantised_models_give_the_same_bits(model, inputs, change):
    changed = change(model) if change is fastbert.freeze else change(model, "dynamic")
    expected = _asked_anew(changed, inputs)
    _forward(changed, inputs)
    _assert_same(_at_once(changed, inputs), expected)


def test_inputs_in_every_form(model, inputs):
    """Types of masks and ids, gaps in the mask, positions for each text or for all, no mask."""
    _forward(model, inputs)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    gaps = mask.clone()
    gaps[2, 3:6] = 0
    seqlen = ids.shape[1]
    forms = [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask.bool()},
        {"input_ids": ids, "attention_mask": mask.double() * 0.5},
        {"input_ids": ids.int(), "attention_mask": mask.int()},
        {"input_ids": ids, "attention_mask": gaps},
        {"input_ids": ids.T.contiguous().T, "attention_mask": mask.T.contiguous().T},
        {**inputs, "position_ids": torch.arange(seqlen).flip(0)[None]},
        {**inputs, "position_ids": torch.randint(0, 20, ids.shape)},
        {**inputs, "token_type_ids": torch.randint(0, 2, ids.shape)},
        {**inputs, "return_dict": True, "output_hidden_states": False},
    ]
    for form in forms:
        _assert_same(_at_once(model, form), _asked_anew(model, form))
    with_tuple = _at_once(model, inputs, return_dict=False)
    for ours, expected in zip(with_tuple, _asked_anew(model, inputs).to_tuple(), strict=True):
        assert torch.equal(ours, expected)


def test_position_0_alone(model, inputs):
    _forward(model, inputs)
    _assert_same(
        _at_once(model, inputs, first_only=True), _asked_anew(model, inputs, first_only=True)
    )
    assert _forward(model, inputs, first_only=True).last_hidden_state.shape == (4, 1, 64)


def test_texts_without_a_token_where_nothing_is_pooled():
    model = fastbert.BertModel(small_bert_config(), add_pooling_layer=False).eval()
    inputs = _inputs(model)
    inputs["attention_mask"][1] = 0
    expected = _asked_anew(model, inputs)
    _forward(model, inputs)
    _assert_same(_at_once(model, inputs), expected)


def test_positions_that_are_padding(model, inputs):
    """Read at the beginning, of a text without a token, wherever they are required."""
    inputs["attention_mask"][0, 0] = 0
    inputs["attention_mask"][1] = 0
    _forward(model, inputs)
    required = inputs["attention_mask"] == 0
    required[2, :9] = False
    for more in ({}, {"first_only": True}, {"required_rows": required}):
        _assert_same(_at_once(model, inputs, **more), _asked_anew(model, inputs, **more))


def test_rows_that_are_kept(model, inputs):
    _forward(model, inputs)
    ours, expected = (f(model, inputs, keep_rows=True) for f in (_at_once, _asked_anew))
    _assert_same(ours, expected)
    (batch, rows), (batch_anew, rows_anew) = (o.__dict__["packed"] for o in (ours, expected))
    assert torch.equal(rows, rows_anew) and torch.equal(batch.indices, batch_anew.indices)


def test_packed_texts(model):
    """With filling behind them, and rows that are pooled."""
    inputs = {
        "input_ids": torch.randint(5, 90, (1, 14)),
        "attention_mask": (torch.arange(14) < 12).long()[None],
        "cu_seq_lens_q": torch.tensor([0, 5, 6, 12], dtype=torch.int32),
        "pooled_rows": torch.tensor([0, 5, 6]),
    }
    expected = _asked_anew(model, inputs)
    _forward(model, inputs)
    _assert_same(_at_once(model, inputs), expected)
    with pytest.raises(ValueError, match="input_ids holds 99 at"):
        _forward(model, inputs | {"input_ids": torch.full((1, 14), 99)})


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES["Bert"])
def test_heads_with_labels(name, autocast):
    """They read rows at padding, keep rows for themselves, or take position 0 alone."""
    model = _model(f"Bert{name}")
    inputs = _inputs(model)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        with use_backend(encoder="reference"):
            expected = _asked_anew(model, inputs)
        assert expected.loss is not None
        _forward(model, inputs)
        _assert_same(_at_once(model, inputs), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs.update(output_hidden_states=True),
        lambda inputs: inputs.update(output_attentions=True),
        lambda inputs: inputs.update(position_ids=torch.arange(inputs["input_ids"].shape[1])),
    ],
    ids=["hidden_states", "attentions", "flat_positions"],
)
def test_other_calls_go_the_other_way(model, inputs, change):
    _forward(model, inputs)
    change(inputs)
    expected, before = _asked_anew(model, inputs), _calls()
    outputs = _forward(model, inputs)
    assert _calls() == before
    assert torch.equal(outputs.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(outputs.pooler_output, expected.pooler_output)


def test_gradients_and_other_backends_go_the_other_way(model, inputs):
    _forward(model, inputs)
    before = _calls()
    assert model(**inputs).last_hidden_state.requires_grad
    assert not model.weight_cache.prepared, "kept although weights may change now"
    _forward(model, inputs)
    with use_backend("reference"):
        _forward(model, inputs)
    with use_backend(embed_layer_norm="reference"):
        _forward(model, inputs)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    _forward(model, inputs)
    handle.remove()
    assert _calls() == before
    _at_once(model, inputs)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("input_ids", 99, r"input_ids holds 99 at \(2, 15\)"),
        ("input_ids", -1, r"input_ids holds -1 at \(2, 15\)"),
        ("token_type_ids", 2, r"token_type_ids holds 2 at \(2, 15\)"),
        ("position_ids", 64, r"position_ids holds 64 at \(2, 15\)"),
    ],
)
def test_ids_outside_their_table(model, inputs, name, value, match):
    ids = inputs["input_ids"]
    for added in ("token_type_ids", "position_ids"):
        inputs[added] = torch.zeros_like(ids)
    _forward(model, inputs)
    inputs[name] = inputs[name].clone()
    inputs[name][2, 15] = value
    with pytest.raises(ValueError, match=match):
        _forward(model, inputs)


def test_ids_at_padding_are_not_looked_at(model, inputs):
    _forward(model, inputs)
    expected = _at_once(model, inputs)
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 10**6)
    _assert_same(_at_once(model, inputs), expected)


def test_texts_longer_than_the_model(model):
    _forward(model, _inputs(model))
    with pytest.raises(ValueError, match="the input has 65 positions, the model 64"):
        _forward(model, {"input_ids": torch.ones(1, 65, dtype=torch.int64)})


# --- changes --------------------------------------------------------------------------------------


class _Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _layer(model):
    return model.encoder.layer[1]


def _double_output(module, args, output):
    return output * 2


def _another(weight):
    return nn.Parameter(torch.randn_like(weight))


def _swap(model):
    weight = _layer(model).output.dense.weight
    other = _another(weight)
    torch.utils.swap_tensors(weight, other)
    # What was the weight stays alive in another's hands.
    model.encoder.other = other


def _set_class(module, kind):
    module.__class__ = kind


CHANGES = {
    "a_layer's_weight": lambda m: setattr(
        _layer(m).output.dense, "weight", _another(_layer(m).output.dense.weight)
    ),
    "a_weight's_data": lambda m: _layer(m).intermediate.dense.weight.data.mul_(2),
    "a_weight's_storage": lambda m: setattr(
        _layer(m).intermediate.dense.weight, "data", torch.randn(96, 64)
    ),
    "a_weight_turned_over": lambda m: setattr(
        _layer(m).attention.self.query.weight,
        "data",
        _layer(m).attention.self.query.weight.data.T,
    ),
    "a_row_of_a_weight": lambda m: _layer(m).attention.self.key.weight.data[7].zero_(),
    "a_bias": lambda m: _layer(m).output.dense.bias.data.add_(1),
    "a_norm": lambda m: _layer(m).output.LayerNorm.weight.data.mul_(2),
    "eps": lambda m: [
        setattr(n, "eps", 0.1)
        for layer in m.encoder.layer
        for n in layer.modules()
        if isinstance(n, nn.LayerNorm)
    ],
    "one_eps": lambda m: setattr(_layer(m).output.LayerNorm, "eps", 0.1),
    "a_linear": lambda m: setattr(_layer(m).attention.output, "dense", nn.Linear(64, 64)),
    "a_derived_linear": lambda m: _set_class(_layer(m).attention.output.dense, _Doubling),
    "a_hook": lambda m: _layer(m).attention.output.dense.register_forward_hook(_double_output),
    "a_layer's_hook": lambda m: _layer(m).register_forward_hook(
        lambda module, args, output: output * 2
    ),
    "a_hook_before": lambda m: _layer(m).output.LayerNorm.register_forward_pre_hook(
        lambda module, args: (args[0] * 2,)
    ),
    "a_forward": lambda m: setattr(_layer(m).attention.output.dense, "forward", lambda x: x * 0),
    "the_activation": lambda m: setattr(_layer(m).intermediate, "intermediate_act_fn", nn.ReLU()),
    "the_form_of_gelu": lambda m: [
        setattr(layer.intermediate, "intermediate_act_fn", nn.GELU(approximate="tanh"))
        for layer in m.encoder.layer
    ],
    "scaling": lambda m: [
        setattr(layer.attention.self, "scaling", 0.7) for layer in m.encoder.layer
    ],
    "fewer_layers": lambda m: setattr(m.encoder, "layer", m.encoder.layer[:1]),
    "a_layer_twice": lambda m: m.encoder.layer.append(m.encoder.layer[0]),
    "the_embeddings": lambda m: m.set_input_embeddings(nn.Embedding(120, 64)),
    "the_embeddings'_values": lambda m: m.embeddings.word_embeddings.weight.data.uniform_(),
    "the_embeddings'_norm": lambda m: m.embeddings.LayerNorm.bias.data.add_(1),
    "a_hook_on_the_embeddings": lambda m: m.embeddings.register_forward_hook(_double_output),
    "a_hook_on_the_words": lambda m: m.embeddings.word_embeddings.register_forward_hook(
        _double_output
    ),
    "the_words'_norm": lambda m: setattr(m.embeddings.word_embeddings, "max_norm", 0.1),
    "the_pooler's_weight": lambda m: m.pooler.dense.weight.data.mul_(3),
    "the_pooler's_activation": lambda m: setattr(m.pooler, "activation", nn.ReLU()),
    "a_hook_on_the_pooler": lambda m: m.pooler.register_forward_hook(_double_output),
    "no_pooler": lambda m: setattr(m, "pooler", None),
    "all_dtypes": lambda m: m.to(torch.bfloat16),
    "weights_loaded": lambda m: m.load_state_dict(_model_state(m)),
    "weights_assigned": lambda m: m.load_state_dict(_model_state(m), assign=True),
    "weights_swapped": _swap,
}


def _model_state(model):
    generator = torch.Generator().manual_seed(3)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_noticed(model, inputs, change):
    _forward(model, inputs)
    before = _at_once(model, inputs)
    change(model)
    expected = _asked_anew(model, inputs)
    for _ in range(3):
        _assert_same(_forward(model, inputs), expected)
    same = torch.equal(before.last_hidden_state.float(), expected.last_hidden_state.float())
    pooled = "pooler_output" in expected and torch.equal(
        before.pooler_output.float(), expected.pooler_output.float()
    )
    assert not (same and pooled), "a change that changes nothing shows nothing"


def test_dropout_of_one_module_is_noticed(model, inputs):
    _forward(model, inputs)
    expected = _at_once(model, inputs)
    dropout = _layer(model).output.dropout
    dropout.p = 0.5
    _forward(model, inputs)
    _assert_same(_at_once(model, inputs), expected)
    dropout.training = True
    before = _calls()
    assert not torch.equal(_forward(model, inputs).last_hidden_state, expected.last_hidden_state)
    assert _calls() == before


def test_a_step_of_an_optimizer_is_noticed(model, inputs):
    """One changed what no sample of a weight shows, as a kernel of a library's own may."""
    _forward(model, inputs)
    _layer(model).output.dense.weight.data[0, 1] += 5
    torch.optim.SGD(model.parameters()).step()
    expected, before = _asked_anew(model, inputs), _calls()
    _assert_same(_forward(model, inputs), expected)
    assert _calls() == before
    _assert_same(_at_once(model, inputs), expected)


def test_what_has_changed_is_prepared_again(model, inputs):
    _forward(model, inputs)
    _layer(model).output.dense.weight.data.mul_(2)
    _forward(model, inputs)
    _at_once(model, inputs)


def test_a_model_that_one_call_cannot_compute_is_asked_about_that_once(model, inputs, monkeypatch):
    _layer(model).output.dense.register_forward_hook(lambda *_: None)
    _forward(model, inputs)
    looked = []
    monkeypatch.setattr(type(model), "why_layers_are_called", lambda self: looked.append(1))
    found = model.weight_cache.prepared[None]
    assert found.compiled is None
    _forward(model, inputs)
    assert model.weight_cache.prepared[None] is found
    assert len(looked) == 1  # by the packed forward itself


def test_threads_share_what_was_prepared(model):
    batches = [_inputs(model, lengths) for lengths in ((3, 9), (12,), (1, 1, 5), (16, 2))]
    expected = [_asked_anew(model, inputs) for inputs in batches]
    _forward(model, batches[0])
    wrong = []

    def run(inputs, wanted):
        for _ in range(20):
            if not torch.equal(_forward(model, inputs).pooler_output, wanted.pooler_output):
                wrong.append(inputs)

    threads = [
        threading.Thread(target=run, args=pair) for pair in zip(batches, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_model_that_was_prepared_is_freed():
    model = _model()
    inputs = _inputs(model)
    _forward(model, inputs)
    _at_once(model, inputs)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_heads_take_it(inputs):
    """Sequence classification reads the pooler, and its own head stays what it was."""
    head = fastbert.BertForSequenceClassification(small_bert_config()).eval()
    expected = _asked_anew(head, inputs)
    _forward(head, inputs)
    _assert_same(_at_once(head, inputs), expected)
