"""Every kernel, in Triton and in CUDA C++, through its op on a CUDA device, against plain PyTorch
and the CPU's dropout.

Run by benchmarks/gpu/run_all.py; elsewhere skipped, except for the first case of each test, which
runs in Triton's interpreter and emulated, so that these tests are known to work before they meet a
GPU.
"""

import os

import pytest
import torch
import torch.nn.functional as F

from fastbert import extension
from fastbert.dispatch import COMPILED, use_backend
from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.ops.attention import attention
from fastbert.ops.bias_gelu import bias_gelu
from fastbert.ops.disentangled_attention import disentangled_attention
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.ops.geglu import geglu
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.mlm_distillation import mlm_distillation
from fastbert.ops.philox import row_keep_mask, score_keep_mask
from fastbert.ops.rotary import rotary
from fastbert.ops.unpad import pad, unpad
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import cu_seqlens
from fastbert.testing.plain import plain_disentangled_attention, plain_mlm_distillation

ON_GPU = os.environ.get("FASTBERT_TEST_DEVICE") == "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.bfloat16]
# 50 repeats where a race could show.
REPEATS = 50 if ON_GPU else 2
STATE = [1234, 5]
P = 0.125


def sizes(*on_gpu):
    """All on a GPU, the first in the interpreter."""
    return on_gpu if ON_GPU else on_gpu[:1]


@pytest.fixture(autouse=True, params=["triton", "cuda" if ON_GPU else "cuda_emulated"])
def backend(request):
    """Bound for every test here."""
    if request.param in COMPILED:
        reason = extension.load(COMPILED[request.param])
        if reason is not None:
            pytest.skip(reason)
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def rng_state(device):
    return torch.tensor(STATE, device=device)


def randn(device, **shapes):
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


def rows_kept(shape, device, site):
    """The CPU's mask, which the kernels' must equal bit for bit."""
    with use_backend("auto"):
        mask = row_keep_mask(torch.tensor(STATE), *shape, dropout_p=P, site=site)
    return mask.to(device)


def scores_kept(lengths, device):
    """The same of two heads' scores in each sequence."""
    options = {"dropout_p": P, "site": 8}
    state = torch.tensor(STATE)
    with use_backend("auto"):
        return [
            score_keep_mask(state, torch.tensor([i]), 2, n, n, **options)[0].to(device)
            for i, n in enumerate(lengths)
        ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", sizes((9, 40), (1, 768), (4097, 768), (513, 1024), (33, 4096)), ids=str
)
def test_add_layer_norm(device, backend, rng_state, shape, dtype):
    def op(**a):
        return add_layer_norm(**a, eps=1e-12, dropout_p=P, site=9, rng_state=rng_state)

    keep = rows_kept(shape, device, 9)

    def plain(x, residual, weight, bias, linear_bias):
        h = residual + torch.where(keep, x + linear_bias, 0) / (1 - P)
        return F.layer_norm(h, weight.shape, weight, bias, 1e-12)

    columns = shape[1:]
    inputs = randn(
        device, x=shape, residual=shape, weight=columns, bias=columns, linear_bias=columns
    )
    with assert_ran("add_layer_norm_bwd", backend):
        op_check(op, plain, inputs, dtype, name="add_layer_norm", reduction_rows=shape[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", sizes((9, 40), (1000, 3072)), ids=str)
def test_bias_gelu(device, shape, dtype):
    op_check(
        lambda **a: bias_gelu(**a, approximate="none"),
        lambda x, bias: F.gelu(x + bias),
        randn(device, x=shape, bias=shape[1:]),
        dtype,
        name="bias_gelu",
        reduction_rows=shape[0],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", sizes((9, 40), (1000, 2304)), ids=str)
def test_geglu(device, shape, dtype):
    def plain(x, bias):
        u, v = (x + bias).chunk(2, dim=1)
        return F.gelu(u) * v

    op_check(
        lambda **a: geglu(**a, approximate="none"),
        plain,
        randn(device, x=shape, bias=shape[1:]),
        dtype,
        name="geglu",
        reduction_rows=shape[0],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", sizes((9, 2, 8), (4097, 12, 64), (65, 3, 20)), ids=str)
def test_rotary(device, shape, dtype):
    rows, heads, dim = shape
    angles = 100 * torch.rand(50, dim // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    index = torch.randint(50, (rows,), device=device)

    def plain(qkv):
        q, k, v = qkv.unflatten(1, (3, heads, dim)).unbind(1)
        c, s = (t[index][:, None].to(qkv.dtype) for t in (cos, sin))

        def turned(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        return torch.stack([turned(q), turned(k), v], 1).flatten(1)

    op_check(
        lambda qkv: rotary(qkv, heads, cos, sin, index),
        plain,
        randn(device, qkv=(rows, 3 * heads * dim)),
        dtype,
        name="rotary",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", sizes((9, 40), (4097, 768)), ids=str)
def test_embed_layer_norm(device, rng_state, shape, dtype):
    rows, columns = shape
    site = 0xFFFFFFF8
    keep = rows_kept(shape, device, site)
    ids = {
        "input_ids": torch.randint(300, (rows,), device=device),
        "token_type_ids": torch.randint(2, (rows,), device=device),
        "position_ids": torch.randint(64, (rows,), device=device),
    }
    tables = randn(
        device,
        word_weight=(300, columns),
        token_type_weight=(2, columns),
        position_weight=(64, columns),
        weight=(columns,),
        bias=(columns,),
    )

    def op(**a):
        return embed_layer_norm(**a, eps=1e-12, dropout_p=P, site=site, rng_state=rng_state)

    def plain(word_weight, token_type_weight, position_weight, weight, bias, **index):
        h = F.embedding(index["input_ids"], word_weight)
        h = h + F.embedding(index["token_type_ids"], token_type_weight)
        h = h + F.embedding(index["position_ids"], position_weight)
        y = F.layer_norm(h, weight.shape, weight, bias, 1e-12)
        return torch.where(keep, y, 0) / (1 - P)

    op_check(op, plain, {**ids, **tables}, dtype, name="embed_layer_norm", reduction_rows=shape[0])


LENGTHS = sizes([5, 0, 1, 20], [512] * 4, [300, 1, 0, 77, 512, 33], [1, 2, 3] * 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", sizes(16, 64, 128, 40))
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize("window", sizes(None, (64, 32)), ids=str)
def test_attention(device, rng_state, lengths, dim, window, dtype):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    masks = scores_kept(lengths, device)

    def op(q, k, v):
        cu_seqlens = starts.to(device, torch.int32)
        longest = max(lengths)
        options = {"dropout_p": P, "site": 8, "rng_state": rng_state, "window": window}
        return attention(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest, **options
        )[0]

    def plain(q, k, v):
        parts = []
        for index, length in enumerate(lengths):
            rows = slice(int(starts[index]), int(starts[index]) + length)
            scores = torch.einsum("qnd,knd->nqk", q[rows], k[rows]) * dim**-0.5
            if window is not None:
                place = torch.arange(length, device=device)
                distance = place - place[:, None]
                unseen = (distance < -window[0]) | (distance > window[1])
                scores = scores.masked_fill(unseen, -torch.inf)
            wide = scores if scores.dtype == torch.float64 else scores.float()
            weights = torch.where(masks[index], wide.softmax(-1), 0) / (1 - P)
            parts.append(torch.einsum("nqk,knd->qnd", weights.to(v.dtype), v[rows]))
        return torch.cat(parts)

    shape = (sum(lengths), 2, dim)
    op_check(op, plain, randn(device, q=shape, k=shape, v=shape), dtype, name="attention")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", sizes(16, 64, 128, 40))
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_disentangled_attention(device, backend, rng_state, lengths, dim, dtype):
    positions, scale = (32, 128), (3 * dim) ** -0.5
    masks = scores_kept(lengths, device)

    def op(**values):
        return disentangled_attention(
            **values,
            cu_seqlens=cu_seqlens(lengths).to(device),
            max_seqlen=max(lengths),
            position_buckets=positions[0],
            max_relative_positions=positions[1],
            softmax_scale=scale,
            dropout_p=P,
            site=8,
            rng_state=rng_state,
        )

    def plain(**values):
        options = (lengths, positions, scale, masks, P)
        return plain_disentangled_attention(*values.values(), *options)

    shape, table = (sum(lengths), 2, dim), (2 * positions[0], 2, dim)
    values = randn(device, q=shape, k=shape, v=shape, position_key=table, position_query=table)
    with assert_ran("disentangled_attention_bwd", backend):
        op_check(op, plain, values, dtype, name="attention")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", sizes((9, 16, 50), (614, 768, 30_522)), ids=str)
def test_mlm_cross_entropy(device, shape, dtype):
    rows, columns, vocab = shape
    inputs = randn(device, hidden=(rows, columns), weight=(vocab, columns), bias=(vocab,))
    inputs["weight"] *= columns**-0.5
    labels = torch.randint(vocab, (rows,), device=device)
    labels[::7] = -100

    def plain(hidden, weight, bias, labels):
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, labels, reduction="none")

    op_check(
        mlm_cross_entropy,
        plain,
        {**inputs, "labels": labels},
        dtype,
        name="mlm_cross_entropy",
        reduction_rows=rows,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", sizes((9, 16, 50), (614, 768, 30_522)), ids=str)
def test_mlm_distillation(device, shape, dtype):
    rows, columns, vocab = shape
    student = randn(device, hidden=(rows, columns), weight=(vocab, columns), bias=(vocab,))
    taught = randn(device, hidden=(rows, columns), weight=(vocab, columns), bias=(vocab,))
    for inputs in (student, taught):
        inputs["weight"] *= columns**-0.5
    labels = torch.randint(vocab, (rows,), device=device)
    labels[::7] = -100

    op_check(
        mlm_distillation,
        plain_mlm_distillation,
        {**student, "labels": labels, **{f"teacher_{k}": v for k, v in taught.items()}},
        dtype,
        name="mlm_distillation",
        reduction_rows=rows,
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
def test_unpad(device, dtype):
    x = torch.randn(50, 3, 7, device=device).mul(100).to(dtype)
    indices = torch.randperm(50, device=device)[:31]
    assert_bitwise_equal(unpad(x, indices), x[indices], "unpad")
    expected = torch.zeros_like(x)
    expected[indices] = x[indices]
    assert_bitwise_equal(pad(x[indices], indices, 50), expected, "pad")


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
def test_every_run_gives_the_same_bits(device, rng_state, dtype):
    lengths = [200, 1, 90, 300] if ON_GPU else [20, 1]
    rows, columns = sum(lengths), 128
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    x, dy = (torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(2))
    weight = torch.randn(columns, device=device, dtype=dtype)
    table = torch.randn(30, columns, device=device, dtype=dtype)
    ids = torch.randint(30, (rows,), device=device)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, weight, table)]
        dropout = {"dropout_p": P, "rng_state": rng_state}
        small = (leaves[2][:2], leaves[2][:20], leaves[1])
        h = embed_layer_norm(ids, ids % 2, ids % 20, leaves[2], *small, eps=1e-12, **dropout)
        q = (h + leaves[0]).view(rows, 2, 64)
        longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        out, _ = attention(q, q, q, cu_seqlens, cu_seqlens, site=8, **longest, **dropout)
        y = add_layer_norm(out.flatten(1), h, leaves[1], eps=1e-12, site=9, **dropout)
        y.backward(dy)
        return y, *(leaf.grad for leaf in leaves)

    first = run()
    for _ in range(REPEATS):
        for a, b in zip(first, run(), strict=True):
            assert_bitwise_equal(a, b, "a repeat")


@pytest.mark.skipif(not ON_GPU, reason="a CPU has one stream")
def test_launches_follow_the_current_stream():
    """Behind half a second of waiting on a side stream, as what they read is."""
    x = torch.zeros(1 << 20, 8, device="cuda", dtype=torch.bfloat16)
    indices = torch.arange(x.shape[0], device="cuda")
    unpad(x, indices)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)
        x.fill_(1)
        y = unpad(x, indices)
    side.synchronize()
    assert (y == 1).all()


@pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="takes two GPUs")
def test_launches_go_to_the_device_of_their_tensors():
    x = torch.randn(50, 8, device="cuda:1")
    indices = torch.arange(40, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_bitwise_equal(unpad(x, indices), x[:40], "unpad on the second GPU")
    assert torch.cuda.current_device() == 0
