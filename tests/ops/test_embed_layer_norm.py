"""embed_layer_norm against torch's embedding and layer_norm."""

import pytest
import torch
import torch.nn.functional as F

from fastbert.ops.embed_layer_norm import embed_layer_norm, embed_layer_norm_fwd
from fastbert.ops.philox import row_keep_mask
from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran

OP = "embed_layer_norm"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RNG = torch.tensor([-9, 2**40])
EPS = 1e-12


def inputs(rows, width, vocab=50, types=2, positions=20):
    return {
        "input_ids": torch.randint(vocab, (rows,)),
        "token_type_ids": torch.randint(types, (rows,)),
        "position_ids": torch.randint(positions, (rows,)),
        "word_weight": torch.randn(vocab, width),
        "token_type_weight": torch.randn(types, width),
        "position_weight": torch.randn(positions, width),
        "weight": torch.randn(width),
        "bias": torch.randn(width),
    }


def op(**arguments):
    return embed_layer_norm(**arguments, eps=EPS)


def plain(
    input_ids,
    token_type_ids,
    position_ids,
    word_weight,
    token_type_weight,
    position_weight,
    weight,
    bias,
    inputs_embeds=None,
    padding_idx=None,
    dropout_p=0.0,
    rng_state=None,
):
    words = inputs_embeds
    if words is None:
        words = F.embedding(input_ids, word_weight, padding_idx)
    h = words + F.embedding(token_type_ids, token_type_weight)
    h = h + F.embedding(position_ids, position_weight)
    y = F.layer_norm(h, weight.shape, weight, bias, EPS)
    if dropout_p:
        keep = row_keep_mask(rng_state, *y.shape, dropout_p=dropout_p, site=SITE_EMBEDDING)
        y = torch.where(keep, y, 0) * (65536 / (65536 - int(dropout_p * 65536 + 0.5)))
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 768), (33, 7), (200, 48)], ids=str)
def test_embed_layer_norm_matches_reference(backend, shape, dtype):
    with assert_ran("embed_layer_norm_fwd", backend.name):
        op_check(op, plain, inputs(*shape), dtype, name="embed_layer_norm", reduction_rows=shape[0])


@pytest.mark.parametrize("types", [1, 2, 30])
def test_embed_layer_norm_token_types(backend, types):
    op_check(op, plain, inputs(40, 16, types=types), torch.float32, name="embed_layer_norm")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_layer_norm_dropout_mask(backend, dtype):
    options = {"dropout_p": 0.25, "rng_state": RNG}
    op_check(
        lambda **a: op(**a, **options),
        lambda **a: plain(**a, **options),
        inputs(30, 20),
        dtype,
        name="embed_layer_norm",
        reduction_rows=30,
    )


def test_embed_layer_norm_padding_idx_has_no_gradient(backend):
    arguments = inputs(30, 8, vocab=4)
    assert (arguments["input_ids"] == 0).any()
    op_check(
        lambda **a: op(**a, padding_idx=0),
        lambda **a: plain(**a, padding_idx=0),
        arguments,
        torch.float32,
        name="embed_layer_norm",
    )
    word = arguments["word_weight"].requires_grad_()
    op(**arguments, padding_idx=0).square().sum().backward()
    assert not word.grad[0].any()


def test_embed_layer_norm_inputs_embeds(backend):
    arguments = inputs(12, 8)
    arguments["input_ids"] = arguments["word_weight"] = None
    arguments["inputs_embeds"] = torch.randn(12, 8)
    for dtype in DTYPES:
        op_check(op, plain, arguments, dtype, name="embed_layer_norm", reduction_rows=12)


def test_embed_layer_norm_empty(backend):
    arguments = {
        k: v.requires_grad_() if v.is_floating_point() else v for k, v in inputs(0, 8).items()
    }
    y = op(**arguments)
    y.sum().backward()
    assert y.shape == (0, 8)
    assert not arguments["word_weight"].grad.any()


def test_embed_layer_norm_noncontiguous(backend):
    op_check(
        op, plain, inputs(9, 16), torch.float32, name="embed_layer_norm", layout="noncontiguous"
    )


def test_embed_layer_norm_deterministic(backend):
    """Many rows of few words: the gradients of one word meet in a fixed order."""
    values = inputs(500, 32, vocab=10)
    runs = []
    for _ in range(2):
        leaves = {
            k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in values.items()
        }
        op(**leaves).sin().sum().backward()
        runs.append(leaves)
    for name, leaf in runs[0].items():
        if leaf.is_floating_point():
            assert_bitwise_equal(leaf.grad, runs[1][name].grad, name)


def test_embed_layer_norm_frozen_tables(backend):
    values = inputs(12, 8)
    values["weight"].requires_grad_()
    op(**values).sum().backward()
    assert values["word_weight"].grad is None


def test_embed_layer_norm_opcheck(backend):
    values = list(inputs(6, 8).values())
    torch.library.opcheck(
        embed_layer_norm_fwd, (*values, EPS, None, 0.1, SITE_EMBEDDING, RNG, torch.float32)
    )


def test_embed_layer_norm_compile_fullgraph():
    def step(**arguments):
        return op(**arguments, dropout_p=0.1, rng_state=RNG, padding_idx=0) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        values = inputs(rows, 12)
        runs = []
        for function in (step, compiled):
            leaves = {
                k: v.clone().requires_grad_() if v.is_floating_point() else v
                for k, v in values.items()
            }
            function(**leaves).square().sum().backward()
            runs.append(leaves)
        for name, leaf in runs[0].items():
            if leaf.is_floating_point():
                torch.testing.assert_close(leaf.grad, runs[1][name].grad)


def test_embed_layer_norm_second_order_raises():
    values = inputs(4, 8)
    values["weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(op(**values).sum(), values["weight"], create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.tensor([1, 50, 2, 3])}, "input_ids holds 50 at row 1"),
        ({"input_ids": torch.tensor([1, 5, 2, -7])}, "input_ids holds -7 at row 3"),
        ({"position_ids": torch.tensor([1, 20, 2, 3])}, "position_ids holds 20"),
        ({"token_type_ids": torch.tensor([1, 0, 2, 0])}, "token_type_ids holds 2"),
        ({"position_ids": torch.tensor([1, 2])}, "position_ids must"),
        ({"input_ids": torch.tensor([1.0, 2, 3, 4])}, "int64"),
        ({"input_ids": None}, "exactly one"),
        ({"inputs_embeds": torch.randn(4, 8)}, "exactly one"),
        ({"word_weight": None}, "word_weight"),
        ({"input_ids": None, "inputs_embeds": torch.randn(4, 9)}, "inputs_embeds"),
        ({"dropout_p": 0.5}, "rng_state"),
    ],
)
def test_embed_layer_norm_bad_input_raises(change, message):
    with pytest.raises(ValueError, match=message):
        op(**{**inputs(4, 8), **change})
