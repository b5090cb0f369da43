"""The CUDA kernels of attention where the tests of the op do not lead them: every padded head dim
in every dtype, masks bit by bit, other schedules. Emulated; FASTBERT_BUILD=cuda_emulated builds
it."""

import pytest
import torch

from fastbert import extension, use_backend
from fastbert.ops.attention import attention, attention_bwd, attention_fwd
from fastbert.ops.philox import score_keep_mask
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import cu_seqlens

DROPOUT = {"dropout_p": 0.25, "site": 8, "rng_state": torch.tensor([3, 2**33 + 1])}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Padded to 32, 96 and 128, whole pieces of 16 bytes and element by element; the op's own tests take
# those of 16 and 64.
HEAD_DIMS = [20, 72, 100, 128]


@pytest.fixture(autouse=True)
def emulated():
    reason = extension.load("_C_emulated")
    if reason is not None:
        pytest.skip(reason)
    with use_backend("cuda_emulated"):
        yield


def dense(q, k, v, lengths_q, lengths_k, window):
    """Plain attention of each sequence with DROPOUT; every query has a key in sight."""
    out, lse = [], []
    parts = (q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    for index, (qs, ks, vs) in enumerate(zip(*parts, strict=True)):
        scores = torch.einsum("qnd,knd->nqk", qs, ks) * q.shape[-1] ** -0.5
        distance = torch.arange(len(ks)) - torch.arange(len(qs))[:, None]
        unseen = (distance < -window[0]) | (distance > window[1])
        scores = scores.masked_fill(unseen, float("-inf"))
        scores = scores if scores.dtype == torch.float64 else scores.float()
        keep = score_keep_mask(
            DROPOUT["rng_state"],
            torch.tensor([index]),
            q.shape[1],
            len(qs),
            len(ks),
            dropout_p=DROPOUT["dropout_p"],
            site=DROPOUT["site"],
        )[0]
        weights = torch.where(keep, scores.softmax(-1), 0.0) / 0.75
        out.append(torch.einsum("nqk,knd->qnd", weights.to(vs.dtype), vs))
        lse.append(scores.logsumexp(-1))
    return torch.cat(out), torch.cat(lse, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cuda_attention_of_every_padded_head_dim(head_dim, dtype):
    """Three tiles in each direction, some of them cut by the window and some by the end."""
    lengths_q, lengths_k, window = [140, 1], [150, 1], (70, 50)

    def op(q, k, v):
        starts = (cu_seqlens(lengths_q), cu_seqlens(lengths_k))
        bounds = {"max_seqlen_q": 140, "max_seqlen_k": 150}
        return attention(q, k, v, *starts, **bounds, window=window, **DROPOUT)

    values = {name: torch.randn(151, 1, head_dim) for name in ("q", "k", "v")}
    values["q"] = torch.randn(141, 1, head_dim)
    with assert_ran("attention_bwd", "cuda_emulated"):
        op_check(
            op,
            lambda q, k, v: dense(q, k, v, lengths_q, lengths_k, window),
            values,
            dtype,
            name="attention",
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_attention_masks_are_those_of_the_stream(dtype):
    """Unit vectors as queries, keys and gradients lay each score bare, in both kernels of backward
    and in forward."""
    lengths, heads, dim = [40, 0, 128, 97], 2, 128
    unit = torch.cat([torch.eye(dim)[:length] for length in lengths])
    unit = unit[:, None].expand(-1, heads, -1).to(dtype).contiguous()
    starts = cu_seqlens(lengths)
    options = (starts, starts, dim, dim, 1.0, None, *DROPOUT.values())
    out, lse = attention_fwd(unit, unit, unit, *options)
    ones, no_out = torch.ones_like(unit), torch.zeros_like(unit)
    dq, dk, dv = attention_bwd(unit, unit, unit, ones, no_out, lse, *options)
    for index, (begin, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        keep = score_keep_mask(
            DROPOUT["rng_state"],
            torch.tensor([index]),
            heads,
            length,
            length,
            dropout_p=DROPOUT["dropout_p"],
            site=DROPOUT["site"],
        )[0].transpose(0, 1)
        part = slice(begin, begin + length)
        for name, scores in {"out": out, "dq": dq}.items():
            assert torch.equal(scores[part, :, :length] != 0, keep), name
        for name, scores in {"dk": dk, "dv": dv}.items():
            assert torch.equal(scores[part, :, :length] != 0, keep.transpose(0, 2)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_attention_reads_nobody_elses_rows(dtype):
    """Idle rows and the rows of a poisoned sequence may hold anything."""
    lengths, poisoned = [5, 20, 66], slice(5, 25)
    starts = cu_seqlens(lengths)
    options = (starts, starts, 66, 66, 0.3, None, 0.0, 0, None)
    clean = [torch.randn(95, 2, 16, dtype=dtype) for _ in range(4)]
    dirty = [t.clone() for t in clean]
    for t in dirty:
        t[poisoned] = t[91:] = torch.nan
    results = []
    for dout, *tensors in (clean, dirty):
        out, lse = attention_fwd(*tensors, *options)
        results.append((out, *attention_bwd(dout, *tensors, out, lse, *options)))
    for ours, expected in zip(*reversed(results), strict=True):
        assert not ours[91:].any()
        ours[poisoned] = expected[poisoned]
        assert_bitwise_equal(ours, expected, "rows of others")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_attention_does_not_depend_on_the_schedule(dtype):
    """Nothing but barriers and waits orders threads."""
    lengths = [1, 130]
    starts = cu_seqlens(lengths)
    options = (starts, starts, 130, 130, 0.3, None, *DROPOUT.values())
    q, k, v, dout = (torch.randn(131, 1, 32, dtype=dtype) for _ in range(4))

    def results():
        out, lse = attention_fwd(q, k, v, *options)
        return (out, lse, *attention_bwd(dout, q, k, v, out, lse, *options))

    before = torch.ops.fastbert.cuda_emulated_schedule(0)
    first = results()
    for seed in (1, 2):
        torch.ops.fastbert.cuda_emulated_schedule(seed)
        for a, b in zip(first, results(), strict=True):
            assert_bitwise_equal(a, b, "result")
    assert torch.ops.fastbert.cuda_emulated_schedule(before) == 2


def test_cuda_attention_refuses_what_it_does_not_take():
    starts = cu_seqlens([4])
    wide, double = torch.randn(4, 1, 136), torch.randn(4, 1, 8).double()
    for t, reason in ((wide, "the head dim is 136"), (double, "float64")):
        with pytest.raises(NotImplementedError, match=reason):
            attention(t, t, t, starts, starts, max_seqlen_q=4, max_seqlen_k=4)
    q, long = torch.randn(4, 1, 8), starts.long()
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32"):
        attention(q, q, q, long, long, max_seqlen_q=4, max_seqlen_k=4)
    with pytest.raises(ValueError, match="without sequences"):
        attention(q, q, q, starts[:0], starts[:0], max_seqlen_q=4, max_seqlen_k=4)
