"""The CUDA kernels where the tests of the ops do not lead them: every layout of rows, long rows of
logits, logits in chunks, other schedules. Emulated; FASTBERT_BUILD=cuda_emulated builds it."""

import pytest
import torch
import torch.nn.functional as F

from fastbert import extension, use_backend
from fastbert.ops import mlm_cross_entropy as mlm_module
from fastbert.ops.add_layer_norm import add_layer_norm, add_layer_norm_bwd
from fastbert.ops.bias_gelu import bias_gelu_bwd
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.mlm_distillation import mlm_distillation
from fastbert.ops.philox import row_keep_mask
from fastbert.ops.unpad import pad, unpad
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.plain import plain_mlm_distillation

EPS = 1e-12
DROPOUT = {"dropout_p": 0.25, "site": 5, "rng_state": torch.tensor([3, 2**33 + 1])}
# A warp to a row with 2, 3 and 4 chunks a thread and a block to a row, each as whole chunks on
# 16-byte boundaries; then a warp and a block with rows that begin anywhere.
WIDTHS = [264, 768, 1000, 2048, 30, 1030]


@pytest.fixture(autouse=True)
def emulated():
    reason = extension.load("_C_emulated")
    if reason is not None:
        pytest.skip(reason)
    with use_backend("cuda_emulated"):
        yield


def kept(rows, width):
    return row_keep_mask(DROPOUT["rng_state"], rows, width, dropout_p=0.25, site=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_cuda_add_layer_norm_in_every_layout(width, dtype):
    rows = 11
    keep = kept(rows, width)

    def plain(x, residual, weight, bias, linear_bias):
        h = torch.where(keep, x + linear_bias, 0) / 0.75 + residual
        return F.layer_norm(h, (width,), weight, bias, EPS)

    values = {name: torch.randn(rows, width) for name in ("x", "residual")}
    values |= {name: torch.randn(width) for name in ("weight", "bias", "linear_bias")}
    with assert_ran("add_layer_norm_bwd", "cuda_emulated"):
        op_check(
            lambda **a: add_layer_norm(**a, eps=EPS, **DROPOUT),
            plain,
            values,
            dtype,
            name="add_layer_norm",
            reduction_rows=rows,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_cuda_embed_layer_norm_in_every_layout(width, dtype):
    """Words of which one comes often and one is padding, in a large table and in a small one."""
    rows = 60
    keep = kept(rows, width)
    ids = {"input_ids": torch.randint(12, (rows,)), "token_type_ids": torch.randint(2, (rows,))}
    ids["position_ids"] = torch.arange(rows) % 30
    ids["input_ids"][10:40] = 7

    def plain(input_ids, token_type_ids, position_ids, words, types, positions, weight, bias):
        h = F.embedding(input_ids, words, 0) + F.embedding(token_type_ids, types)
        h = h + F.embedding(position_ids, positions)
        y = F.layer_norm(h, (width,), weight, bias, EPS)
        return torch.where(keep, y, 0) / 0.75

    def op(input_ids, token_type_ids, position_ids, **tables):
        ids = (input_ids, token_type_ids, position_ids)
        return embed_layer_norm(*ids, *tables.values(), eps=EPS, padding_idx=0, **DROPOUT)

    tables = {"words": (12, width), "types": (2, width), "positions": (30, width)}
    tables |= {"weight": (width,), "bias": (width,)}
    values = ids | {name: torch.randn(shape) for name, shape in tables.items()}
    with assert_ran("embed_layer_norm_bwd", "cuda_emulated"):
        op_check(op, plain, values, dtype, name="embed_layer_norm", reduction_rows=rows)


def test_cuda_embed_layer_norm_padding_in_a_small_table():
    words = torch.randn(4, 16, requires_grad=True)
    others, weight = torch.randn(30, 16), torch.randn(16)
    ids = torch.arange(20) % 4
    embed_layer_norm(
        ids, ids, ids, words, others, others, weight, eps=EPS, padding_idx=1
    ).square().sum().backward()
    assert not words.grad[1].any()
    assert words.grad[[0, 2, 3]].any(1).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_cuda_norms_with_outputs_wider_than_their_inputs(autocast):
    """bf16 in, fp32 out, as under CUDA's autocast; an fp32 residual."""
    x = torch.randn(9, 48, dtype=torch.bfloat16)
    residual = None if autocast else torch.randn(9, 48)
    weight, bias = torch.randn(48), torch.randn(48)
    op = torch.ops.fastbert.add_layer_norm_fwd.default
    y, h, mean, rstd = op(
        x, None, residual, weight, bias, EPS, 0.25, 5, DROPOUT["rng_state"], torch.float32, True
    )
    total = torch.where(kept(9, 48), x.double(), 0) / 0.75
    total = (total if residual is None else total + residual).requires_grad_()
    expected = F.layer_norm(total, (48,), weight.double(), bias.double(), EPS)
    assert (y.dtype, h.dtype) == (torch.float32, torch.bfloat16 if autocast else torch.float32)
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)
    dy = torch.randn(9, 48)
    dx, dh, *_ = add_layer_norm_bwd(
        dy, None, h, weight, bias, mean, rstd, None, 0.25, 5, DROPOUT["rng_state"], torch.bfloat16
    )
    expected.backward(dy.double())
    scale = total.grad.abs().max().item()
    torch.testing.assert_close(dh.double(), total.grad, rtol=0.02, atol=0.02 * scale)
    masked = torch.where(kept(9, 48), total.grad, 0) / 0.75
    torch.testing.assert_close(dx.double(), masked, rtol=0.02, atol=0.02 * scale)
    assert dx.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("most", [3 * 5003, 1 << 26])
def test_cuda_mlm_cross_entropy_of_long_rows(dtype, most, monkeypatch):
    """More logits than the threads of a block hold at once, the largest at the end; in chunks."""
    monkeypatch.setattr(mlm_module, "MAX_LOGITS", most)
    rows, vocab = 10, 5003
    values = {"hidden": torch.randn(rows, 16), "weight": torch.randn(vocab, 16) * 0.3}
    values["bias"] = torch.linspace(-4, 4, vocab)
    labels = torch.randint(vocab, (rows,))
    labels[4] = -100
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}

    def plain(hidden, weight, bias, labels):
        logits = F.linear(hidden, weight, bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
        return loss + 1e-3 * logits.logsumexp(-1).square() * (labels != -100)

    with assert_ran("mlm_cross_entropy_bwd", "cuda_emulated"):
        op_check(
            lambda **a: mlm_cross_entropy(**a, **options),
            plain,
            {**values, "labels": labels},
            dtype,
            name="mlm_cross_entropy",
            reduction_rows=rows,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("most", [3 * 5003, 1 << 26])
def test_cuda_mlm_distillation_of_long_rows(dtype, most, monkeypatch):
    """The same of both models' logits, whose largest are not at one place."""
    monkeypatch.setattr(mlm_module, "MAX_LOGITS", most)
    rows, vocab = 10, 5003
    values = {"hidden": torch.randn(rows, 16), "weight": torch.randn(vocab, 16) * 0.3}
    values["bias"] = torch.linspace(-4, 4, vocab)
    taught = {f"teacher_{k}": torch.randn_like(v) for k, v in values.items()}
    taught["teacher_weight"] *= 0.3
    labels = torch.randint(vocab, (rows,))
    labels[4] = -100

    with assert_ran("mlm_distillation_bwd", "cuda_emulated"):
        op_check(
            mlm_distillation,
            plain_mlm_distillation,
            {**values, "labels": labels, **taught},
            dtype,
            name="mlm_distillation",
            reduction_rows=rows,
        )


def test_cuda_gradients_do_not_depend_on_the_schedule():
    """Nothing but barriers orders threads, and no sum is in the order they happen to come."""
    x, dy, bias = torch.randn(700, 48), torch.randn(700, 48), torch.randn(48)
    before = torch.ops.fastbert.cuda_emulated_schedule(0)
    first = bias_gelu_bwd(dy, x, bias, "none")
    for seed in (1, 2):
        torch.ops.fastbert.cuda_emulated_schedule(seed)
        for a, b in zip(first, bias_gelu_bwd(dy, x, bias, "none"), strict=True):
            assert_bitwise_equal(a, b, "gradient")
    assert torch.ops.fastbert.cuda_emulated_schedule(before) == 2


def test_cuda_kernels_refuse_what_they_do_not_take():
    with pytest.raises(NotImplementedError, match="float64"):
        torch.ops.fastbert.bias_gelu_fwd(torch.randn(2, 8).double(), None, "none")
    wide = torch.randn(2, 8200)
    with pytest.raises(NotImplementedError, match="8200 columns"):
        add_layer_norm(wide, None, torch.ones(8200), eps=EPS)


@pytest.mark.parametrize("index", [-1, 4])
def test_cuda_unpad_outside_of_its_rows(index):
    """A GPU ends the launch; nothing is read or written there."""
    indices = torch.tensor([0, index])
    with pytest.raises(RuntimeError, match=f"index {index}, which is outside the 4 rows"):
        unpad(torch.randn(4, 8), indices)
    with pytest.raises(RuntimeError, match=f"index {index}, which is outside the 4 rows"):
        pad(torch.randn(2, 8), indices, 4)


@pytest.mark.parametrize("first", range(5))
def test_cuda_unpad_moves_words_of_every_length(first):
    """Rows of 32 bytes that begin on a boundary of 16, 8, 4, 2 bytes and of one."""
    offset = (0, 8, 4, 2, 1)[first]
    x = torch.arange(6 * 32 + offset).to(torch.uint8)[offset:].view(6, 32)
    indices = torch.tensor([5, 0, 3])
    assert_bitwise_equal(unpad(x, indices), x[indices], "unpad")
    assert_bitwise_equal(pad(x[:3], indices, 6)[indices], x[:3], "pad")
