"""encoder against plain PyTorch, and against the layers' own ops, whose bits it gives."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fastbert import extension
from fastbert.dispatch import use_backend
from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.ops.attention import attention, attention_packed_qkv
from fastbert.ops.encoder import LINEARS, NORMS, encoder, encoder_fwd, pack_layers
from fastbert.ops.linear import linear
from fastbert.ops.linear_gelu import linear_gelu
from fastbert.testing.compare import assert_bitwise_equal, assert_close_to_oracle
from fastbert.testing.counters import assert_ran

OP = "encoder"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-12


def inputs(lengths, num_layers=2, width=48, inner=80, filling=0):
    """x, weights, biases, norms, cu_seqlens, with biases and norms off 0 and 1."""
    sizes = [(width, width)] * 4 + [(inner, width), (width, inner)]
    weights = [torch.randn(size) * size[1] ** -0.5 for _ in range(num_layers) for size in sizes]
    biases = [torch.randn(len(w)) / 4 for w in weights]
    norms = [torch.randn(width) / 4 + (i % 2 == 0) for i in range(num_layers * NORMS)]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.randn(sum(lengths) + filling, width), weights, biases, norms, cu_seqlens


def numbers(num_heads=4, approximate="none"):
    return {"num_heads": num_heads, "softmax_scale": 0.3, "eps": EPS, "approximate": approximate}


def cast(values, dtype):
    """The float tensors of `inputs` in another dtype."""
    *floats, cu_seqlens = values
    return (*(_cast(v, dtype) for v in floats), cu_seqlens)


def _cast(value, dtype):
    return [t.to(dtype) for t in value] if isinstance(value, list) else value.to(dtype)


def plain(x, weights, biases, norms, cu_seqlens, *, cu_seqlens_k=None, **numbers):
    """The layers by torch's own functions, each sequence alone."""
    starts = cu_seqlens.tolist()
    counts = (cu_seqlens if cu_seqlens_k is None else cu_seqlens_k).diff().tolist()
    num_heads, softmax_scale, eps, approximate = numbers.values()
    for i in range(len(biases) // LINEARS):
        w, b = (t[LINEARS * i : LINEARS * (i + 1)] for t in (weights, biases))
        gain_in, shift_in, gain_out, shift_out = norms[NORMS * i : NORMS * (i + 1)]
        q, k, v = (
            F.linear(x, w[j], b[j]).unflatten(1, (num_heads, -1)).transpose(0, 1) for j in range(3)
        )
        context = torch.zeros_like(q)
        for (first, last), count in zip(itertools.pairwise(starts), counts, strict=True):
            rows, keys = slice(first, last), slice(first, first + count)
            if count:
                context[:, rows] = F.scaled_dot_product_attention(
                    *(t[None] for t in (q[:, rows], k[:, keys], v[:, keys])), scale=softmax_scale
                )[0]
        attended = F.linear(context.transpose(0, 1).flatten(1), w[3], b[3])
        x = F.layer_norm(x + attended, x.shape[1:], gain_in, shift_in, eps)
        hidden = F.gelu(F.linear(x, w[4], b[4]), approximate=approximate)
        x = F.layer_norm(x + F.linear(hidden, w[5], b[5]), x.shape[1:], gain_out, shift_out, eps)
    return x


def by_layers(x, weights, biases, norms, cu_seqlens, *, cu_seqlens_k=None, **numbers):
    """The layers by their own ops."""
    num_heads, softmax_scale, eps, approximate = numbers.values()
    for i in range(len(biases) // LINEARS):
        w, b = (t[LINEARS * i : LINEARS * (i + 1)] for t in (weights, biases))
        gain_in, shift_in, gain_out, shift_out = norms[NORMS * i : NORMS * (i + 1)]
        qkv = linear(x, w[:3], b[:3])
        options = {"softmax_scale": softmax_scale}
        if cu_seqlens_k is None:
            context, _ = attention_packed_qkv(
                qkv, num_heads, cu_seqlens, max_seqlen=len(x), **options
            )
        else:
            q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
            keys = key_rows(cu_seqlens, cu_seqlens_k)
            bounds = {"max_seqlen_q": len(x), "max_seqlen_k": len(x)}
            tensors = (q, k[keys], v[keys], cu_seqlens, cu_seqlens_k)
            context, _ = attention(*tensors, **bounds, **options)
        attended = linear(context.flatten(1), w[3], b[3])
        x = add_layer_norm(attended, x, gain_in, shift_in, eps=eps)
        hidden = linear_gelu(x, w[4], b[4], approximate=approximate)
        x = add_layer_norm(linear(hidden, w[5], b[5]), x, gain_out, shift_out, eps=eps)
    return x


def key_rows(cu_seqlens, cu_seqlens_k):
    """The first rows of each sequence, as many as the second counts."""
    pairs = zip(cu_seqlens.tolist(), cu_seqlens_k.diff().tolist(), strict=False)
    return [row for first, count in pairs for row in range(first, first + count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_encoder_matches_plain_torch(backend, dtype, approximate):
    values = cast(inputs((7, 1, 0, 40)), dtype)
    options = numbers(approximate=approximate)
    with assert_ran("encoder_fwd", backend.name):
        actual = encoder(*values, **options)
    oracle = plain(*cast(values, torch.float64), **options)
    assert_close_to_oracle(actual, oracle, plain(*values, **options), "rows", op=OP)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One row, rows behind the last sequence, more rows than one piece of the feed-forward network.
@pytest.mark.parametrize(
    ("lengths", "filling"), [((1,), 0), ((33, 5), 6), ((300, 2, 290), 0)], ids=str
)
def test_encoder_gives_the_bits_of_the_layers_ops(backend, lengths, filling, dtype):
    values = cast(inputs(lengths, filling=filling), dtype)
    room = backend.name
    if room == "reference":
        pytest.skip("torch's matmul of several weights at once depends on how they are joined")
    with use_backend(room):
        expected = by_layers(*values, **numbers())
    for packed in (None, pack_layers(values[1], dtype)):
        actual = encoder(*values, **numbers(), packed=packed)
        assert_bitwise_equal(actual, expected, "rows")


@pytest.mark.parametrize("compute_dtype", DTYPES[1:], ids=str)
# One row, more rows than one piece of the feed-forward network.
@pytest.mark.parametrize("lengths", [(1,), (33, 0, 5), (300, 2, 290)], ids=str)
def test_encoder_as_under_autocast(backend, lengths, compute_dtype):
    """Products in half precision, hidden states in fp32."""
    values, room = inputs(lengths), backend.name
    with assert_ran("encoder_fwd", room):
        actual = encoder(*values, **numbers(), compute_dtype=compute_dtype)
    assert actual.dtype == torch.float32
    with torch.autocast("cpu", compute_dtype):
        baseline = plain(*values, **numbers())
        if room != "reference":
            with use_backend(room):
                assert_bitwise_equal(actual, by_layers(*values, **numbers()), "rows")
    oracle = plain(*cast(values, torch.float64), **numbers())
    assert_close_to_oracle(actual, oracle, baseline, "rows", op=OP, compute_dtype=compute_dtype)
    packed = pack_layers(values[1], compute_dtype)
    again = encoder(*values, **numbers(), compute_dtype=compute_dtype, packed=packed)
    assert_bitwise_equal(again, actual, "rows")
    if room != "reference":
        *tensors, cu_seqlens = values
        tensors = [t.bfloat16() if isinstance(t, torch.Tensor) else t for t in tensors]
        arguments = (*tensors, packed, cu_seqlens, cu_seqlens, *numbers().values())
        with pytest.raises(ValueError, match="products are computed in, or Float, got BFloat16"):
            encoder_fwd(*arguments, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoder_with_rows_that_are_not_attended_to(backend, dtype):
    """The last of each sequence: none, some, all, more than a block."""
    values = cast(inputs((7, 9, 3, 80), filling=2), dtype)
    counts = torch.tensor([0, 7, 4, 0, 35], dtype=torch.int32)
    options = numbers() | {"cu_seqlens_k": counts.cumsum(0, dtype=torch.int32)}
    with assert_ran("encoder_fwd", backend.name):
        actual = encoder(*values, **options)
    oracle = plain(*cast(values, torch.float64), **options)
    assert_close_to_oracle(actual, oracle, plain(*values, **options), "rows", op=OP)
    if backend.name != "reference":
        with use_backend(backend.name):
            assert_bitwise_equal(actual, by_layers(*values, **options), "rows")
    values[0][7 + 4] = 100  # not attended to
    again = encoder(*values, **options)
    others = [row for row in range(len(actual)) if row != 7 + 4]
    assert_bitwise_equal(again[others], actual[others], "rows")


def test_encoder_layers_may_differ_in_width(backend):
    first, second = inputs((9, 4), 1, inner=80), inputs((9, 4), 1, inner=33)
    x, *_, cu_seqlens = first
    both = (x, *(a + b for a, b in zip(first[1:4], second[1:4], strict=True)), cu_seqlens)
    torch.testing.assert_close(encoder(*both, **numbers()), plain(*both, **numbers()))


@pytest.mark.parametrize("place", ["x", "weight"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
def test_encoder_extreme_values(backend, place, value):
    """What cannot be split into products of bf16 is read as it is, row by row."""
    if backend.name == "reference":
        pytest.skip("torch's own sums")
    values = inputs((20, 13), 1)
    {"x": values[0], "weight": values[1][4]}[place][5, 3] = value
    with use_backend(backend.name):
        expected = by_layers(*values, **numbers())
    actual = encoder(*values, **numbers())
    assert_bitwise_equal(actual, expected, "rows")
    if place == "x":
        # Only its own sequence sees it.
        assert actual[20:].isfinite().all()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_encoder_without_the_original_weights(backend, precision):
    """Packed weights alone give the same bits; also an extreme row's, where nothing was rounded
    away."""
    if backend.name == "reference":
        pytest.skip("plain PyTorch reads the weights themselves")
    values = inputs((20, 13))
    torch.set_float32_matmul_precision(precision)
    for dtype in DTYPES:
        x, weights, *rest = cast(values, dtype)
        if precision == "highest":
            x[3] *= 2.0 ** (70 if dtype != torch.float16 else 10)
        expected = encoder(x, weights, *rest, **numbers())
        packed = pack_layers(weights, dtype)
        biases, norms, cu_seqlens = rest
        starts = (cu_seqlens, cu_seqlens)
        arguments = (x, [], biases, norms, packed, *starts, *numbers().values())
        assert_bitwise_equal(encoder_fwd(*arguments), expected, f"rows in {dtype}")
        other = pack_layers(weights, torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
        if backend.isa in ("avx512_bf16", "amx"):
            with pytest.raises(ValueError, match="the originals were dropped"):
                encoder_fwd(x, [], biases, norms, other, *starts, *numbers().values())
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoder_is_batch_invariant(backend, dtype):
    if backend.name == "reference":
        pytest.skip("torch's matmul depends on the number of rows")
    lengths = (70, 1, 33)
    x, *parameters, _ = cast(inputs(lengths), dtype)
    before, starts = torch.get_num_threads(), [0, 70, 71, 104]
    together = encoder(x, *parameters, torch.tensor(starts, dtype=torch.int32), **numbers())
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for first, last in itertools.pairwise(starts):
            alone = torch.tensor([0, last - first], dtype=torch.int32)
            actual = encoder(x[first:last], *parameters, alone, **numbers())
            assert_bitwise_equal(actual, together[first:last], f"rows from {first}")
    torch.set_num_threads(before)


def test_encoder_empty(backend):
    x, weights, biases, norms, _ = inputs((4,))
    nothing = torch.zeros(1, dtype=torch.int32)
    assert encoder(x[:0], weights, biases, norms, nothing, **numbers()).shape == (0, 48)
    rows = encoder(x, [], [], [], torch.tensor([0, 4]), **numbers())
    assert torch.equal(rows, x) and rows.data_ptr() != x.data_ptr()


def test_encoder_opcheck(backend):
    x, weights, biases, norms, cu_seqlens = inputs((5, 3), 1)
    packed = pack_layers(weights, x.dtype)
    arguments = (x, weights, biases, norms, packed, cu_seqlens, cu_seqlens, *numbers().values())
    torch.library.opcheck(encoder_fwd, arguments)


def test_encoder_compile_fullgraph():
    def step(x, weights, biases, norms, cu_seqlens):
        starts = (cu_seqlens, cu_seqlens)
        return encoder_fwd(x, weights, biases, norms, [], *starts, *numbers().values()) * 2

    if extension.cpu_isa() is not None:
        pytest.skip("the C++ op takes packed weights")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    values = inputs((5, 3), 1)
    torch.testing.assert_close(compiled(*values), step(*values))


def test_encoder_bad_input_raises():
    x, weights, biases, norms, cu_seqlens = values = inputs((4, 3), 1)
    for changed, message in (
        ((x, weights[:5], biases, norms, cu_seqlens), "6 weights, 6 biases and 4 vectors"),
        ((x[:, :47], weights, biases, norms, cu_seqlens), "C a multiple of num_heads=4"),
        ((x, weights, biases, [*norms[:3], norms[3][:5]], cu_seqlens), r"norms\[3\] must have"),
        ((x, weights, biases, norms, cu_seqlens + 1), "must rise from 0"),
        ((x, [*weights[:5], weights[4]], biases, norms, cu_seqlens), r"weight \(F, C\)"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder(*changed, **numbers())
    for other in (cu_seqlens[:2], torch.tensor([0, 3, 7])):
        with pytest.raises(ValueError, match="no more rows of each, got lengths"):
            encoder(*values, **numbers(), cu_seqlens_k=other)
    with pytest.raises(ValueError, match="approximate"):
        encoder(*values, **numbers(approximate="relu"))
    half = cast(values, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x must be fp32 or torch\.float16, which is"):
        encoder(*half, **numbers(), compute_dtype=torch.float16)
    weights[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients"):
        encoder(*values, **numbers())
    refused = pytest.raises(NotImplementedError, match="float64")
    with torch.no_grad(), use_backend(encoder="cpu"), refused:
        encoder(*cast(values, torch.float64), **numbers())
