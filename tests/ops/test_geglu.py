"""geglu in every backend that can run here, against torch's GELU in float64."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.dispatch import use_backend
from fastbert.ops.geglu import geglu, geglu_bwd, geglu_fwd
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran

OP = "geglu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["none", "tanh"]
BACKENDS = ["reference", "cpu", "triton"]


def plain(x, bias=None, *, approximate):
    """As ModernBERT's MLP: the first half through GELU, times the second."""
    u, v = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.gelu(u, approximate=approximate) * v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
# One row, rows past a part of 64 and of 512, odd widths.
@pytest.mark.parametrize("shape", [(1, 10), (70, 66), (3, 2060)], ids=str)
def test_geglu_matches_reference(backend, shape, form, dtype):
    for bias in (torch.randn(shape[-1]), None):
        with assert_ran("geglu_fwd", backend.name), assert_ran("geglu_bwd", backend.name):
            op_check(
                lambda **a: geglu(**a, approximate=form),
                lambda **a: plain(**a, approximate=form),
                {"x": 2 * torch.randn(shape), "bias": bias},
                dtype,
                name="geglu",
                reduction_rows=shape[0],
            )


def test_geglu_is_what_modernbert_computes(backend):
    """The order of the halves, from transformers' own module."""
    from transformers import ModernBertConfig
    from transformers.models.modernbert.modeling_modernbert import ModernBertMLP

    config = ModernBertConfig(hidden_size=8, intermediate_size=12)
    mlp = ModernBertMLP(config)
    x = torch.randn(5, 8)
    ours = F.linear(geglu(F.linear(x, mlp.Wi.weight), approximate="none"), mlp.Wo.weight)
    torch.testing.assert_close(ours, mlp(x), rtol=0, atol=1e-6)


def test_geglu_extreme_values(backend):
    u = torch.tensor([torch.nan, 0.0, 40.0, -40.0, 1.0])
    v = torch.tensor([2.0, 5.0, 2.0, 3.0, torch.inf])
    y = geglu(torch.cat([u, v])[None], approximate="none")[0]
    assert y[0].isnan()
    assert y[1:].tolist() == [0.0, 80.0, 0.0, torch.inf]


@pytest.mark.parametrize("shape", [(0, 6), (5, 0)], ids=str)
def test_geglu_empty(backend, shape):
    x = torch.randn(shape, requires_grad=True)
    bias = torch.randn(shape[-1], requires_grad=True)
    y = geglu(x, bias, approximate="none")
    y.sum().backward()
    assert y.shape == (shape[0], shape[1] // 2)
    assert not bias.grad.any()


def test_geglu_noncontiguous(backend):
    op_check(
        lambda **a: geglu(**a, approximate="none"),
        lambda **a: plain(**a, approximate="none"),
        {"x": torch.randn(9, 16), "bias": torch.randn(16)},
        torch.float32,
        name="geglu",
        layout="noncontiguous",
    )


def test_geglu_cross_backend():
    """Any forward may meet any backward: what forward saves is one contract."""
    x, bias = torch.randn(20, 20), torch.randn(20)
    results = []
    for forward in BACKENDS:
        for backward in BACKENDS:
            with use_backend(geglu=forward):
                y = geglu_fwd(x, bias, "none")
            with use_backend(geglu=backward):
                results.append((y, *geglu_bwd(y, x, bias, "none")))
    for y, dx, dbias in results[1:]:
        torch.testing.assert_close(y, results[0][0], rtol=0, atol=2e-6)
        torch.testing.assert_close(dx, results[0][1], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(dbias, results[0][2], rtol=0, atol=2e-4)


def test_geglu_deterministic_for_any_thread_count(backend):
    x, bias, dy = torch.randn(150, 66), torch.randn(66), torch.randn(150, 33)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(geglu_bwd(dy, x, bias, "none"))
    torch.set_num_threads(before)
    if backend.name == "reference":
        return
    for dx, dbias in results[1:]:
        assert_bitwise_equal(dx, results[0][0], "dx")
        assert_bitwise_equal(dbias, results[0][1], "dbias")


def test_geglu_opcheck(backend):
    x, bias, dy = torch.randn(5, 8), torch.randn(8), torch.randn(5, 4)
    torch.library.opcheck(geglu_fwd, (x, bias, "none"))
    torch.library.opcheck(geglu_bwd, (dy, x, bias, "tanh"))
    torch.library.opcheck(geglu_bwd, (dy, x, None, "tanh"))


def test_geglu_compile_fullgraph():
    def step(x, bias):
        return geglu(x, bias, approximate="none") * 2

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


def test_geglu_second_order_raises():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(geglu(x, approximate="none").sum(), x, create_graph=True)


def test_geglu_bad_input_raises():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="approximate"):
        geglu(x, approximate="erf")
    with pytest.raises(ValueError, match=r"\(8,\), got \(4,\)"):
        geglu(x, torch.randn(4), approximate="none")
    with pytest.raises(ValueError, match="x must"):
        geglu(torch.randn(4, 7), approximate="none")
    with use_backend(geglu="cpu"), pytest.raises(NotImplementedError, match="float64"):
        geglu(x.double(), approximate="none")
