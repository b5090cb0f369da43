"""linear against torch's, one weight and several, and its arithmetic in fp32 and bf16."""

import pytest
import torch
import torch.nn.functional as F

from fastbert import extension
from fastbert.dispatch import use_backend
from fastbert.ops.linear import linear, linear_bwd, linear_fwd, pack_weights, quantize_weights
from fastbert.testing.compare import assert_bitwise_equal, op_check, relative_l2
from fastbert.testing.counters import assert_ran

OP = "linear"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows, width, inner, bias=True):
    return {
        "x": torch.randn(rows, width),
        "weight": torch.randn(inner, width) * width**-0.5,
        "bias": torch.randn(inner) if bias else None,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One row, odd sizes, half a block and a row more, more than one block in each direction, more than
# one piece of a long sum.
@pytest.mark.parametrize(
    "shape", [(1, 768, 96), (13, 7, 5), (17, 40, 9), (70, 48, 33), (35, 1000, 40)], ids=str
)
def test_linear_matches_reference(backend, shape, dtype):
    with assert_ran("linear_fwd", backend.name), assert_ran("linear_bwd", backend.name):
        op_check(linear, F.linear, inputs(*shape), dtype, name="linear", reduction_rows=shape[0])


@pytest.mark.parametrize("sizes", [(32, 32, 32), (64, 5), (7, 11, 40)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_several_weights(backend, sizes, bias):
    names = [f"w{i}" for i in range(len(sizes))]
    values = {"x": torch.randn(20, 24)}
    values |= {n: torch.randn(size, 24) / 5 for n, size in zip(names, sizes, strict=True)}
    if bias:
        values |= {f"b{i}": torch.randn(size) for i, size in enumerate(sizes)}

    def op(x, **parameters):
        weights = [parameters[n] for n in names]
        biases = [parameters[f"b{i}"] for i in range(len(sizes))] if bias else None
        return linear(x, weights, biases)

    def plain(x, **parameters):
        outputs = [F.linear(x, parameters[n], parameters.get(f"b{n[1:]}")) for n in names]
        return torch.cat(outputs, 1)

    for dtype in (torch.float32, torch.bfloat16):
        op_check(op, plain, values, dtype, name="linear", reduction_rows=20)


def _with_residual(x, weight, bias):
    """y and what a residual connection makes of x, for their gradients to meet in x."""
    y, residual = linear(x, weight, bias, return_input=True)
    return torch.cat([y, residual.to(y.dtype) * 3], 1)


def _plain_with_residual(x, weight, bias):
    y = F.linear(x, weight, bias)
    return torch.cat([y, x.to(y.dtype) * 3], 1)


@pytest.mark.parametrize("dtype", [*DTYPES, "autocast"], ids=str)
@pytest.mark.parametrize("shape", [(1, 768, 96), (13, 7, 5), (70, 48, 33)], ids=str)
def test_linear_adds_the_residual_gradient(backend, shape, dtype):
    autocast = torch.bfloat16 if dtype == "autocast" else None
    op_check(
        _with_residual,
        _plain_with_residual,
        inputs(*shape),
        torch.float32 if autocast else dtype,
        name="linear",
        reduction_rows=shape[0],
        autocast=autocast,
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_residual_gradient_in_the_product(autocast):
    """No addition and no cast of the gradient of x by passes of their own."""
    if extension.cpu_isa() is None:
        pytest.skip("the compiled part is not built")
    x, weight, bias = inputs(40, 64, 32).values()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear(x, weight, bias, return_input=True)
    gradients = [torch.randn_like(t) for t in out]
    with torch.profiler.profile() as profile:
        torch.autograd.grad(out, [x], gradients)
    assert not {"aten::add", "aten::add_", "aten::copy_"} & {e.name for e in profile.events()}


@pytest.mark.parametrize("used", ["y", "input", "neither needs x"])
def test_linear_returned_input_alone(backend, used):
    x, weight, bias = inputs(6, 8, 4).values()
    x.requires_grad_(used != "neither needs x")
    weight.requires_grad_()
    y, residual = linear(x, weight, bias, return_input=True)
    assert torch.equal(residual, x)
    if used == "input":
        (residual * 2).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2)) and weight.grad is None
        return
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(4, -1))
    if used == "y":
        torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(6, -1))


def test_linear_autocast_keeps_the_weights_precision(backend):
    """A wide weight is rounded on the way in; its gradient is not rounded on the way out."""
    values = inputs(9, 16, 20)
    leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(**leaves)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves.values())
    rounded = {k: v.bfloat16().double() for k, v in values.items()}
    expected = F.linear(rounded["x"], rounded["weight"], values["bias"].double())
    assert relative_l2(y, expected) < 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_narrow_weight(backend, dtype):
    """An fp32 input meets a weight of half precision, whole blocks and an infinity among them."""
    x, weight, dy = torch.randn(40, 64), torch.randn(96, 64).to(dtype), torch.randn(40, 96)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = linear(*leaves)
    dx, dweight = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(y, x @ weight.float().t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, dy @ weight.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dweight, (dy.t() @ x).to(dtype), rtol=2**-7, atol=1e-4)
    weight[3, 5] = torch.inf
    assert torch.equal(linear(x, weight)[:, 3], x[:, 5] * torch.inf)


def test_linear_packed(backend):
    """A packed weight gives the same bits, and one packed for other arithmetic is passed over."""
    x, weight, bias = inputs(40, 64, 48).values()
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            plain = linear(x.to(dtype), weight, bias)
            packed = pack_weights([weight], dtype)
            assert_bitwise_equal(linear(x.to(dtype), weight, bias, packed=packed), plain, "packed")
            other = pack_weights([weight], torch.float16)
            assert_bitwise_equal(linear(x.to(dtype), weight, bias, packed=other), plain, "other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_is_batch_invariant(backend, dtype):
    """A row's result is the same alone, among others, at any place and for any thread count."""
    if backend.name == "reference":
        pytest.skip("torch's matmul depends on the number of rows")
    x, weight, bias = (t.to(dtype) for t in inputs(150, 200, 96).values())
    before = torch.get_num_threads()
    together = linear(x, weight, bias)
    for rows in (slice(0, 1), slice(149, 150), slice(31, 64), slice(7, 140)):
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_bitwise_equal(linear(x[rows], weight, bias), together[rows], f"{rows}")
    torch.set_num_threads(before)


def test_linear_deterministic_for_any_thread_count(backend):
    if backend.name == "reference":
        pytest.skip("torch's own sums")
    x, weight, bias = inputs(300, 40, 33).values()
    dy = torch.randn(300, 33)
    before, runs = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        dx, (dweight,), (dbias,) = linear_bwd(dy, x, [weight], [bias], True, True)
        runs.append((dx, dweight, dbias))
    torch.set_num_threads(before)
    for run in runs[1:]:
        for name, a, b in zip(("dx", "dweight", "dbias"), run, runs[0], strict=True):
            assert_bitwise_equal(a, b, name)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, 1e-42])
@pytest.mark.parametrize("place", ["x", "weight", "dy"])
def test_linear_extreme_values(backend, place, value):
    """Infinities, NaN, the largest and subnormal numbers: as in plain fp32, and only where they
    are."""
    torch.manual_seed(3)
    x, weight, _ = inputs(40, 70, 36).values()
    dy = torch.randn(40, 36)
    {"x": x, "weight": weight, "dy": dy}[place][5, 3] = value
    if value == 1e-42:
        # Seen only where nothing larger stands beside it.
        {"x": x, "weight": weight, "dy": dy}[place][5] = value
        weight *= 1e20 if place != "weight" else 1
        x *= 1e20 if place == "weight" else 1
    y = linear_fwd(x, [weight], [], None)
    dx, (dweight,), _ = linear_bwd(dy, x, [weight], [], True, True)
    for name, actual, expected in (
        ("y", y, x.double() @ weight.double().t()),
        ("dx", dx, dy.double() @ weight.double()),
        ("dweight", dweight, dy.double().t() @ x.double()),
    ):
        expected = expected.float()
        assert torch.equal(actual.isnan(), expected.isnan()), name
        finite = expected.isfinite()
        assert torch.equal(actual[expected.isinf()], expected[expected.isinf()]), name
        scale = expected[finite].abs().clamp(min=1e-30)
        rows = (actual[finite] - expected[finite]).abs() / scale.clamp(min=scale.mean() * 1e-3)
        assert rows.max() < 1e-3, name


@pytest.mark.parametrize("sizes", [(32,), (7, 33)], ids=["strided", "stacked"])
def test_linear_extreme_rows_of_copied_weights(backend, sizes):
    """Rows that need plain fp32 read weights that had to be copied first."""
    x = torch.randn(40, 70)
    x[5, 3] = torch.inf
    weights = [torch.randn(70, size).t() for size in sizes]
    y = linear_fwd(x, weights, [], None)
    expected = x.double() @ torch.cat(weights).double().t()
    torch.testing.assert_close(y, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [768, 3072])
def test_linear_precision_setting(depth):
    """Six products at "highest", three at "high": as exact as plain fp32, and 2^-16."""
    if "amx" not in extension.cpu_isas():
        pytest.skip("this machine has no AMX")
    x, weight, _ = inputs(64, depth, 64, bias=False).values()
    oracle = x.double() @ weight.double().t()
    errors = {}
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        errors[precision] = relative_l2(linear(x, weight), oracle)
    torch.set_float32_matmul_precision("highest")
    with extension.use_cpu_isa("avx512"):
        errors["plain"] = relative_l2(linear(x, weight), oracle)
    assert errors["highest"] < 2.5e-7
    assert errors["highest"] < errors["plain"] < 5e-7
    assert 1e-6 < errors["high"] < 6e-6


def test_linear_empty(backend):
    values = {k: v.requires_grad_() for k, v in inputs(0, 8, 12).items()}
    y = linear(**values)
    y.sum().backward()
    assert y.shape == (0, 12)
    assert not values["weight"].grad.any()
    assert linear(torch.randn(3, 0), torch.randn(4, 0)).eq(0).all()


def test_linear_noncontiguous(backend):
    op_check(
        linear,
        F.linear,
        inputs(40, 36, 33),
        torch.float32,
        name="linear",
        layout="noncontiguous",
    )


@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_linear_frozen(backend, frozen):
    leaves = {k: v.requires_grad_(k != frozen) for k, v in inputs(9, 16, 20).items()}
    linear(**leaves).sum().backward()
    assert {k for k, leaf in leaves.items() if leaf.grad is None} == {frozen}


def test_linear_opcheck(backend):
    x, weight, bias = inputs(5, 8, 6).values()
    torch.library.opcheck(linear_fwd, (x, [weight, weight], [bias, bias], None))
    torch.library.opcheck(linear_fwd, (x, [weight], [], None))
    dy = torch.randn(5, 6)
    for needs in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(linear_bwd, (dy, x, [weight], [bias], *needs))
    torch.library.opcheck(linear_bwd, (dy, x, [weight], [bias], True, True, x.clone()))


def test_linear_compile_fullgraph():
    def step(x, weight, bias):
        return linear(x, [weight, weight * 2], [bias, bias + 1]) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        values = inputs(rows, 12, 20)
        runs = []
        for function in (step, compiled):
            leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
            function(**leaves).square().sum().backward()
            runs.append(leaves)
        for name in values:
            torch.testing.assert_close(runs[0][name].grad, runs[1][name].grad)


def test_linear_second_order_raises():
    values = {k: v.requires_grad_() for k, v in inputs(4, 8, 6).items()}
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(linear(**values).sum(), values["x"], create_graph=True)


DAMAGES = {
    "cut short": lambda p: p[:-1],
    "the header alone": lambda p: p[:64],
    "longer": lambda p: torch.cat([p, p]),
    "unknown arithmetic": lambda p: _with_byte(p, 12, 99),
    "more columns": lambda p: _with_byte(p, 24, 255),
    "columns without end": lambda p: _with_byte(p, 30, 127),
    "negative depth": lambda p: _with_byte(p, 23, 255),
}


def _with_byte(packed, place, value):
    packed = packed.clone()
    packed[place] = value
    return packed


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("mode", [None, "weight_only", "dynamic"])
def test_damaged_packed_weights_are_refused(damage, mode):
    if extension.cpu_isa() is None:
        pytest.skip("the compiled part is not built")
    x, weight, bias = inputs(4, 80, 70).values()
    pack = pack_weights([weight], x.dtype) if mode is None else quantize_weights([weight], mode)
    damaged = DAMAGES[damage](pack)
    for weights in ([], [weight]):
        with use_backend(linear="cpu"), pytest.raises(ValueError, match="cut short or damaged"):
            linear_fwd(x, weights, [bias], damaged)


def test_linear_bad_input_raises():
    x, weight, bias = inputs(4, 8, 6).values()
    with pytest.raises(ValueError, match=r"weight \(F, C\)"):
        linear(x, weight[:, :7], bias)
    with pytest.raises(ValueError, match=r"bias must have shape \(6,\), got \(5,\)"):
        linear(x, weight, bias[:5])
    with pytest.raises(ValueError, match="2 weights, but 1 biases"):
        linear(x, [weight, weight], [bias])
    with use_backend(linear="cpu"), pytest.raises(NotImplementedError, match="float64"):
        linear(x.double(), weight.double(), bias.double())
