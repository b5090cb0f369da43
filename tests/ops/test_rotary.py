"""rotary against transformers' rotation of queries and keys, in every backend."""

import pytest
import torch
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from fastbert.dispatch import use_backend
from fastbert.ops.rotary import rotary, rotary_op
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran

OP = "rotary"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(positions, head_dim, theta=10_000.0):
    """cos and sin `(P, D/2)` of Su et al. 2021, section 3.2.2."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return angles.cos().float(), angles.sin().float()


def plain(qkv, num_heads, cos, sin, index):
    """transformers' two passes; in float64 the same formula without its casts to fp32."""
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)
    cos, sin = (torch.cat([t[index]] * 2, -1).to(qkv.dtype) for t in (cos, sin))
    if qkv.dtype == torch.float64:
        q, k = (t * cos[:, None] + _rotate_half(t) * sin[:, None] for t in (q, k))
    else:
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return torch.stack([q, k, v], 1).flatten(1)


def _rotate_half(x):
    u, v = x.chunk(2, -1)
    return torch.cat([-v, u], -1)


def inputs(rows, heads, head_dim, positions=50):
    cos, sin = tables(positions, head_dim)
    return {
        "qkv": torch.randn(rows, 3 * heads * head_dim),
        "index": torch.randint(positions, (rows,)),
        "num_heads": heads,
    }, (cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# One row and pair; a head and rows past a vector; past a program's tile; more than a tile wide.
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 34), (70, 2, 64), (3, 1, 256)], ids=str)
def test_rotary_matches_transformers(backend, shape, dtype):
    arguments, (cos, sin) = inputs(*shape)
    with assert_ran("rotary", backend.name):
        op_check(
            lambda **a: rotary(cos=cos, sin=sin, **a),
            lambda **a: plain(cos=cos, sin=sin, **a),
            arguments,
            dtype,
            name="rotary",
        )


def test_rotary_is_exact_far_out(backend):
    """Position 8,191 in fp32: the angles come from the tables, none is computed here."""
    cos, sin = tables(8192, 64, theta=160_000.0)
    qkv, index = torch.randn(4, 3 * 64), torch.tensor([8191, 8190, 4095, 0])
    wide = plain(qkv.double(), 1, cos.double(), sin.double(), index)
    torch.testing.assert_close(rotary(qkv, 1, cos, sin, index).double(), wide, rtol=0, atol=1e-6)


def test_rotary_scores_depend_on_distance_alone(backend):
    """Su et al. 2021, eq. 11: what the embedding is for."""
    cos, sin = tables(40, 16)
    row = torch.randn(1, 48)
    rotated = rotary(row.expand(40, 48), 1, cos, sin, torch.arange(40))
    q, k, _ = rotated.chunk(3, 1)
    scores = q @ k.T
    for distance in (-7, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_rotary_inverse_undoes_it_and_copies_values(backend):
    arguments, (cos, sin) = inputs(9, 2, 8)
    qkv, index = arguments["qkv"], arguments["index"]
    qkv[0, -1], qkv[1, -2] = torch.inf, torch.nan
    there = rotary_op(qkv, 2, cos, sin, index, False)
    back = rotary_op(there, 2, cos, sin, index, True)
    torch.testing.assert_close(back[:, :32], qkv[:, :32], rtol=0, atol=1e-6)
    assert_bitwise_equal(there[:, 32:], qkv[:, 32:], "values")
    assert not torch.equal(there[:, :32], qkv[:, :32])


def test_rotary_empty(backend):
    cos, sin = tables(3, 4)
    qkv = torch.randn(0, 12, requires_grad=True)
    rotary(qkv, 1, cos, sin, torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert qkv.grad.shape == (0, 12)


def test_rotary_noncontiguous(backend):
    arguments, (cos, sin) = inputs(9, 2, 8)
    op_check(
        lambda **a: rotary(cos=cos, sin=sin, **a),
        lambda **a: plain(cos=cos, sin=sin, **a),
        arguments,
        torch.float32,
        name="rotary",
        layout="noncontiguous",
    )


def test_rotary_deterministic_for_any_thread_count(backend):
    arguments, (cos, sin) = inputs(900, 2, 32)
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(rotary(cos=cos, sin=sin, **arguments))
    torch.set_num_threads(before)
    assert_bitwise_equal(*results, "rotated")


def test_rotary_opcheck(backend):
    arguments, (cos, sin) = inputs(5, 2, 8)
    args = (arguments["qkv"], 2, cos, sin, arguments["index"])
    torch.library.opcheck(rotary_op, (*args, False))
    torch.library.opcheck(rotary_op, (*args, True))


def test_rotary_compile_fullgraph():
    cos, sin = tables(20, 8)

    def step(qkv, index):
        return rotary(qkv, 2, cos, sin, index) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        qkv, index = torch.randn(rows, 48), torch.arange(rows)
        grads = []
        for function in (step, compiled):
            leaf = qkv.clone().requires_grad_()
            function(leaf, index).square().sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


def test_rotary_second_order_raises():
    cos, sin = tables(3, 4)
    qkv = torch.randn(3, 12, requires_grad=True)
    total = rotary(qkv, 1, cos, sin, torch.arange(3)).sum()
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(total, qkv, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.randn(4, 13)}, "qkv must"),
        ({"qkv": torch.randn(4, 9)}, "even D"),
        ({"cos": torch.randn(5, 4)}, "cos must"),
        ({"sin": torch.randn(6, 2)}, "sin must"),
        ({"index": torch.zeros(3, dtype=torch.int64)}, "index must"),
        ({"index": torch.zeros(4)}, "index must"),
        ({"index": torch.tensor([0, 1, 5, 2])}, "holds 5"),
        ({"index": torch.tensor([0, 1, -1, 2])}, "holds -1"),
    ],
)
def test_rotary_bad_input_raises(change, message):
    good = {
        "qkv": torch.randn(4, 12),
        "num_heads": 1,
        "cos": torch.randn(5, 2),
        "sin": torch.randn(5, 2),
        "index": torch.arange(4),
    }
    with pytest.raises(ValueError, match=message):
        rotary(**{**good, **change})


def test_rotary_float64_names_its_reason():
    cos, sin = tables(4, 4)
    with use_backend(rotary="cpu"), pytest.raises(NotImplementedError, match="float64"):
        rotary(torch.randn(4, 12, dtype=torch.float64), 1, cos, sin, torch.arange(4))
