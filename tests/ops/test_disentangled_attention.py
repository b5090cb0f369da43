"""disentangled_attention against plain dense attention with gathered position terms."""

import math

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from fastbert.dispatch import BACKENDS, OPS, not_supported_reasons, use_backend
from fastbert.ops.disentangled_attention import (
    disentangled_attention,
    disentangled_attention_bwd,
    disentangled_attention_fwd,
)
from fastbert.ops.philox import score_keep_mask
from fastbert.reference.disentangled_attention import relative_buckets
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import cu_seqlens
from fastbert.testing.plain import plain_disentangled_attention

OP = "disentangled_attention"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = torch.tensor([1234, 5])

# (position_buckets, max_relative_positions): logarithmic, and one bucket a distance.
LOG, LINEAR = (8, 20), (-1, 12)


def rows_of(positions) -> int:
    buckets, reach = positions
    return 2 * (buckets if buckets > 0 else reach)


def model_scale(q) -> float:
    """The models' factor on the sum of three terms."""
    return (3 * q.shape[-1]) ** -0.5


def inputs(lengths, heads, dim, positions=LOG, idle=0):
    size, rows = sum(lengths) + idle, rows_of(positions)
    return {
        **{name: torch.randn(size, heads, dim) for name in ("q", "k", "v")},
        **{name: torch.randn(rows, heads, dim) for name in ("position_key", "position_query")},
    }


def both(lengths, positions=LOG, scale=None, without=(), **options):
    """The op and plain attention as functions of q, k, v and the position tables."""
    buckets, reach = positions

    def tables(position_key, position_query):
        values = {"position_key": position_key, "position_query": position_query}
        return [None if name in without else t for name, t in values.items()]

    def op(q, k, v, position_key, position_query):
        return disentangled_attention(
            q,
            k,
            v,
            *tables(position_key, position_query),
            cu_seqlens(lengths),
            max_seqlen=max(lengths, default=0),
            position_buckets=buckets,
            max_relative_positions=reach,
            softmax_scale=scale or model_scale(q),
            **options,
        )

    def reference(q, k, v, position_key, position_query):
        p, keep = options.get("dropout_p", 0.0), None
        if p:
            keep = [
                score_keep_mask(
                    RNG, torch.tensor([i]), q.shape[1], n, n, dropout_p=p, site=options["site"]
                )[0]
                for i, n in enumerate(lengths)
            ]
        # The stream's probability is a multiple of 2^-16.
        in_force = math.floor(p * 65536 + 0.5) / 65536
        terms = tables(position_key, position_query)
        factor = scale or model_scale(q)
        values = (q, k, v, *terms)
        return plain_disentangled_attention(*values, lengths, positions, factor, keep, in_force)

    return op, reference


# Ragged with an empty sequence, one token, more than one block; single tokens; more blocks than
# are taken together.
LENGTHS = {"ragged": [5, 0, 1, 33], "ones": [1] * 8, "blocks": [150, 64]}
# Run one thread or one program after another.
SLOW = ("triton", "cuda_emulated")


def _shortened(backend, lengths) -> list[int]:
    """Triton's tiles are smaller than what C++ takes together, and its interpreter is slow."""
    return lengths if backend.name != "triton" else [min(n, 40) for n in lengths[:4]]


@pytest.mark.parametrize("positions", [LOG, LINEAR], ids=["log", "linear"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_disentangled_attention_matches_reference(backend, lengths, dtype, positions):
    if backend.name in SLOW and (positions is LINEAR) == (dtype != torch.bfloat16):
        pytest.skip("kernels read both tables alike, and here they are slow")
    lengths = _shortened(backend, lengths)
    op, reference = both(lengths, positions)
    values = inputs(lengths, 1 if backend.name in SLOW else 2, 16, positions, idle=2)
    with assert_ran("disentangled_attention_fwd", backend.name):
        op_check(op, reference, values, dtype, name="attention")


@pytest.mark.parametrize("without", ["position_key", "position_query", "both"])
def test_disentangled_attention_without_a_term(backend, without):
    names = ("position_key", "position_query") if without == "both" else (without,)
    op, reference = both([40, 7], without=names)
    op_check(op, reference, inputs([40, 7], 1, 16), torch.float32, name="attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_disentangled_attention_far_beyond_the_buckets(backend, dtype):
    """Whole blocks of pairs that share the last bucket, on both sides."""
    length = 170 if backend.name != "triton" else 50
    op, reference = both([length], (4, 6))
    op_check(op, reference, inputs([length], 1, 8, (4, 6)), dtype, name="attention")


@pytest.mark.parametrize("dim", [1, 20, 26, 72, 128])
def test_disentangled_attention_head_dims(backend, dim):
    if backend.name == "triton" and dim in (1, 26, 72):
        pytest.skip("its dims are padded alike, and the interpreter is slow")
    op, reference = both([7, 35])
    op_check(op, reference, inputs([7, 35], 1, dim), torch.float32, name="attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.3])
def test_disentangled_attention_dropout_mask(backend, p, dtype):
    op, reference = both([6, 40], dropout_p=p, site=8, rng_state=RNG)
    heads = 1 if backend.name == "triton" else 2
    op_check(op, reference, inputs([6, 40], heads, 8), dtype, name="attention")


def test_disentangled_attention_drops_everything(backend):
    op, _ = both([6, 20], dropout_p=1.0, site=8, rng_state=RNG)
    leaves = {name: t.requires_grad_() for name, t in inputs([6, 20], 1, 8).items()}
    out, _ = op(**leaves)
    out.sum().backward()
    assert not out.any()
    assert not any(t.grad.any() for t in leaves.values())


def test_disentangled_attention_negative_scale(backend):
    op, reference = both([9, 20], scale=-0.2)
    op_check(op, reference, inputs([9, 20], 1, 8), torch.float32, name="attention")


def test_disentangled_attention_noncontiguous(backend):
    op, reference = both([5, 9])
    values = inputs([5, 9], 2, 8)
    op_check(op, reference, values, torch.float32, name="attention", layout="noncontiguous")


def test_disentangled_attention_queries_of_other_states(backend):
    """Keys and values side by side, queries by themselves: the results of each by itself."""
    op, _ = both([5, 9])
    values = inputs([5, 9], 2, 8)
    together = torch.stack([values["k"], values["v"]], 1).unbind(1)
    views = values | dict(zip("kv", together, strict=True))
    results = []
    for given in (values, views):
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        out, lse = op(**leaves)
        (out * torch.arange(8)).sum().backward()
        results.append([out, lse, *(t.grad for t in leaves.values())])
    for name, alone, beside in zip(("out", "lse", *values), *results, strict=True):
        assert_bitwise_equal(beside, alone, name)


def test_disentangled_attention_idle_rows_may_hold_anything(backend):
    op, _ = both([25, 20])
    values = inputs([25, 20], 1, 8, idle=3)
    for name in ("q", "k", "v"):
        values[name][45:] = torch.nan
    leaves = {name: t.requires_grad_() for name, t in values.items()}
    out, lse = op(**leaves)
    grad = torch.randn_like(out)
    grad[45:] = torch.nan
    out.backward(grad)
    assert not out[45:].any()
    assert torch.equal(lse[:, 45:], torch.full((1, 3), -math.inf))
    assert not any(leaves[name].grad[45:].any() for name in ("q", "k", "v"))
    assert all(t.grad.isfinite().all() for t in leaves.values())


def test_disentangled_attention_extreme_values(backend):
    """Scores of 1e5: the softmax must not overflow, and becomes a choice of one key."""
    q = torch.full((4, 1, 4), 300.0)
    k = torch.arange(4.0).view(4, 1, 1).expand(4, 1, 4) * 100
    v = torch.randn(4, 1, 4)
    nothing = torch.zeros(rows_of(LOG), 1, 4)
    out, lse = both([4])[0](q, k, v, nothing, nothing)
    torch.testing.assert_close(out, v[3].expand(4, 1, 4))
    assert lse.isfinite().all()


def test_disentangled_attention_large_terms_of_keys(backend):
    """Where a sequence ends within a tile, keys have scores beside queries that are not there; exp
    of these overflows, and must not reach the gradients."""
    op, reference = both([7, 18], scale=0.25)
    values = inputs([7, 18], 1, 8)
    values["k"] = 16 + values["k"]
    values["position_query"] = 16 + 0.1 * values["position_query"]
    dout = torch.randn(25, 1, 8)
    gradients = []
    for function in (op, reference):
        leaves = {name: t.clone().requires_grad_() for name, t in values.items()}
        out, _ = function(**leaves)
        gradients.append(torch.autograd.grad(out, list(leaves.values()), dout))
    for name, ours, expected in zip(values, *gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=4e-3, msg=name)


def test_disentangled_attention_empty(backend):
    values = {name: t.requires_grad_() for name, t in inputs([], 2, 8).items()}
    out, lse = both([])[0](**values)
    out.sum().backward()
    assert (out.shape, lse.shape) == ((0, 2, 8), (2, 0))
    assert not any(t.grad.any() for t in values.values())


def test_disentangled_attention_deterministic(backend):
    """The same bits in every run, from C++ for any number of threads, the position tables' too."""
    lengths = [20, 31, 0, 70, 3, 12, 40, 8, 1, 25, 33] if backend.name == "cpu" else [3, 18]
    op, _ = both(lengths, dropout_p=0.1, site=0, rng_state=RNG)
    # Sixteen heads leave C++ three chains, of several sequences each.
    values = inputs(lengths, 16 if backend.name == "cpu" else 1, 16)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 1, 3 if backend.name == "cpu" else 1):
        torch.set_num_threads(threads)
        leaves = {name: t.clone().requires_grad_() for name, t in values.items()}
        op(**leaves)[0].square().sum().backward()
        results.append({name: t.grad for name, t in leaves.items()})
    torch.set_num_threads(before)
    for other in results[1:]:
        for name, gradient in other.items():
            assert_bitwise_equal(gradient, results[0][name], f"gradient of {name}")


def test_disentangled_attention_cross_backend():
    """Any forward may meet any backward: what forward saves is one contract."""
    cpu = torch.device("cpu")
    op = OPS["disentangled_attention_fwd"]
    backends = [b for b in BACKENDS if op.has(b) and not not_supported_reasons(op, b, cpu, ())]
    assert backends[0] == "reference"
    lengths = [5, 0, 20]
    tensors = inputs(lengths, 1, 16, idle=1).values()
    options = (relative_buckets(*LOG), cu_seqlens(lengths), 20, 0.15, 0.2, 8, RNG)
    dout = torch.randn(26, 1, 16)
    results = []
    for forward in backends:
        with use_backend(disentangled_attention=forward):
            out, lse = disentangled_attention_fwd(*tensors, *options)
        for backward in backends:
            with use_backend(disentangled_attention=backward):
                gradients = disentangled_attention_bwd(dout, *tensors, out, lse, *options)
            results.append((out, lse, *gradients))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("positions", [(8, 20), (256, 512), (-1, 12), (6, 512), (128, 300)])
def test_relative_buckets_are_those_of_transformers(positions):
    buckets, reach = positions
    length = 3 * reach
    like = torch.empty(1, length, 1)
    expected = build_relative_position(like, like, max(buckets, -1), reach)[0]
    span = rows_of(positions) // 2
    expected = (expected + span).clamp(0, 2 * span - 1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    actual = relative_buckets(*positions)[distance.clamp(-reach, reach) + reach]
    assert torch.equal(actual.long(), expected)


def test_disentangled_attention_opcheck():
    values = inputs([5, 9], 2, 8).values()
    options = (relative_buckets(*LOG), cu_seqlens([5, 9]), 9, 0.3, 0.1, 3, RNG)
    torch.library.opcheck(disentangled_attention_fwd, (*values, *options))
    q, k, v, position_key, _ = values
    args = (q, k, v, position_key, None, *options)
    torch.library.opcheck(disentangled_attention_fwd, args)
    out, lse = disentangled_attention_fwd(*args)
    torch.library.opcheck(disentangled_attention_bwd, (out, *args[:5], out, lse, *options))


def test_disentangled_attention_compile_fullgraph():
    starts = {n: cu_seqlens([n, 3]) for n in (5, 9)}

    def step(q, k, v, position_key, position_query, starts):
        out, _ = disentangled_attention(
            q,
            k,
            v,
            position_key,
            position_query,
            starts,
            max_seqlen=16,
            position_buckets=8,
            max_relative_positions=20,
            softmax_scale=0.2,
        )
        return out * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        grads = []
        values = inputs([n, 3], 2, 8)
        for function in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in values.values()]
            function(*leaves, starts[n]).square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_disentangled_attention_trains_after_inference_mode():
    """The kept bucket table must not be an inference tensor."""
    op, _ = both([5], (6, 17))
    values = inputs([5], 1, 4, (6, 17))
    with torch.inference_mode():
        op(**values)
    leaves = {name: t.requires_grad_() for name, t in values.items()}
    op(**leaves)[0].sum().backward()
    assert leaves["position_key"].grad.any()


def test_disentangled_attention_second_order_raises():
    op, _ = both([4])
    values = {name: t.requires_grad_() for name, t in inputs([4], 1, 4).items()}
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(op(**values)[0].sum(), values["q"], create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 9, 4], dtype=torch.int32)}, "rise"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, "cu_seqlens must have"),
        ({"max_seqlen": 3}, "max_seqlen"),
        ({"v": torch.randn(9, 2, 4)}, "share a shape"),
        ({"q": torch.randn(9, 2, 8, dtype=torch.float64)}, "dtype"),
        ({"position_key": torch.randn(15, 2, 8)}, "position_key must be"),
        ({"position_query": torch.randn(16, 2, 8).double()}, "position_query must be"),
        ({"max_relative_positions": 5}, "at least 6"),
        ({"position_buckets": 1}, "position_buckets"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"dropout_p": 0.1}, "rng_state"),
        ({"dropout_p": 0.1, "rng_state": RNG, "max_seqlen": 131_073}, "131072"),
    ],
)
def test_disentangled_attention_bad_input_raises(change, message):
    arguments = {
        **dict.fromkeys(("q", "k", "v"), torch.randn(9, 2, 8)),
        **dict.fromkeys(("position_key", "position_query"), torch.randn(16, 2, 8)),
        "cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32),
        "max_seqlen": 5,
        "position_buckets": 8,
        "max_relative_positions": 20,
        "softmax_scale": 0.2,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        disentangled_attention(**arguments)
