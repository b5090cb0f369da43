"""linear_gelu and gelu_mlp against torch's linear and gelu."""

import pytest
import torch

from fastbert.ops.linear_gelu import (
    gelu_mlp,
    gelu_mlp_bwd,
    linear_gelu,
    linear_gelu_bwd,
    linear_gelu_fwd,
)
from fastbert.reference.linear_gelu import gelu_mlp_reference, linear_gelu_reference
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.memory import saved_bytes

OP = "linear_gelu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]


def inputs(rows, width, inner, bias=True):
    return {
        "x": torch.randn(rows, width),
        "weight": torch.randn(inner, width) * width**-0.5,
        "bias": torch.randn(inner) if bias else None,
    }


def mlp_inputs(rows, width, inner, bias=True):
    values = inputs(rows, width, inner, bias)
    return {
        "x": values["x"],
        "weight_in": values["weight"],
        "bias_in": values["bias"],
        "weight_out": torch.randn(width, inner) * inner**-0.5,
        "bias_out": torch.randn(width) if bias else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 768, 96), (13, 7, 5), (40, 48, 33)], ids=str)
def test_linear_gelu_matches_reference(backend, shape, form, dtype):
    with assert_ran("linear_gelu_fwd", backend.name):
        op_check(
            lambda **a: linear_gelu(**a, approximate=form),
            lambda **a: linear_gelu_reference(**a, approximate=form),
            inputs(*shape),
            dtype,
            name="linear_gelu",
            reduction_rows=shape[0],
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gelu_mlp_matches_reference(backend, form, bias, dtype):
    op_check(
        lambda **a: gelu_mlp(**a, approximate=form),
        lambda **a: gelu_mlp_reference(**a, approximate=form),
        mlp_inputs(20, 16, 40, bias),
        dtype,
        name="gelu_mlp",
        reduction_rows=20,
    )


def test_gelu_mlp_saves_the_preactivation_only():
    values = {k: v.requires_grad_() for k, v in mlp_inputs(64, 16, 40).items()}
    saved = saved_bytes(
        lambda: gelu_mlp(**values, approximate="none"), [v for k, v in values.items() if k != "x"]
    )
    assert saved == 64 * (16 + 40) * 4


def test_gelu_mlp_empty(backend):
    values = {k: v.requires_grad_() for k, v in mlp_inputs(0, 8, 12).items()}
    y = gelu_mlp(**values, approximate="none")
    y.sum().backward()
    assert y.shape == (0, 8)
    assert not values["weight_in"].grad.any()


def test_gelu_mlp_noncontiguous(backend):
    op_check(
        lambda **a: gelu_mlp(**a, approximate="none"),
        lambda **a: gelu_mlp_reference(**a, approximate="none"),
        mlp_inputs(9, 16, 20),
        torch.float32,
        name="gelu_mlp",
        layout="noncontiguous",
    )


@pytest.mark.parametrize("frozen", ["x", "weight_in", "bias_in", "weight_out", "bias_out"])
def test_gelu_mlp_frozen(backend, frozen):
    values = mlp_inputs(9, 16, 20)
    runs = []
    for function in (gelu_mlp, gelu_mlp_reference):
        leaves = {k: v.clone().requires_grad_(k != frozen) for k, v in values.items()}
        function(**leaves, approximate="none").square().sum().backward()
        runs.append({k: leaf.grad for k, leaf in leaves.items()})
    assert runs[0].pop(frozen) is None
    for name, gradient in runs[0].items():
        torch.testing.assert_close(gradient, runs[1][name], rtol=1e-4, atol=1e-5)


def test_gelu_mlp_autocast(backend):
    op_check(
        lambda **a: gelu_mlp(**a, approximate="none"),
        lambda **a: gelu_mlp_reference(**a, approximate="none"),
        mlp_inputs(9, 16, 20),
        torch.float32,
        name="gelu_mlp",
        autocast=torch.bfloat16,
        reduction_rows=9,
    )


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_gelu_mlp_adds_the_residual_gradient(backend, autocast):
    def ours(**values):
        out, residual = gelu_mlp(**values, approximate="none", return_input=True)
        return out + residual.to(out.dtype) * 3

    def plain(x, **values):
        out = gelu_mlp_reference(x, **values, approximate="none")
        return out + x.to(out.dtype) * 3

    for shape in ((9, 16, 20), (70, 64, 40)):
        op_check(
            ours,
            plain,
            mlp_inputs(*shape),
            torch.float32,
            name="gelu_mlp",
            autocast=autocast,
            reduction_rows=shape[0],
        )


def test_gelu_mlp_deterministic(backend):
    values = mlp_inputs(100, 32, 64)
    runs = []
    for _ in range(2):
        leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
        gelu_mlp(**leaves, approximate="none").square().sum().backward()
        runs.append(leaves)
    for name in values:
        assert_bitwise_equal(runs[0][name].grad, runs[1][name].grad, name)


def test_linear_gelu_opcheck(backend):
    x, weight, bias = inputs(5, 8, 6).values()
    torch.library.opcheck(linear_gelu_fwd, (x, weight, bias, None, "none", False))
    torch.library.opcheck(linear_gelu_fwd, (x, weight, bias, None, "none", True))
    y, preact = linear_gelu_fwd(x, weight, bias, None, "none", True)
    for needs in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(linear_gelu_bwd, (y, x, weight, bias, preact, "none", *needs))
    out = weight.t().contiguous()
    for needs in ([True] * 3, [False, False, True], [True, False, False]):
        arguments = (x, x, weight, bias, preact, out, x[0], "tanh", needs)
        torch.library.opcheck(gelu_mlp_bwd, arguments)
        torch.library.opcheck(gelu_mlp_bwd, (*arguments, x))


def test_linear_gelu_compile_fullgraph():
    def step(**values):
        return gelu_mlp(**values, approximate="none") * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        values = mlp_inputs(rows, 12, 20)
        runs = []
        for function in (step, compiled):
            leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
            function(**leaves).square().sum().backward()
            runs.append(leaves)
        for name in values:
            torch.testing.assert_close(runs[0][name].grad, runs[1][name].grad)


@pytest.mark.parametrize("function", [linear_gelu, gelu_mlp])
def test_linear_gelu_second_order_raises(function):
    values = (inputs if function is linear_gelu else mlp_inputs)(4, 8, 6)
    x = values["x"].requires_grad_()
    loss = function(**values, approximate="none").sum()
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_linear_gelu_bad_input_raises():
    x, weight, bias = inputs(4, 8, 6).values()
    with pytest.raises(ValueError, match="approximate"):
        linear_gelu(x, weight, bias, approximate="fast")
    with pytest.raises(ValueError, match="weight"):
        linear_gelu(x, weight.t(), bias, approximate="none")
    with pytest.raises(ValueError, match="bias"):
        linear_gelu(x, weight, bias[:3], approximate="none")
    with pytest.raises(ValueError, match="bias_out"):
        gelu_mlp(x, weight, bias, weight.t(), bias, approximate="none")
    with pytest.raises(ValueError, match="weight_out"):
        gelu_mlp(x, weight, bias, weight, approximate="none")
