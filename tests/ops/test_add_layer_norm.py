"""add_layer_norm against torch's layer_norm of a sum."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.add_layer_norm import add_layer_norm, add_layer_norm_bwd, add_layer_norm_fwd
from fastbert.ops.philox import row_keep_mask
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran

OP = "add_layer_norm"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = torch.tensor([77, -3])
EPS = 1e-12


def inputs(rows, width, *, residual=True, bias=True, linear_bias=True):
    return {
        "x": torch.randn(rows, width),
        "residual": torch.randn(rows, width) if residual else None,
        "weight": torch.randn(width),
        "bias": torch.randn(width) if bias else None,
        "linear_bias": torch.randn(width) if linear_bias else None,
    }


def op(x, residual, weight, bias, linear_bias, **options):
    return add_layer_norm(
        x, residual, weight, bias, linear_bias=linear_bias, eps=EPS, return_sum=True, **options
    )


def plain(x, residual, weight, bias, linear_bias, dropout_p=0.0, site=0, rng_state=None):
    h = x if linear_bias is None else x + linear_bias
    if dropout_p:
        keep = row_keep_mask(rng_state, *x.shape, dropout_p=dropout_p, site=site)
        h = torch.where(keep, h, 0) * (65536 / (65536 - int(dropout_p * 65536 + 0.5)))
    if residual is not None:
        h = h + residual
    return F.layer_norm(h, x.shape[-1:], weight, bias, EPS), h


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 768), (13, 7), (70, 48), (5, 770)], ids=str)
def test_add_layer_norm_matches_reference(backend, shape, dtype):
    with assert_ran("add_layer_norm_fwd", backend.name):
        op_check(op, plain, inputs(*shape), dtype, name="add_layer_norm", reduction_rows=shape[0])


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("linear_bias", [True, False])
def test_add_layer_norm_every_part_is_optional(backend, residual, bias, linear_bias):
    values = inputs(6, 10, residual=residual, bias=bias, linear_bias=linear_bias)
    op_check(op, plain, values, torch.float32, name="add_layer_norm")
    op_check(op, plain, values, torch.bfloat16, name="add_layer_norm")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_add_layer_norm_dropout_mask(backend, dtype, residual):
    options = {"dropout_p": 0.3, "site": 9, "rng_state": RNG}
    op_check(
        lambda **a: op(**a, **options),
        lambda **a: plain(**a, **options),
        inputs(20, 35, residual=residual),
        dtype,
        name="add_layer_norm",
        reduction_rows=20,
    )


def test_add_layer_norm_drops_everything_at_one(backend):
    values = inputs(6, 10)
    x, residual = values["x"].requires_grad_(), values["residual"].requires_grad_()
    y = add_layer_norm(
        x, residual, values["weight"], values["bias"], eps=EPS, dropout_p=1.0, rng_state=RNG
    )
    y.square().sum().backward()
    torch.testing.assert_close(
        y, F.layer_norm(residual, (10,), values["weight"], values["bias"], EPS)
    )
    assert not x.grad.any()
    assert residual.grad.any()


def test_add_layer_norm_drops_infinity_to_zero(backend):
    """A dropped element is selected away; multiplied by 0 it would be NaN."""
    x = torch.full((1, 64), torch.inf)
    keep = row_keep_mask(RNG, 1, 64, dropout_p=0.5, site=0)
    x[keep] = 1.0
    y = add_layer_norm(x, torch.zeros(1, 64), torch.ones(64), eps=EPS, dropout_p=0.5, rng_state=RNG)
    assert y.isfinite().all()


@pytest.mark.parametrize("mean", [100.0, 1000.0])
def test_add_layer_norm_large_mean(backend, mean):
    """A mean far above the spread: one-pass variance would cancel (tracel-ai/burn#5607)."""
    x = mean + 0.1 * torch.randn(8, 768)
    y = add_layer_norm(x, None, torch.ones(768), torch.zeros(768), eps=EPS)
    expected = F.layer_norm(x.double(), (768,), eps=EPS)
    assert (y - expected).abs().max() < 0.02


def test_add_layer_norm_width_one(backend):
    """One element normalises to 0, and its weight gets no gradient (NVIDIA/apex#403)."""
    weight = torch.ones(1, requires_grad=True)
    y = add_layer_norm(torch.randn(4, 1), torch.randn(4, 1), weight, torch.zeros(1), eps=1e-5)
    y.sum().backward()
    assert not y.any()
    assert not weight.grad.any()


def test_add_layer_norm_wider_residual(backend):
    """Under autocast x is bf16 and the residual stream fp32: the sum and y stay fp32."""
    values = inputs(6, 10, linear_bias=False)
    x = values["x"].bfloat16().requires_grad_()
    residual = values["residual"].requires_grad_()
    y, h = add_layer_norm(x, residual, values["weight"], values["bias"], eps=EPS, return_sum=True)
    assert y.dtype == h.dtype == torch.float32
    torch.testing.assert_close(h, residual + x.float())
    (y * torch.randn_like(y)).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad, residual.grad.bfloat16())


def test_add_layer_norm_gradient_through_the_sum(backend):
    values = inputs(6, 10)
    runs = []
    for function in (op, plain):
        leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
        y, h = function(**leaves)
        (y.sin().sum() + (h * h).sum()).backward()
        runs.append(leaves)
    for name in values:
        torch.testing.assert_close(runs[0][name].grad, runs[1][name].grad, rtol=1e-4, atol=1e-4)


def test_add_layer_norm_empty(backend):
    values = {k: v.requires_grad_() for k, v in inputs(0, 10).items()}
    y, h = op(**values)
    y.sum().backward()
    assert (y.shape, h.shape) == ((0, 10), (0, 10))
    assert not values["weight"].grad.any()


def test_add_layer_norm_noncontiguous(backend):
    op_check(op, plain, inputs(9, 16), torch.float32, name="add_layer_norm", layout="noncontiguous")


def test_add_layer_norm_deterministic(backend):
    values = inputs(300, 64)
    runs = []
    for _ in range(2):
        leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
        op(**leaves, dropout_p=0.1, rng_state=RNG)[0].square().sum().backward()
        runs.append(leaves)
    for name in values:
        assert_bitwise_equal(runs[0][name].grad, runs[1][name].grad, name)


def test_add_layer_norm_opcheck(backend):
    x, weight = torch.randn(5, 8), torch.randn(8)
    for dropout_p, rng in ((0.0, None), (0.2, RNG)):
        torch.library.opcheck(
            add_layer_norm_fwd,
            (x, weight, x + 1, weight, weight, EPS, dropout_p, 3, rng, torch.float32, False),
        )
        y, h, mean, rstd = add_layer_norm_fwd(
            x, weight, x + 1, weight, weight, EPS, dropout_p, 3, rng, torch.float32, True
        )
        torch.library.opcheck(
            add_layer_norm_bwd,
            (y, None, h, weight, weight, mean, rstd, weight, dropout_p, 3, rng, torch.float32),
        )


def test_add_layer_norm_compile_fullgraph():
    def step(x, residual, weight, bias, linear_bias):
        return op(x, residual, weight, bias, linear_bias, dropout_p=0.1, rng_state=RNG)[0] * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        values = inputs(rows, 12)
        runs = []
        for function in (step, compiled):
            leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
            function(**leaves).square().sum().backward()
            runs.append(leaves)
        for name in values:
            torch.testing.assert_close(runs[0][name].grad, runs[1][name].grad)


def test_add_layer_norm_second_order_raises():
    values = {k: v.requires_grad_() for k, v in inputs(4, 8).items()}
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(op(**values)[0].sum(), values["x"], create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 3, 8)}, "x must"),
        ({"residual": torch.randn(3, 8)}, "residual"),
        ({"weight": torch.randn(1024)}, r"weight must have shape \(8,\), got \(1024,\)"),
        ({"bias": torch.randn(7)}, "bias"),
        ({"linear_bias": torch.randn(8, 1)}, "linear_bias"),
    ],
)
def test_add_layer_norm_bad_input_raises(change, message):
    with pytest.raises(ValueError, match=message):
        op(**{**inputs(4, 8), **change})
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="dropout_p"):
            op(**inputs(4, 8), dropout_p=wrong, rng_state=RNG)
    with pytest.raises(ValueError, match="rng_state"):
        op(**inputs(4, 8), dropout_p=0.1, rng_state=torch.tensor([1.0, 2.0]))
