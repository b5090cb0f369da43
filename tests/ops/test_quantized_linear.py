"""linear with weights in int8 against its specification, on every instruction set."""

import itertools

import pytest
import torch

from fastbert import extension
from fastbert.dispatch import use_backend
from fastbert.ops.linear import linear_fwd, quantize_weights
from fastbert.reference.quantized_linear import OUTLIERS, quantized_linear_reference
from fastbert.testing.compare import assert_bitwise_equal, assert_close_to_oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["weight_only", "dynamic"]
# One row, odd sizes, one input, several blocks in each direction, several pieces of a long sum.
SHAPES = [(1, 768, 96), (13, 7, 5), (5, 1, 3), (17, 40, 9), (70, 100, 33), (35, 6500, 40)]


@pytest.fixture(params=extension.CPU_ISAS)
def isa(request):
    if request.param not in extension.cpu_isas():
        pytest.skip(f"this machine cannot run {request.param}")
    with use_backend(linear="cpu"), extension.use_cpu_isa(request.param):
        yield request.param


def inputs(rows, width, outputs, dtype=torch.float32):
    """x, weight, bias; x with the outliers that hidden states have."""
    x = torch.randn(rows, width)
    x[::2, 3 % width] *= 20
    x[::3, 5 % width] *= 30
    weight = torch.randn(outputs, width) * width**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs).to(dtype)


def quantized(x, weight, bias, mode):
    return linear_fwd(x, [], [] if bias is None else [bias], quantize_weights([weight], mode))


def assert_as_specified(actual, values, mode, isa):
    rounds = isa in ("avx512_bf16", "amx")
    oracle, plain = (
        quantized_linear_reference(*values, mode, rounds_to_bf16=rounds, sums=sums)
        for sums in (torch.float64, torch.float32)
    )
    assert_close_to_oracle(actual, oracle, plain.to(actual.dtype), "y", op="linear")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_quantized_linear_matches_its_specification(isa, mode, shape, dtype):
    values = inputs(*shape, dtype)
    assert_as_specified(quantized(*values, mode), values, mode, isa)


@pytest.mark.parametrize("mode", MODES)
def test_quantized_linear_is_near_the_product_itself(isa, mode):
    x, weight, bias = inputs(64, 768, 64)
    exact = x.double() @ weight.double().t() + bias.double()
    error = (quantized(x, weight, bias, mode).double() - exact).norm() / exact.norm()
    assert error < (0.008 if mode == "weight_only" else 0.02)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(32, 32, 32), (64, 5), (7, 11, 40)], ids=str)
def test_quantized_linear_of_several_weights(isa, sizes, mode):
    x = torch.randn(20, 72)
    weights = [torch.randn(size, 72) / 8 for size in sizes]
    biases = [torch.randn(size) for size in sizes]
    together = linear_fwd(x, [], biases, quantize_weights(weights, mode))
    alone = [quantized(x, w, b, mode) for w, b in zip(weights, biases, strict=True)]
    assert_bitwise_equal(together, torch.cat(alone, 1), "y")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_quantized_linear_does_not_depend_on_the_rows_around(isa, mode, dtype):
    """Rows with outliers in other places; any number of threads."""
    x, weight, bias = inputs(75, 300, 70, dtype)
    packed, before = quantize_weights([weight], mode), torch.get_num_threads()
    together = linear_fwd(x, [], [bias], packed)
    for threads, (first, last) in itertools.product((1, 3), ((0, 1), (1, 34), (34, 75))):
        torch.set_num_threads(threads)
        alone = linear_fwd(x[first:last], [], [bias], packed)
        assert_bitwise_equal(alone, together[first:last], f"rows from {first}")
    torch.set_num_threads(before)


def test_dynamic_sums_are_the_same_on_every_machine(isa):
    """Whole numbers: what the portable kernels give."""
    values = inputs(40, 500, 48)
    with extension.use_cpu_isa("portable"):
        expected = quantized(*values, "dynamic")
    assert_bitwise_equal(quantized(*values, "dynamic"), expected, "y")


@pytest.mark.parametrize("count", range(OUTLIERS + 3))
def test_rows_with_so_many_outliers(isa, count):
    """The largest elements are multiplied as they are, as long as no further one is as large."""
    x, bias = torch.randn(33, 200), torch.zeros(16)
    for row in x:
        row[torch.randperm(200)[:count]] = 1000.0
    weight = torch.randint(-126, 127, (16, 200)).float()
    weight[:, 0] = 127  # whole numbers already
    actual = quantized(x, weight, bias, "dynamic")
    assert_as_specified(actual, (x, weight, bias), "dynamic", isa)
    exact = x.double() @ weight.double().t()
    error = (actual.double() - exact).square().mean().sqrt() / 127
    assert (error < 0.2) == (count <= OUTLIERS)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_no_numbers(isa, mode):
    x, weight, bias = inputs(40, 100, 33)
    x[2], x[3], x[4] = 0, 1e-38, torch.nan
    x[7, 5], x[35, 99] = torch.inf, torch.nan
    actual = quantized(x, weight, bias, mode)
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[4, 7, 35]] = True
    assert not actual[bad].isfinite().any() and actual[~bad].isfinite().all()
    assert_bitwise_equal(actual[2:3], bias[None], "a row of zeros")
    torch.testing.assert_close(actual[3], bias)


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_are_nothing(isa, mode):
    """Outputs of zeros and of tiny numbers; none at all; no rows."""
    x, weight, bias = inputs(9, 80, 12)
    weight[3], weight[4] = 0, 1e-39
    actual = quantized(x, weight, bias, mode)
    torch.testing.assert_close(actual[:, 3:5], bias[3:5].expand(9, 2))
    assert quantized(x[:0], weight, bias, mode).shape == (0, 12)
    without = quantized(x, weight, None, mode)
    torch.testing.assert_close(without + bias, actual)


def test_quantized_weights_take_a_quarter_of_the_memory():
    weight = torch.randn(3072, 768)
    for mode, share in (("weight_only", 1.04), ("dynamic", 1.01)):
        assert weight.numel() <= quantize_weights([weight], mode).nbytes < share * weight.numel()


def test_bad_input_raises():
    with pytest.raises(ValueError, match="mode must be 'weight_only' or 'dynamic', got 'int4'"):
        quantize_weights([torch.randn(4, 4)], "int4")
    with pytest.raises(ValueError, match="got no weights"):
        quantize_weights([], "dynamic")
    with pytest.raises(ValueError, match="as many columns as the first"):
        quantize_weights([torch.randn(32, 64), torch.randn(32, 128)], "dynamic")
    with pytest.raises(ValueError, match="at most 133144 inputs, got 133145"):
        quantize_weights([torch.zeros(1, 133145)], "dynamic")
    packed = quantize_weights([torch.randn(4, 5)], "dynamic")
    for nothing in (None, packed[:60], packed.repeat_interleave(2)[::2], torch.randn(4, 5)):
        with use_backend(linear="cpu"), pytest.raises(ValueError, match="neither weights nor pack"):
            linear_fwd(torch.randn(2, 4), [], [], nothing)
    with use_backend(linear="cpu"), pytest.raises(ValueError, match="x must have 5 columns"):
        linear_fwd(torch.randn(2, 4), [], [], packed)
