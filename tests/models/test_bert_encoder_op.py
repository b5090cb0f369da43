"""The encoder by one op: the layers' bits, only where nothing has to be called, never stale."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fastbert
from fastbert import dispatch, extension
from fastbert.dispatch import use_backend
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import head_inputs, model_pair

pytestmark = pytest.mark.skipif(
    not extension.cpu_isas(), reason="the one op is the C++ one; the compiled part is not built"
)


@pytest.fixture
def model():
    return model_pair("BertModel", small_bert_config())[0]


@pytest.fixture
def inputs():
    return head_inputs("BertModel", padded_batch((7, 3, 40), 99, seed=1), None)


def _forward(model, inputs, **kwargs):
    """The outputs, and how often the one op ran."""
    before = dispatch.counters()
    with torch.no_grad():
        outputs = model(**inputs, **kwargs)
    return outputs, (dispatch.counters() - before)["encoder_fwd", "cpu"]


def _by_layers(model, inputs, **kwargs):
    with use_backend(encoder="reference"):
        outputs, calls = _forward(model, inputs, **kwargs)
    assert calls == 0
    return outputs


def _assert_at_once(model, inputs, at_once=True):
    """The one op runs, or does not, and the numbers are the layers'."""
    outputs, calls = _forward(model, inputs)
    assert calls == at_once
    expected = _by_layers(model, inputs)
    for name, value in outputs.items():
        assert_bitwise_equal(value, expected[name], name)
    return outputs.last_hidden_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_the_bits_of_the_layers(inputs, dtype, activation):
    config = small_bert_config(hidden_act=activation)
    _assert_at_once(model_pair("BertModel", config, dtype=dtype)[0], inputs)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_the_layers_under_autocast(model, inputs, autocast):
    for dtype in (torch.float32, autocast):
        model.to(dtype)
        with torch.autocast("cpu", autocast):
            _assert_at_once(model, inputs)


def test_packed_input_with_filling(model):
    ids, positions = torch.randint(5, 99, (1, 12)), torch.arange(12)[None] % 5
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    mask = (torch.arange(12) < 9).long()[None]
    packed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    _assert_at_once(model, {**packed, "cu_seq_lens_q": starts})


@pytest.mark.parametrize("head", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_heads(inputs, head):
    model = model_pair(head, small_bert_config())[0]
    _, calls = _forward(model, inputs)
    assert calls == 1


def test_padded_positions_that_are_read(model):
    """Of texts padded on the left, with holes, on both sides, of no token."""
    mask = torch.ones(5, 9, dtype=torch.long)
    mask[0, :4], mask[1, 2:4], mask[2, :2], mask[2, 7:], mask[3] = 0, 0, 0, 0, 0
    inputs = {"input_ids": torch.randint(5, 99, (5, 9)), "attention_mask": mask}
    _assert_at_once(model, inputs)
    required = torch.ones_like(mask, dtype=torch.bool)
    _assert_at_once(model, {**inputs, "required_rows": required})
    # Of a text without a token transformers' eager attention averages padding, its sdpa gives 0.
    ours, theirs = model_pair("BertForQuestionAnswering", small_bert_config(), attention="sdpa")
    outputs, calls = _forward(ours, inputs)
    assert calls == 1
    with torch.no_grad():
        expected = theirs(**inputs)
    for name, value in outputs.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


# --- what has to be called is called --------------------------------------------------------------


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class _Scaled(nn.Module):
    def forward(self, weight):
        return 3 * weight


def _doubled(linear):
    wrapped = _Doubled(linear.in_features, linear.out_features)
    wrapped.load_state_dict(linear.state_dict())
    return wrapped


def _set(path, value):
    def change(model):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, value(getattr(owner, name)))

    return change


def _hooked(path, register):
    return lambda model: getattr(model.get_submodule(path), register)(_hook)


def _hook(module, *values):
    """Doubles what a module gives, or gets."""
    output = values[-1]
    return tuple(2 * v for v in output) if isinstance(output, tuple) else 2 * output


LAYER = "encoder.layer.1"
CALLED = {
    "forward hook": _hooked(f"{LAYER}.output.dense", "register_forward_hook"),
    "pre-hook": _hooked(f"{LAYER}.attention.self.query", "register_forward_pre_hook"),
    "hook on a norm": _hooked(f"{LAYER}.output.LayerNorm", "register_forward_hook"),
    "hook on a dropout": _hooked(f"{LAYER}.output.dropout", "register_forward_hook"),
    "hook on the layer": _hooked(LAYER, "register_forward_hook"),
    "hook on the activation": _hooked(
        f"{LAYER}.intermediate.intermediate_act_fn", "register_forward_hook"
    ),
    "forward of its own": lambda m: setattr(
        m.get_submodule(f"{LAYER}.output.dense"), "forward", lambda x: x[:, :48] * 2
    ),
    "parametrization": lambda m: parametrize.register_parametrization(
        m.get_submodule(f"{LAYER}.output.dense"), "weight", _Scaled()
    ),
    "derived linear": _set(f"{LAYER}.intermediate.dense", _doubled),
    "derived norm": _set(
        f"{LAYER}.output.LayerNorm", lambda n: type("Norm", (nn.LayerNorm,), {})(48, eps=n.eps)
    ),
    "other activation": _set(f"{LAYER}.intermediate.intermediate_act_fn", lambda _: nn.ReLU()),
    "eps of its own": lambda m: setattr(m.get_submodule(f"{LAYER}.output.LayerNorm"), "eps", 0.5),
    "scaling of its own": lambda m: setattr(
        m.get_submodule(f"{LAYER}.attention.self"), "scaling", 0.9
    ),
    "no bias": lambda m: setattr(m.get_submodule(f"{LAYER}.output.dense"), "bias", None),
}


@pytest.mark.parametrize("change", CALLED)
def test_what_is_not_plain_is_called(model, inputs, change):
    before = _assert_at_once(model, inputs)
    CALLED[change](model)
    after = _assert_at_once(model, inputs, at_once=False)
    assert not torch.equal(after, before)


def test_replaced_modules_are_seen(model, inputs):
    before = _assert_at_once(model, inputs)
    dense = model.encoder.layer[0].output.dense
    model.encoder.layer[0].output.dense = nn.Linear(dense.in_features, dense.out_features)
    assert not torch.equal(_assert_at_once(model, inputs), before)
    model.encoder.layer = model.encoder.layer[:1]
    _assert_at_once(model, inputs)


def test_dropout_in_force_calls_the_layers(model, inputs):
    for path in (f"{LAYER}.output.dropout", f"{LAYER}.attention.self"):
        model.get_submodule(path).train()
        _, calls = _forward(model, inputs)
        assert calls == 0
        model.eval()
    model.train()
    assert _forward(model, inputs)[1] == 0
    model.eval()
    _assert_at_once(model, inputs)


def test_calls_that_need_the_layers(model, inputs):
    states = _forward(model, inputs, output_hidden_states=True)
    assert states[1] == 0 and len(states[0].hidden_states) == 1 + len(model.encoder.layer)
    # The hooks that recorded them stay, and count for nothing.
    _assert_at_once(model, inputs)
    for room in ("linear", "attention", "add_layer_norm", "linear_gelu"):
        with use_backend(**{room: "reference"}):
            assert _forward(model, inputs)[1] == 0
    before = dispatch.counters()
    model(**inputs).last_hidden_state.sum().backward()
    assert (dispatch.counters() - before)["encoder_fwd", "cpu"] == 0


# --- never stale ----------------------------------------------------------------------------------


def _in_place(parameter):
    with torch.no_grad():
        parameter.mul_(1.5)


def _through_data(parameter):
    parameter.data.mul_(1.5)


def _new_data(parameter):
    parameter.data = parameter.data * 1.5


WRITES = {"in place": _in_place, "through data": _through_data, "new data": _new_data}
NAMES = (
    "attention.self.key.weight",
    "output.dense.weight",
    "intermediate.dense.bias",
    "attention.output.LayerNorm.weight",
    "output.LayerNorm.bias",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("write", WRITES)
def test_writes_are_seen(model, inputs, name, write):
    before = _assert_at_once(model, inputs)
    WRITES[write](model.get_parameter(f"{LAYER}.{name}"))
    assert not torch.equal(_assert_at_once(model, inputs), before)


def test_a_new_parameter_is_seen(model, inputs):
    before = _assert_at_once(model, inputs)
    dense = model.get_submodule(f"{LAYER}.output.dense")
    dense.weight = nn.Parameter(dense.weight * 2)
    assert not torch.equal(_assert_at_once(model, inputs), before)


def test_loaded_weights_are_seen(model, inputs):
    before = _assert_at_once(model, inputs)
    other = model_pair("BertModel", small_bert_config(), seed=5)[0]
    model.load_state_dict(other.state_dict())
    after = _assert_at_once(model, inputs)
    assert not torch.equal(after, before)
    assert torch.equal(after, _assert_at_once(other, inputs))


def test_copies_and_dtypes(model, inputs):
    before = _assert_at_once(model, inputs)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(_assert_at_once(again, inputs), before)
    model.to(torch.bfloat16)
    assert _assert_at_once(model, inputs).dtype == torch.bfloat16


def test_precision_setting_is_seen(model, inputs):
    """A weight packed for other products is packed anew."""
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        with extension.use_cpu_isa("best"):
            _assert_at_once(model, inputs)
    with extension.use_cpu_isa("avx2"):
        _assert_at_once(model, inputs)
    torch.set_float32_matmul_precision("highest")


def test_weights_the_splits_cannot_hold(model, inputs):
    _assert_at_once(model, inputs)
    with torch.no_grad():
        model.get_parameter(f"{LAYER}.output.dense.weight")[3, 5] = 1e30
    assert not _assert_at_once(model, inputs).isnan().all()


def test_a_wrapped_linear_is_called(model, inputs):
    peft = pytest.importorskip("peft")
    before = _assert_at_once(model, inputs)
    config = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    assert not torch.equal(_assert_at_once(wrapped, inputs, at_once=False), before)
    merged = wrapped.merge_and_unload()
    assert isinstance(merged, fastbert.BertModel)
    _assert_at_once(merged, inputs)
