"""The norm of `add_layer_norm` by NVIDIA apex, which is stood in for (conftest.py)."""

import sys

import pytest
import torch

from fastbert import use_backend
from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.testing.compare import assert_close_to_oracle
from fastbert.testing.counters import assert_ran

RNG = torch.tensor([7, 8])
ROWS, COLUMNS = 9, 24


def tensors():
    return {
        "x": torch.randn(ROWS, COLUMNS),
        "residual": torch.randn(ROWS, COLUMNS),
        "weight": torch.randn(COLUMNS),
        "bias": torch.randn(COLUMNS),
        "linear_bias": torch.randn(COLUMNS),
    }


def results(backend, dtype, values, dropout_p):
    """y, h and the gradients of every input."""
    leaves = {name: t.to(dtype).requires_grad_() for name, t in values.items()}
    options = {"eps": 1e-3, "dropout_p": dropout_p, "site": 3, "rng_state": RNG}
    with use_backend(add_layer_norm=backend):
        y, h = add_layer_norm(**leaves, **options, return_sum=True)
    factor = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(dtype)
    loss = (y * factor).sum() + (h * factor).sum()
    return y, h, *torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_apex_normalises_the_sum(apex, dtype, dropout_p):
    """With the elements dropped that every implementation drops."""
    values = {name: t.to(dtype) for name, t in tensors().items()}
    with assert_ran("add_layer_norm_fwd", "apex"):
        ours = results("apex", dtype, values, dropout_p)
    assert apex[0][1] == 1e-3
    plain = results("reference", dtype, values, dropout_p)
    oracle = results("reference", torch.float64, values, dropout_p)
    # apex is given h as rounded to its dtype, the reference takes the statistics before.
    for a, o, p, name in zip(ours, oracle, plain, ("y", "h", *values), strict=True):
        if dtype == torch.float32:
            assert_close_to_oracle(a, o, p, name, reduction_rows=ROWS)
        else:
            assert torch.linalg.vector_norm(a.double() - o) < 0.02 * torch.linalg.vector_norm(o)


def test_apex_under_autocast(apex):
    values = tensors()
    del values["linear_bias"]
    with use_backend("apex"), torch.autocast("cpu", torch.bfloat16):
        assert add_layer_norm(**values, eps=1e-5).dtype == torch.float32
    assert apex[0][0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": None}, "it needs a bias"),
        ({"weight": torch.ones(COLUMNS).bfloat16()}, "of one dtype"),
        ({"x": torch.ones(0, COLUMNS), "residual": None}, "at least one row"),
    ],
)
def test_apex_refuses(apex, change, message):
    with use_backend("apex"), pytest.raises(NotImplementedError, match=message):
        add_layer_norm(**{**tensors(), **change}, eps=1e-5)
    assert apex == []


def test_apex_of_the_package_index_is_told_apart(apex, monkeypatch):
    """It is importable as `apex`, and has no `amp_C`."""
    monkeypatch.delitem(sys.modules, "amp_C")
    with use_backend("apex"), pytest.raises(NotImplementedError, match="is not NVIDIA's"):
        add_layer_norm(**tensors(), eps=1e-5)
    monkeypatch.delitem(sys.modules, "apex")
    with use_backend("apex"), pytest.raises(NotImplementedError, match=r"github.com/NVIDIA/apex"):
        add_layer_norm(**tensors(), eps=1e-5)
    assert apex == []


def test_apex_takes_cuda_tensors_only():
    with use_backend("apex"), pytest.raises(NotImplementedError, match="it takes CUDA tensors"):
        add_layer_norm(**tensors(), eps=1e-5)
