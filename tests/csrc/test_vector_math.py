"""The kernels' exp and erf against float64, over all exponents, in units of the last place."""

import pytest
import torch

from fastbert import extension

ISAS = ("portable", "avx2", "avx512", "avx512_bf16")


@pytest.fixture(params=ISAS)
def isa(request):
    if request.param not in extension.cpu_isas():
        pytest.skip(f"this machine or build cannot run {request.param}")
    with extension.use_cpu_isa(request.param):
        yield request.param


def every_exponent() -> torch.Tensor:
    """2000 random mantissas of every exponent and sign, subnormal numbers included."""
    mantissa = torch.randint(0, 1 << 23, (2000, 255), dtype=torch.int32)
    bits = mantissa | (torch.arange(255, dtype=torch.int32) << 23)
    positive = bits.view(torch.float32).flatten()
    return torch.cat([positive, -positive])


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance in the spacing of floats at the exact value."""
    rounded = exact.abs().clamp(min=2.0**-126).float()
    spacing = torch.nextafter(rounded, torch.tensor(torch.inf)).double() - rounded.double()
    return (actual.double() - exact).abs() / spacing


@pytest.mark.parametrize("function", ["exp", "erf"])
def test_vector_math_every_exponent(isa, function):
    x = every_exponent()
    exact = getattr(torch, function)(x.double())
    actual = torch.ops.fastbert.vector_math(x, function)
    overflow = exact > torch.finfo(torch.float32).max
    assert (actual[overflow] == torch.inf).all()
    error = ulps(actual[~overflow], exact[~overflow])
    worst = error.argmax()
    assert error[worst] <= 2.0, f"off by {error[worst]} at {x[~overflow][worst].item()!r}"


@pytest.mark.parametrize("function", ["exp", "erf"])
def test_vector_math_where_it_is_used(isa, function):
    """A dense grid where results are neither 0 nor 1, and its mean error."""
    low, high = {"exp": (-104, 88.7), "erf": (-4, 4)}[function]
    x = torch.linspace(low, high, 2_000_003)
    exact = getattr(torch, function)(x.double())
    error = ulps(torch.ops.fastbert.vector_math(x, function), exact)
    assert error.max() <= 2.0
    assert error.mean() <= 0.5


def test_vector_math_special_values(isa):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    exp, erf = (torch.ops.fastbert.vector_math(x, f) for f in ("exp", "erf"))
    assert exp[0].isnan() and erf[0].isnan()
    assert exp[1:].tolist() == [torch.inf, 0.0, 1.0, 1.0]
    assert erf[1:].tolist() == [1.0, -1.0, 0.0, -0.0]
    assert torch.signbit(erf[4])


def test_vector_math_bad_input_raises(isa):
    with pytest.raises(ValueError, match="'exp' or 'erf'"):
        torch.ops.fastbert.vector_math(torch.zeros(1), "log")
    with pytest.raises(TypeError, match="fp32"):
        torch.ops.fastbert.vector_math(torch.zeros(1).double(), "exp")
