"""The CUDA kernels of disentangled attention where the tests of the op do not lead them: every
padded head dim in every dtype, masks bit by bit, sums of positions over several sequences, other
schedules. Emulated; FASTBERT_BUILD=cuda_emulated builds it."""

import pytest
import torch

from fastbert import extension, use_backend
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

DROPOUT = {"dropout_p": 0.25, "site": 8, "rng_state": torch.tensor([3, 2**33 + 1])}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (position_buckets, max_relative_positions): logarithmic, and one bucket a distance.
LOG, LINEAR = (12, 70), (-1, 130)


@pytest.fixture(autouse=True)
def emulated():
    reason = extension.load("_C_emulated")
    if reason is not None:
        pytest.skip(reason)
    with use_backend("cuda_emulated"):
        yield


def masks(lengths):
    dropout_p, site, state = DROPOUT.values()
    return [
        score_keep_mask(
            state, torch.tensor([index]), 1, length, length, dropout_p=dropout_p, site=site
        )[0]
        for index, length in enumerate(lengths)
    ]


def check(lengths, dim, dtype, idle=0):
    tables = dict.fromkeys(("position_key", "position_query"), (2 * LOG[0], 1, dim))
    shapes = {**dict.fromkeys(("q", "k", "v"), (sum(lengths) + idle, 1, dim)), **tables}

    def op(**values):
        return disentangled_attention(
            **values,
            cu_seqlens=cu_seqlens(lengths),
            max_seqlen=max(lengths) + idle,
            position_buckets=LOG[0],
            max_relative_positions=LOG[1],
            softmax_scale=(3 * dim) ** -0.5,
            **DROPOUT,
        )

    def plain(**values):
        scale, p = (3 * dim) ** -0.5, DROPOUT["dropout_p"]
        options = (lengths, LOG, scale, masks(lengths), p)
        return plain_disentangled_attention(*values.values(), *options)

    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    with assert_ran("disentangled_attention_bwd", "cuda_emulated"):
        op_check(op, plain, values, dtype, name="attention")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Padded to 32, 64, 96 and 128; rows of 20 halves are not whole pieces of 16 bytes.
@pytest.mark.parametrize("dim", [20, 64, 72, 128])
def test_cuda_disentangled_attention_of_every_padded_head_dim(dim, dtype):
    """Two blocks in each direction, more tiles than the bands of the tables hold."""
    check([70, 1], dim, dtype)


def test_cuda_sums_of_positions_over_sequences_that_share_a_part():
    """A bound far above the lengths leaves two parts for six sequences, and empty diagonals."""
    check([20, 0, 33, 1, 18, 7], 8, torch.float32, idle=900)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_cuda_disentangled_attention_masks_are_those_of_the_stream(dtype):
    """Unit vectors as queries, keys and gradients lay each score bare, in every kernel; so do the
    tables' gradients with a bucket for each distance."""
    lengths, dim = [40, 0, 97], 128
    unit = torch.cat([torch.eye(dim)[:length] for length in lengths])[:, None].to(dtype)
    nothing = torch.zeros(2 * LINEAR[1], 1, dim, dtype=dtype)
    tables = (nothing, nothing)
    options = (relative_buckets(*LINEAR), cu_seqlens(lengths), max(lengths), 1.0)
    options = (*options, *DROPOUT.values())
    out, lse = disentangled_attention_fwd(unit, unit, unit, *tables, *options)
    ones, no_out = torch.ones_like(unit), torch.zeros_like(unit)
    dq, dk, dv, dkey, dquery = disentangled_attention_bwd(
        unit, unit, unit, ones, *tables, no_out, lse, *options
    )
    of_key, of_query = (torch.zeros_like(t, dtype=torch.bool) for t in (dkey, dquery))
    starts = cu_seqlens(lengths).tolist()
    for begin, length, (keep,) in zip(starts, lengths, masks(lengths), strict=False):
        part = slice(begin, begin + length)
        for name, scores in {"out": out, "dq": dq}.items():
            assert torch.equal(scores[part, 0, :length] != 0, keep), name
        for name, scores in {"dk": dk, "dv": dv}.items():
            assert torch.equal(scores[part, 0, :length] != 0, keep.T), name
        query, key = keep.nonzero().unbind(1)
        of_key[query - key + LINEAR[1], 0, query] = True
        of_query[query - key + LINEAR[1], 0, key] = True
    assert torch.equal(dkey != 0, of_key)
    assert torch.equal(dquery != 0, of_query)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_cuda_disentangled_attention_reads_nobody_elses_rows(dtype):
    """Idle rows and the rows of a poisoned sequence may hold anything."""
    lengths, poisoned = [5, 20, 36], slice(5, 25)
    options = (relative_buckets(*LOG), cu_seqlens(lengths), 36, 0.3, 0.0, 0, None)
    tables = [torch.randn(2 * LOG[0], 1, 16, dtype=dtype) for _ in range(2)]
    clean = [torch.randn(65, 1, 16, dtype=dtype) for _ in range(4)]
    dirty = [t.clone() for t in clean]
    for t in dirty:
        t[poisoned] = t[61:] = torch.nan
    results = []
    for dout, *tensors in (clean, dirty):
        inputs = (*tensors, *tables)
        out, lse = disentangled_attention_fwd(*inputs, *options)
        gradients = disentangled_attention_bwd(dout, *inputs, out, lse, *options)
        results.append((out, *gradients[:3]))
    for ours, expected in zip(*reversed(results), strict=True):
        assert not ours[61:].any()
        ours[poisoned] = expected[poisoned]
        assert_bitwise_equal(ours, expected, "rows of others")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_cuda_disentangled_attention_does_not_depend_on_the_schedule(dtype):
    """Nothing but barriers and waits orders threads."""
    lengths = [1, 70]
    options = (relative_buckets(*LOG), cu_seqlens(lengths), 70, 0.3, *DROPOUT.values())
    tables = [torch.randn(2 * LOG[0], 1, 16, dtype=dtype) for _ in range(2)]
    inputs = [*(torch.randn(71, 1, 16, dtype=dtype) for _ in range(3)), *tables]
    dout = torch.randn(71, 1, 16, dtype=dtype)

    def results():
        out, lse = disentangled_attention_fwd(*inputs, *options)
        return (out, lse, *disentangled_attention_bwd(dout, *inputs, out, lse, *options))

    before = torch.ops.fastbert.cuda_emulated_schedule(0)
    first = results()
    for seed in (1, 2):
        torch.ops.fastbert.cuda_emulated_schedule(seed)
        for a, b in zip(first, results(), strict=True):
            assert_bitwise_equal(a, b, "result")
    torch.ops.fastbert.cuda_emulated_schedule(before)


def test_cuda_disentangled_attention_refuses_what_it_does_not_take():
    buckets = relative_buckets(*LOG)

    def run(q, buckets):
        tables = (q.new_zeros(2 * LOG[0], *q.shape[1:]), None)
        options = (buckets, cu_seqlens([4]), 4, 0.3, 0.0, 0, None)
        return disentangled_attention_fwd(q, q, q, *tables, *options)

    with pytest.raises(NotImplementedError, match="the head dim is 136"):
        run(torch.randn(4, 1, 136), buckets)
    with pytest.raises(NotImplementedError, match="float64"):
        run(torch.randn(4, 1, 8).double(), buckets)
    with pytest.raises(TypeError, match="buckets must be int32"):
        run(torch.randn(4, 1, 8), buckets.long())
    with pytest.raises(ValueError, match="buckets must have shape"):
        run(torch.randn(4, 1, 8), buckets[1:])
