"""Cached copies of weights: made only without gradients, dropped at every chance of change."""

import copy
import io
import pickle
import threading

import pytest
import torch

import fastbert
from fastbert.cache import CachesWeights, Fingerprint
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import head_inputs, model_pair

# Queries, keys and values together, the attention's output, both of the feed-forward; the pooler's
# is one more.
COPIES_PER_LAYER = 4


def _expected_copies(model):
    return 1 + COPIES_PER_LAYER * model.config.num_hidden_layers


@pytest.fixture
def model():
    return model_pair("BertModel", small_bert_config())[0]


@pytest.fixture
def inputs():
    return head_inputs("BertModel", padded_batch((7, 3), 99, seed=1), None)


def _copies(model):
    return sum(len(m.weight_cache) for m in model.modules() if isinstance(m, CachesWeights))


def _forward(model, inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def test_cache_is_filled_without_gradients_only(model, inputs):
    model(**inputs)
    assert _copies(model) == 0
    first = _forward(model, inputs)
    assert _copies(model) == _expected_copies(model)
    assert torch.equal(_forward(model, inputs), first)
    model(**inputs)
    assert _copies(model) == 0


def test_cache_holds_casts_under_autocast(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        first = _forward(model, inputs)
        assert _copies(model) == _expected_copies(model)
        assert torch.equal(_forward(model, inputs), first)
        assert _copies(model) == _expected_copies(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.train(),
        lambda m: m.train().eval(),
        lambda m: m.to(torch.float32),
        lambda m: m.half().float(),
        lambda m: m.load_state_dict(m.state_dict()),
        fastbert.refresh,
    ],
    ids=["train", "eval", "to", "half", "load", "refresh"],
)
def test_cache_is_dropped(model, inputs, change):
    _forward(model, inputs)
    assert _copies(model)
    change(model)
    assert _copies(model) == 0


def test_eval_in_eval_keeps_the_copies(model, inputs):
    _forward(model, inputs)
    copies = _copies(model)
    model.eval()
    assert _copies(model) == copies > 0
    model.encoder.layer[0].train()
    _forward(model, inputs)
    model.eval()
    assert len(model.encoder.layer[0].weight_cache) == 0


def _assign(model, name, weight):
    model.load_state_dict({name: weight}, strict=False, assign=True)


def _swap(model, name, weight):
    torch.utils.swap_tensors(model.get_parameter(name), torch.nn.Parameter(weight))


def _load_by_swapping(model, name, weight):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: weight}, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("give", [_assign, _swap, _load_by_swapping])
def test_another_tensor_in_the_place_of_a_weight_is_noticed(inputs, give):
    ours, theirs = model_pair("BertModel", small_bert_config())
    _forward(ours, inputs)
    name = "encoder.layer.0.output.dense.weight"
    weight = ours.get_parameter(name).detach().flip(1)
    for model in (ours, theirs):
        give(model, name, weight.clone())
    rows = inputs["attention_mask"].bool()
    actual, expected = _forward(ours, inputs)[rows], _forward(theirs, inputs)[rows]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("saved", ["pickle", "torch.save", "deepcopy"])
def test_cache_is_left_out_of_copies(model, inputs, saved):
    expected = _forward(model, inputs)
    if saved == "pickle":
        again = pickle.loads(pickle.dumps(model))
    elif saved == "torch.save":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    else:
        again = copy.deepcopy(model)
    assert _copies(again) == 0
    assert _copies(model)
    assert torch.equal(_forward(again, inputs), expected)
    assert set(again.state_dict()) == set(model.state_dict())


def test_cache_in_inference_mode(inputs):
    """Inference tensors have no version; a model built there still notices a write."""
    with torch.inference_mode():
        model = model_pair("BertModel", small_bert_config())[0]
        first = model(**inputs).last_hidden_state
        assert torch.equal(model(**inputs).last_hidden_state, first)
        model.encoder.layer[0].attention.self.query.weight.mul_(3)
        assert not torch.equal(model(**inputs).last_hidden_state, first)


def test_cache_with_threads(model, inputs):
    expected = _forward(model, inputs)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(_forward(model, inputs))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(r, expected) for r in results)


def test_fingerprint_sees_what_versions_do_not():
    weight = torch.randn(40, 50)
    for change in (
        lambda w: w.data.mul_(1.001),
        lambda w: w.data.copy_(torch.randn_like(w)),
        lambda w: w.add_(1),
    ):
        print_before = Fingerprint([weight])
        assert print_before.matches([weight])
        change(weight)
        assert not print_before.matches([weight])
    print_before = Fingerprint([weight])
    assert not print_before.matches([weight.clone()])
    assert not print_before.matches([weight.t()])
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert not print_before.matches([weight])


def test_fingerprint_of_nan_and_small_dtypes():
    for weight in (
        torch.full((3, 3), torch.nan),
        torch.randn(3, 3, dtype=torch.bfloat16),
        torch.randn(5, dtype=torch.float64),
        torch.ones(0),
    ):
        assert Fingerprint([weight]).matches([weight])


@pytest.mark.parametrize(
    "shape", [(48, 48), (48, 192), (192, 48), (50, 48), (7, 99), (1, 5), (5, 1)]
)
def test_fingerprint_sees_every_row_and_block_of_columns(shape):
    """Ablations of heads and neurons, through `.data` or in inference mode, where no version
    tells."""
    rows, columns = shape
    weight = torch.randn(3, *shape)[1]
    prints = Fingerprint([weight])
    width = columns // rows + 1
    for row in range(rows):
        assert _notices(prints, weight, weight[row]), row
    for first in range(columns - width + 1):
        assert _notices(prints, weight, weight[:, first : first + width]), first


def _notices(prints, weight, part):
    kept = part.clone()
    part.data.zero_()
    seen = not prints.matches([weight])
    part.data.copy_(kept)
    assert prints.matches([weight])
    return seen


def test_ablated_head_is_noticed():
    ours, theirs = model_pair("BertModel", small_bert_config())
    inputs = head_inputs("BertModel", padded_batch((7, 7), 99, seed=2), None)
    with torch.inference_mode():
        before = ours(**inputs).last_hidden_state
        for model in (ours, theirs):
            model.encoder.layer[0].attention.self.value.weight.data[12:24] = 0
        after = ours(**inputs).last_hidden_state
        torch.testing.assert_close(after, theirs(**inputs).last_hidden_state, rtol=0, atol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)
