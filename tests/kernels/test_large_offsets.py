"""Rows that begin beyond 2^31 elements, without the memory for them: only the last programs of a
launch run, and of the tensors only the pages they touch exist. An offset that wraps reads where
nothing is: the process ends there."""

import os

import pytest
import torch
from fastbert.kernels import (
    add_layer_norm,
    attention,
    bias_gelu,
    disentangled_attention,
    embed_layer_norm,
    geglu,
    philox,
    rotary,
    unpad,
)

from fastbert.reference.add_layer_norm import (
    add_layer_norm_bwd_reference,
    add_layer_norm_reference,
)
from fastbert.reference.attention import attention_bwd_reference, attention_reference
from fastbert.reference.bias_gelu import bias_gelu_bwd_reference, bias_gelu_fwd_reference
from fastbert.reference.disentangled_attention import (
    disentangled_attention_reference,
    relative_buckets,
)
from fastbert.reference.geglu import geglu_bwd_reference, geglu_fwd_reference
from fastbert.reference.philox import philox4x32
from fastbert.reference.rotary import rotary_reference
from fastbert.testing.interpreter import last_programs

LIMIT = 2**31
END = 3
"""Rows at the end that hold values and are compared."""

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter"
)


@pytest.fixture(autouse=True)
def untouched_memory(poison):
    """Fresh memory is left alone, and what is too large for this machine skips the test."""
    torch.utils.deterministic.fill_uninitialized_memory = False


def tall(*row: int, dtype=torch.float16) -> torch.Tensor:
    """As many rows as pass the limit, and a few: values in the last ones, nothing in the others."""
    size = torch.Size(row).numel()
    try:
        rows = torch.empty((LIMIT // size + 2 * END, *row), dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    assert (rows.shape[0] - END) * size > LIMIT
    last = torch.randn(END, *row) if dtype.is_floating_point else torch.randint(99, (END, *row))
    rows[-END:] = last.to(dtype)
    return rows


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=4e-3, atol=4e-3)


def test_bias_gelu_far_out():
    columns = 1 << 20
    x, dy, bias = tall(columns), tall(columns), torch.randn(columns).half()
    last = slice(-512, None)
    with last_programs(1):
        y = bias_gelu.bias_gelu_fwd(x, bias, "none")
        dx, _ = bias_gelu.bias_gelu_bwd(dy, x, bias, "none")
    rows = (x[-1:, last], bias[last])
    close(y[-1:, last], bias_gelu_fwd_reference(*rows, "none"))
    close(dx[-1:, last], bias_gelu_bwd_reference(dy[-1:, last], *rows, "none")[0])


def test_geglu_far_out():
    columns = 1 << 19
    x, bias = tall(2 * columns), torch.randn(2 * columns).half()
    dy = torch.empty((x.shape[0], columns), dtype=torch.float16)
    dy[-END:] = torch.randn(END, columns).half()
    with last_programs(1):
        y = geglu.geglu_fwd(x, bias, "none")
        dx, _ = geglu.geglu_bwd(dy, x, None, "none")

    def last(rows):
        """The last 512 columns of both halves of the last row."""
        return torch.cat([half[-1:, -512:] for half in rows.chunk(2, dim=-1)], dim=-1)

    few, few_bias = last(x), last(bias[None])[0]
    close(y[-1:, -512:], geglu_fwd_reference(few, few_bias, "none"))
    close(last(dx), geglu_bwd_reference(dy[-1:, -512:], few, None, "none")[0])


def test_rotary_far_out():
    heads, dim = 16, 64
    qkv = tall(3 * heads * dim)
    angles = torch.rand(5, dim // 2)
    index = torch.arange(qkv.shape[0]) % 5
    with last_programs(3):
        out = rotary.rotary(qkv, heads, angles.cos(), angles.sin(), index, False)
    last = (qkv[-END:], heads, angles.cos(), angles.sin(), index[-END:], False)
    close(out[-END:], rotary_reference(*last))


def test_add_layer_norm_far_out():
    columns = 8192
    x, residual, dy = tall(columns), tall(columns), tall(columns)
    weight, bias = (torch.randn(columns).half() for _ in range(2))
    options = (torch.float16, True)
    with last_programs(END):
        y, h, mean, rstd = add_layer_norm.add_layer_norm_fwd(
            x, None, residual, weight, bias, 1e-5, 0.0, 0, None, *options
        )
    last = (x[-END:], None, residual[-END:], weight, bias, 1e-5, 0, None, *options)
    saved = add_layer_norm_reference(*last)
    for ours, expected in zip((y, h, mean, rstd), saved, strict=True):
        close(ours[-END:], expected)
    rstd.nan_to_num_(0.0)  # of the rows no program has written
    mean.nan_to_num_(0.0)
    with last_programs(1):
        _, dresidual, *_ = add_layer_norm.add_layer_norm_bwd(
            dy, None, h, weight, bias, mean, rstd, None, 0.0, 0, None, torch.float16
        )
    _, expected, *_ = add_layer_norm_bwd_reference(
        dy[-END:], None, *saved[1:2], weight, bias, *saved[2:], 0, None, torch.float16, None
    )
    close(dresidual[-END:], expected)


def test_embeddings_far_out():
    columns = 8192
    words = tall(columns)
    small, weight = torch.randn(END, columns).half(), torch.ones(columns).half()
    zeros = torch.zeros(END, dtype=torch.int64)
    ids = torch.arange(words.shape[0] - END, words.shape[0])
    options = (weight, None, 1e-5, None, 0.0, 0, None, torch.float16, None)
    _, h, _, _ = embed_layer_norm.embed_layer_norm_fwd(
        ids, zeros, zeros, words, small, small, *options
    )
    close(h, words[-END:] + 2 * small[0])


@pytest.mark.parametrize("scatter", [False, True])
def test_moved_rows_far_out(scatter):
    """Rows of odd bytes are moved byte by byte: as many elements as bytes."""
    padded = tall(8191, dtype=torch.uint8)
    indices = torch.tensor([padded.shape[0] - 1, padded.shape[0] - END])
    rows = torch.randint(99, (2, 8191), dtype=torch.uint8)
    with last_programs(8):
        unpad._move(*((rows, indices, padded) if scatter else (padded, indices, rows)), scatter)
    assert torch.equal(rows, padded[indices])


@pytest.mark.parametrize("scatter", [False, True])
def test_packed_rows_far_out(scatter):
    packed = tall(8191, dtype=torch.uint8)
    indices = torch.zeros(packed.shape[0], dtype=torch.int64)
    indices[-END:] = torch.arange(END)
    padded = torch.randint(99, (END, 8191), dtype=torch.uint8)
    with last_programs(8):
        unpad._move(*((packed, indices, padded) if scatter else (padded, indices, packed)), scatter)
    assert torch.equal(packed[-END:], padded)


def test_attention_far_out():
    """One sequence of a million rows, of which no program runs, and one of three behind it."""
    heads, dim = 16, 128
    q, k, v, dout = (tall(heads, dim) for _ in range(4))
    total = q.shape[0]
    starts = torch.tensor([0, total - END, total], dtype=torch.int32)
    options = (starts, starts, total, total, dim**-0.5, None, 0.0, 0, None)
    # The last sequence's slot and that of the idle rows behind it; one more would be the first's.
    with last_programs(2):
        out, lse = attention.attention_fwd(q, k, v, *options)
        gradients = attention.attention_bwd(dout, q, k, v, out, lse, *options)
    last_heads = slice(heads - 2, None)
    ends = [t[-END:, last_heads] for t in (q, k, v, dout)]
    one = torch.tensor([0, END], dtype=torch.int32)
    local = (one, one, dim**-0.5, None, 0, None)
    expected, expected_lse = attention_reference(*ends[:3], *local)
    close(out[-END:, last_heads], expected)
    close(lse[last_heads, -END:], expected_lse)
    slow = attention_bwd_reference(ends[3], *ends[:3], expected_lse, *local)
    for ours, theirs in zip(gradients, slow, strict=True):
        close(ours[-END:, last_heads], theirs)


@pytest.mark.parametrize(("rows", "copied"), [(LIMIT // 48 - 1, False), (LIMIT // 48 + 1, True)])
def test_heads_far_apart_are_brought_together(rows, copied):
    """Heads before rows in memory: the offset of the last one does not fit 32 bits."""
    t = torch.empty((3, rows, 16), dtype=torch.float16, device="meta").transpose(0, 1)
    (ours,) = attention.with_near_heads(t)
    assert (ours is not t) == copied
    assert ours.stride() == ((48, 16, 1) if copied else t.stride())


def test_disentangled_attention_far_out():
    """As attention; of the tables' sums, which a program has of all sequences, nothing is run."""
    heads, dim = 16, 128
    q, k, v = (tall(heads, dim) for _ in range(3))
    tables = [torch.randn(16, heads, dim).half() for _ in range(2)]
    total = q.shape[0]
    starts = torch.tensor([0, total - END, total], dtype=torch.int32)
    rest = (relative_buckets(8, 20), starts, END, dim**-0.5, 0.0, 0, None)
    with last_programs(2):
        out, lse = disentangled_attention.disentangled_attention_fwd(q, k, v, *tables, *rest)
    last_heads = slice(heads - 2, None)
    ends = [t[-END:, last_heads] for t in (q, k, v)]
    few = [t[:, last_heads] for t in tables]
    one = torch.tensor([0, END], dtype=torch.int32)
    local = (rest[0], one, dim**-0.5, 0, None)
    expected, expected_lse = disentangled_attention_reference(*ends, *few, *local)
    close(out[-END:, last_heads], expected)
    close(lse[last_heads, -END:], expected_lse)


def test_score_mask_far_out():
    """The mask of one head alone passes the limit."""
    size, threshold, site = 46_400, 6554, 3
    assert size**2 > LIMIT
    state, sequences = torch.tensor([5, 7]), torch.zeros(1, dtype=torch.int64)
    with last_programs(1):
        mask = philox.score_keep_mask(state, sequences, 1, size, size, threshold, site)
    row, column = torch.arange(size - 16, size)[:, None], torch.arange(size - 16, size)
    place = (row // 16 * 8 + row % 8) << 16 | (column // 16 * 4 + column % 8 // 2)
    counter = (place, *torch.tensor([0, site, 7]))
    words = torch.stack(philox4x32(counter, tuple(torch.tensor([5, 0]))))
    word = words.gather(0, (2 * (row % 16 // 8) + column % 16 // 8)[None])[0]
    kept = (word >> 16 * (column % 2) & 0xFFFF) >= threshold
    assert torch.equal(mask[0, 0, -16:, -16:], kept)
