"""bias_gelu in every backend that can run here, against torch's GELU in float64."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.dispatch import use_backend
from fastbert.ops.bias_gelu import bias_gelu, bias_gelu_bwd, bias_gelu_fwd
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran

OP = "bias_gelu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]
BACKENDS = ["reference", "cpu", "triton"]


def plain(x, bias=None, *, approximate):
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
# One row, rows past a block of 64 and of 512, odd widths, three dimensions.
@pytest.mark.parametrize("shape", [(1, 1), (130, 33), (3, 1030), (2, 3, 7)], ids=str)
def test_bias_gelu_matches_reference(backend, shape, form, dtype):
    for bias in (torch.randn(shape[-1]), None):
        with assert_ran("bias_gelu_fwd", backend.name), assert_ran("bias_gelu_bwd", backend.name):
            op_check(
                lambda **a: bias_gelu(**a, approximate=form),
                lambda **a: plain(**a, approximate=form),
                {"x": 3 * torch.randn(shape), "bias": bias},
                dtype,
                name="bias_gelu",
                reduction_rows=shape[0],
            )


@pytest.mark.parametrize("form", FORMS)
def test_bias_gelu_every_magnitude(backend, form):
    """All exponents of fp32, both signs: no overflow, no NaN, the identity above, 0 below."""
    exponents = torch.arange(-149, 126, dtype=torch.float64)
    x = torch.cat([sign * 2.0**exponents * f for sign in (-1, 1) for f in (1.0, 1.37)]).float()
    x = x[x.isfinite()]
    y = bias_gelu(x, approximate=form)
    oracle = F.gelu(x.double(), approximate=form)
    assert ((y - oracle).abs() <= 6e-7 * (1 + oracle.abs())).all()
    dx = bias_gelu_bwd(torch.ones_like(x), x, None, form)[0]
    leaf = x.double().requires_grad_()
    F.gelu(leaf, approximate=form).sum().backward()
    small = x.abs() < 1e4
    assert ((dx - leaf.grad)[small].abs() <= 2e-6).all()


def test_bias_gelu_extreme_values(backend):
    x = torch.tensor([torch.inf, torch.nan, 0.0, -0.0, 40.0, -40.0])
    for form in FORMS:
        y = bias_gelu(x, approximate=form)
        assert y[1].isnan()
        assert y[2:].tolist() == [0.0, 0.0, 40.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_bias_gelu_empty(backend, shape):
    x = torch.randn(shape, requires_grad=True)
    bias = torch.randn(shape[-1], requires_grad=True)
    y = bias_gelu(x, bias, approximate="none")
    y.sum().backward()
    assert y.shape == shape
    assert not bias.grad.any()


def test_bias_gelu_noncontiguous(backend):
    op_check(
        lambda **a: bias_gelu(**a, approximate="none"),
        lambda **a: plain(**a, approximate="none"),
        {"x": torch.randn(9, 16), "bias": torch.randn(16)},
        torch.float32,
        name="bias_gelu",
        layout="noncontiguous",
    )


def test_bias_gelu_cross_backend():
    """Any forward may meet any backward: what forward saves is one contract."""
    x, bias = torch.randn(70, 20), torch.randn(20)
    results = []
    for forward in BACKENDS:
        for backward in BACKENDS:
            with use_backend(bias_gelu=forward):
                y = bias_gelu_fwd(x, bias, "none")
            with use_backend(bias_gelu=backward):
                results.append(bias_gelu_bwd(y, x, bias, "none"))
    for dx, dbias in results[1:]:
        torch.testing.assert_close(dx, results[0][0], rtol=0, atol=2e-6)
        torch.testing.assert_close(dbias, results[0][1], rtol=0, atol=1e-4)


def test_bias_gelu_deterministic_for_any_thread_count(backend):
    x, bias, dy = torch.randn(700, 33), torch.randn(33), torch.randn(700, 33)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(bias_gelu_bwd(dy, x, bias, "none"))
    torch.set_num_threads(before)
    if backend.name == "reference":
        return
    for dx, dbias in results[1:]:
        assert_bitwise_equal(dx, results[0][0], "dx")
        assert_bitwise_equal(dbias, results[0][1], "dbias")


def test_bias_gelu_opcheck(backend):
    x, bias = torch.randn(5, 8), torch.randn(8)
    torch.library.opcheck(bias_gelu_fwd, (x, bias, "none"))
    torch.library.opcheck(bias_gelu_bwd, (x, x, bias, "tanh"))
    torch.library.opcheck(bias_gelu_bwd, (x, x, None, "tanh"))


def test_bias_gelu_compile_fullgraph():
    def step(x, bias):
        return bias_gelu(x, bias, approximate="none") * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        x, bias = torch.randn(rows, 12), torch.randn(12)
        runs = []
        for function in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, bias)]
            function(*leaves).square().sum().backward()
            runs.append([leaf.grad for leaf in leaves])
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b)


def test_bias_gelu_second_order_raises():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(bias_gelu(x, approximate="none").sum(), x, create_graph=True)


def test_bias_gelu_bad_input_raises():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="approximate"):
        bias_gelu(x, approximate="erf")
    with pytest.raises(ValueError, match=r"\(8,\), got \(7,\)"):
        bias_gelu(x, torch.randn(7), approximate="none")
    with use_backend(bias_gelu="cpu"), pytest.raises(NotImplementedError, match="float64"):
        bias_gelu(x.double(), approximate="none")


@pytest.mark.slow
def test_bias_gelu_int64_offsets():
    """More than 2^31 elements, in the C++ kernel and in torch."""
    x = torch.zeros(2**31 + 48, dtype=torch.bfloat16)
    x[-40:] = torch.linspace(-3, 3, 40)
    y = bias_gelu(x, approximate="none")
    assert_bitwise_equal(y[-40:], F.gelu(x[-40:]), "tail")
    assert not y[:1000].any()
