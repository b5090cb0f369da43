"""attention against plain dense attention, one sequence at a time."""

import functools
import math

import pytest
import torch

from fastbert.dispatch import BACKENDS, OPS, not_supported_reasons, use_backend
from fastbert.ops.attention import (
    MAX_HEAD_DIM,
    attention,
    attention_bwd,
    attention_fwd,
    attention_packed_qkv,
)
from fastbert.ops.philox import score_keep_mask
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import cu_seqlens

OP = "attention"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = torch.tensor([1234, 5])


def plain(q, k, v, lengths_q, lengths_k, scale=None, window=None, keep=None, dropout_p=0.0):
    """Dense attention of each sequence; idle rows and rows without keys are 0."""
    out, lse = [], []
    start_q = start_k = 0
    for index, (length_q, length_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        qs, ks, vs = q[start_q:][:length_q], k[start_k:][:length_k], v[start_k:][:length_k]
        start_q, start_k = start_q + length_q, start_k + length_k
        if length_k == 0:
            out.append(qs * 0)
            lse.append(qs.new_full((q.shape[1], length_q), -math.inf))
            continue
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        scores = torch.einsum("qnd,knd->nqk", qs, ks) * factor
        if window is not None:
            distance = torch.arange(length_k) - torch.arange(length_q)[:, None]
            left, right = (side if side >= 0 else 10**9 for side in window)
            scores = scores.masked_fill((distance < -left) | (distance > right), -math.inf)
        weights = (
            scores.float().softmax(-1) if scores.dtype != torch.float64 else scores.softmax(-1)
        )
        weights = weights.nan_to_num(0.0)
        if keep is not None:
            weights = weights * keep[index] / (1 - dropout_p)
        out.append(torch.einsum("nqk,knd->qnd", weights.to(vs.dtype), vs))
        lse.append(scores.logsumexp(-1))
    idle = q.shape[0] - start_q
    out.append(q[start_q:] * 0)
    lse.append(q.new_full((q.shape[1], idle), -math.inf))
    lse = torch.cat(lse, 1)
    return torch.cat(out), lse if lse.dtype == torch.float64 else lse.float()


def inputs(lengths_q, lengths_k, heads, dim, idle=0):
    size_q, size_k = sum(lengths_q) + idle, sum(lengths_k) + idle
    return {
        "q": torch.randn(size_q, heads, dim),
        "k": torch.randn(size_k, heads, dim),
        "v": torch.randn(size_k, heads, dim),
    }


def both(lengths_q, lengths_k, **options):
    """The op and plain attention as functions of q, k, v."""

    def op(q, k, v):
        return attention(
            q,
            k,
            v,
            cu_seqlens(lengths_q),
            cu_seqlens(lengths_k),
            max_seqlen_q=max(lengths_q),
            max_seqlen_k=max(lengths_k),
            **options,
        )

    def reference(q, k, v):
        p = options.get("dropout_p", 0.0)
        keep = None
        if p:
            keep = [
                score_keep_mask(
                    RNG, torch.tensor([i]), q.shape[1], a, b, dropout_p=p, site=options["site"]
                )[0]
                for i, (a, b) in enumerate(zip(lengths_q, lengths_k, strict=True))
            ]
        return plain(
            q,
            k,
            v,
            lengths_q,
            lengths_k,
            options.get("softmax_scale"),
            options.get("window"),
            keep,
            # The stream's probability is a multiple of 2^-16.
            math.floor(p * 65536 + 0.5) / 65536,
        )

    return op, reference


# Ragged with an empty sequence, one token, more than one tile; query-only rows; no key at all.
LENGTHS = {
    "ragged": ([5, 0, 1, 33], [5, 0, 1, 33]),
    "query-only": ([6, 3, 20], [4, 0, 17]),
    "one": ([1], [1]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention_matches_reference(backend, lengths, dtype):
    op, reference = both(*lengths)
    with assert_ran("attention_fwd", backend.name):
        op_check(op, reference, inputs(*lengths, 3, 16, idle=2), dtype, name="attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_attention_padded_matches_the_loop(lengths, p, window, dtype, monkeypatch):
    """What GPUs run until they have a kernel: nothing read by the host, the same results."""
    from fastbert.ops import attention as module
    from fastbert.reference import attention_padded

    monkeypatch.setattr(attention_padded, "MAX_SCORES", 3 * 50 * 50 * 2)
    values = {k: v.to(dtype) for k, v in inputs(*lengths, 3, 16, idle=2).items()}
    values["v"][-2:] = torch.nan  # idle rows may hold anything
    starts = [cu_seqlens(side) for side in lengths]
    options = (0.25, window, *module.keep_masks(3, p, 8, RNG))
    bounds = (max(lengths[0]) + 3, max(lengths[1]) + 1)
    out, lse = module.attention_reference(*values.values(), *starts, *options)
    padded = module.attention_padded_reference(*values.values(), *starts, *bounds, *options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(padded[0], out, rtol=0, atol=tolerance)
    torch.testing.assert_close(padded[1], lse, rtol=0, atol=1e-5)
    dout = torch.randn_like(out)
    tensors = (dout, *values.values(), lse, *starts)
    expected = module.attention_bwd_reference(*tensors, *options)
    actual = module.attention_padded_bwd_reference(*tensors, *bounds, *options)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5 * tolerance)


# Three tiles of the largest kernels in each direction, beside far shorter sequences.
TILES = {
    "plain": {},
    "window": {"window": (150, 20)},
    "dropout": {"dropout_p": 0.1, "site": 8, "rng_state": RNG},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_attention_many_tiles(backend, options, dtype):
    op, reference = both([1, 300, 0, 70], [1, 270, 0, 70], **options)
    op_check(op, reference, inputs([371], [341], 2, 64, idle=3), dtype, name="attention")


@pytest.mark.parametrize(("longest", "expected"), [(512, "_one_pass"), (0, "_two_passes")])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "lengths", [LENGTHS["ragged"], LENGTHS["query-only"], ([140, 70], [150, 70])], ids=str
)
def test_attention_bwd_passes(backend, lengths, dtype, longest, expected, monkeypatch):
    """Short sequences in one pass over their tiles, others in two; idle rows get zeros in both."""
    if backend.name != "triton":
        pytest.skip("a matter of the Triton kernels")
    from fastbert.kernels import attention as module

    ran = set()

    def recorded(launch, *args):
        ran.add(launch.__name__)
        launch(*args)

    for name in ("_one_pass", "_two_passes"):
        launch = functools.partial(recorded, getattr(module, name))
        monkeypatch.setattr(module, name, launch)
    monkeypatch.setattr(module, "LONGEST_IN_ONE_PASS", longest)
    op, reference = both(*lengths, dropout_p=0.1, site=8, rng_state=RNG)
    op_check(op, reference, inputs(*lengths, 2, 20, idle=3), dtype, name="attention")
    assert ran == {expected}


def test_attention_many_sequences(backend):
    lengths = [0] * 300
    lengths[3::60] = [2, 1, 3, 1, 2]
    op, reference = both(lengths, lengths)
    op_check(op, reference, inputs(lengths, lengths, 1, 16), torch.float32, name="attention")


@pytest.mark.parametrize("dim", [1, 20, 26, 72, 128, 256])
def test_attention_head_dims(backend, dim):
    op, reference = both([7, 12], [7, 12])
    if backend.name in ("triton", "cuda_emulated") and dim > MAX_HEAD_DIM:
        with pytest.raises(NotImplementedError, match="head dim is 256"):
            op(**inputs([7, 12], [7, 12], 2, dim))
        return
    op_check(op, reference, inputs([7, 12], [7, 12], 2, dim), torch.float32, name="attention")


@pytest.mark.parametrize("window", [(0, 0), (2, 3), (4, -1), (-1, 0), (100, 100)])
def test_attention_window(backend, window):
    op, reference = both([9, 30], [9, 30], window=window)
    op_check(op, reference, inputs([9, 30], [9, 30], 2, 8), torch.float32, name="attention")


def test_attention_window_without_a_key_in_sight(backend):
    """Query-only rows far behind the last key see nothing: 0, not NaN. Keys far behind the last
    query are seen by nobody: no gradient."""
    for lengths in ([12], [3]), ([300], [70]), ([150], [64]), ([12], [300]):
        op, reference = both(*lengths, window=(2, 2))
        op_check(op, reference, inputs(*lengths, 2, 8), torch.float32, name="attention")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_window_over_a_long_sequence(backend, dtype):
    """More queries than a piece of a windowed task holds, a window that reaches over its border."""
    if backend.name not in ("reference", "cpu"):
        pytest.skip("other kernels know no pieces")
    options = {"window": (70, 9), "dropout_p": 0.1, "site": 8, "rng_state": RNG}
    op, reference = both([700], [700], **options)
    op_check(op, reference, inputs([700], [700], 1, 16), dtype, name="attention")


def test_attention_window_is_batch_invariant(backend):
    """A query's bits depend on its sequence alone, not on the batch or the number of threads."""
    if backend.name != "cpu":
        pytest.skip("what the C++ kernels promise")
    values = inputs([600, 90], [600, 90], 3, 32).values()
    together, _ = both([600, 90], [600, 90], window=(30, 30))
    alone, _ = both([90], [90], window=(30, 30))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    out, lse = together(*values)
    torch.set_num_threads(1)
    again, _ = together(*values)
    expected, lse_alone = alone(*(t[600:] for t in values))
    torch.set_num_threads(before)
    assert_bitwise_equal(out, again, "out")
    assert_bitwise_equal(out[600:], expected, "out")
    assert_bitwise_equal(lse[:, 600:], lse_alone, "lse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_attention_dropout_mask(backend, p, dtype):
    op, reference = both([6, 40], [6, 40], dropout_p=p, site=8, rng_state=RNG)
    if p == 1.0:
        q, k, v = (t.requires_grad_() for t in inputs([6, 40], [6, 40], 2, 8).values())
        out, _ = op(q, k, v)
        out.sum().backward()
        assert not out.any()
        assert not any(t.grad.any() for t in (q, k, v))
        return
    op_check(op, reference, inputs([6, 40], [6, 40], 2, 8), dtype, name="attention")


def test_attention_packed_qkv_is_attention(backend):
    lengths, heads, dim = [5, 9], 3, 8
    qkv = torch.randn(14, 3 * heads * dim, requires_grad=True)
    options = {"dropout_p": 0.2, "site": 0, "rng_state": RNG}
    out, lse = attention_packed_qkv(qkv, heads, cu_seqlens(lengths), max_seqlen=9, **options)
    grad = torch.randn_like(out)
    out.backward(grad)
    parts = [t.detach().reshape(14, heads, dim).requires_grad_() for t in qkv.chunk(3, 1)]
    starts = cu_seqlens(lengths)
    expected, lse_of_parts = attention(
        *parts, starts, starts, max_seqlen_q=9, max_seqlen_k=9, **options
    )
    expected.backward(grad)
    assert_bitwise_equal(out, expected, "out")
    assert_bitwise_equal(lse, lse_of_parts, "lse")
    assert_bitwise_equal(qkv.grad, torch.cat([p.grad.flatten(1) for p in parts], 1), "dqkv")


def test_attention_noncontiguous(backend):
    op, reference = both([5, 9], [5, 9])
    op_check(
        op,
        reference,
        inputs([5, 9], [5, 9], 2, 8),
        torch.float32,
        name="attention",
        layout="noncontiguous",
    )


def test_attention_extreme_values(backend):
    """Scores of 1e5: the softmax must not overflow, and becomes a choice of one key."""
    q = torch.full((4, 1, 4), 300.0)
    k = torch.arange(4.0).view(4, 1, 1).expand(4, 1, 4) * 100
    v = torch.randn(4, 1, 4)
    starts = cu_seqlens([4])
    out, lse = attention(q, k, v, starts, starts, max_seqlen_q=4, max_seqlen_k=4)
    torch.testing.assert_close(out, v[3].expand(4, 1, 4))
    assert lse.isfinite().all()


def test_attention_empty(backend):
    q = torch.randn(0, 2, 8, requires_grad=True)
    starts = cu_seqlens([])
    out, lse = attention(q, q, q, starts, starts, max_seqlen_q=0, max_seqlen_k=0)
    out.sum().backward()
    assert (out.shape, lse.shape, q.grad.shape) == ((0, 2, 8), (2, 0), (0, 2, 8))


def test_attention_cross_backend():
    """Any forward may meet any backward: what forward saves is one contract."""
    cpu = torch.device("cpu")
    backends = [b for b in BACKENDS if not not_supported_reasons(OPS["attention_fwd"], b, cpu, ())]
    assert backends[0] == "reference"
    starts = (cu_seqlens([5, 0, 33]), cu_seqlens([4, 0, 70]))
    options = (*starts, 33, 70, 0.25, [40, 20], 0.2, 8, RNG)
    tensors = inputs([5, 0, 33], [4, 0, 70], 2, 16, idle=1).values()
    dout = torch.randn(39, 2, 16)
    results = []
    for forward in backends:
        with use_backend(attention=forward):
            out, lse = attention_fwd(*tensors, *options)
        for backward in backends:
            with use_backend(attention=backward):
                gradients = attention_bwd(dout, *tensors, out, lse, *options)
            results.append((out, lse, *gradients))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


def test_attention_long_sequence_in_tiles(monkeypatch):
    """The same bits whether a sequence's scores fit one tile or not."""
    from fastbert.reference import attention as module

    op, _ = both([50], [50])
    q, k, v = inputs([50], [50], 2, 8).values()
    whole = op(q, k, v)
    monkeypatch.setattr(module, "MAX_SCORES", 7 * 2 * 50)
    for tiled, expected in zip(op(q, k, v), whole, strict=True):
        torch.testing.assert_close(tiled, expected, rtol=0, atol=1e-6)


def test_attention_deterministic(backend):
    op, _ = both([20, 31], [20, 31], dropout_p=0.1, site=0, rng_state=RNG)
    grads = []
    values = inputs([20, 31], [20, 31], 4, 16)
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in values.values()]
        op(*leaves)[0].square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads, strict=True):
        assert_bitwise_equal(a, b, "gradient")


def test_attention_opcheck(backend):
    starts = cu_seqlens([5, 9])
    q = torch.randn(14, 2, 8)
    args = (q, q + 1, q + 2, starts, starts, 9, 9, 0.3, None, 0.1, 3, RNG)
    torch.library.opcheck(attention_fwd, args)
    torch.library.opcheck(attention_fwd, (*args[:8], [2, 2], 0.0, 0, None))


def test_attention_compile_fullgraph():
    starts = {n: cu_seqlens([n, 3]) for n in (5, 9)}

    def step(q, k, v, starts):
        out, _ = attention(q, k, v, starts, starts, max_seqlen_q=16, max_seqlen_k=16)
        return out * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        grads = []
        values = inputs([n, 3], [n, 3], 2, 8)
        for function in (step, compiled):
            leaves = [t.clone().requires_grad_() for t in values.values()]
            function(*leaves, starts[n]).square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_attention_second_order_raises():
    op, _ = both([4], [4])
    q, k, v = (t.requires_grad_() for t in inputs([4], [4], 1, 4).values())
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(op(q, k, v)[0].sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 9, 4], dtype=torch.int32)}, "rise"),
        ({"max_seqlen_k": 3}, "max_seqlen_k"),
        ({"v": torch.randn(9, 2, 4)}, "must be"),
        ({"q": torch.randn(9, 2, 8, dtype=torch.float64)}, "dtype"),
        ({"window": (1, -2)}, "window"),
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"dropout_p": float("nan")}, "dropout_p"),
        ({"dropout_p": 0.1}, "rng_state"),
        ({"dropout_p": 0.1, "rng_state": RNG, "max_seqlen_q": 131_073}, "131072"),
    ],
)
def test_attention_bad_input_raises(change, message):
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    arguments = {
        **dict.fromkeys(("q", "k", "v"), torch.randn(9, 2, 8)),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
        **change,
    }
    if "must be" not in message:
        with pytest.raises(ValueError, match=message):
            attention(**arguments)
    else:
        with pytest.raises(ValueError, match="k, v"):
            attention(**arguments)
