"""mlm_cross_entropy against a linear layer and torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from fastbert import use_backend
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy, mlm_cross_entropy_fwd
from fastbert.reference import mlm_cross_entropy as reference_module
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran

OP = "mlm_cross_entropy"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rows, width, vocab, bias=True):
    labels = torch.randint(vocab, (rows,))
    labels[::3] = -100
    return {
        "hidden": torch.randn(rows, width),
        "weight": torch.randn(vocab, width) * width**-0.5,
        "bias": torch.randn(vocab) if bias else None,
        "labels": labels,
    }


def plain(hidden, weight, bias, labels, label_smoothing=0.0, z_loss=0.0):
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    return loss + z_loss * (logits.logsumexp(-1).square() * (labels != -100))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (7, 33, 101), (40, 64, 999)], ids=["smallest", "odd", "larger"]
)
def test_mlm_cross_entropy_matches_reference(backend, shape, dtype):
    with assert_ran("mlm_cross_entropy_fwd", backend.name):
        op_check(
            mlm_cross_entropy,
            plain,
            inputs(*shape),
            dtype,
            name="mlm_cross_entropy",
            reduction_rows=shape[0],
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.2, "z_loss": 0.1}]
)
def test_mlm_cross_entropy_options(backend, options, bias):
    op_check(
        lambda **a: mlm_cross_entropy(**a, **options),
        lambda **a: plain(**a, **options),
        inputs(12, 16, 50, bias),
        torch.float32,
        name="mlm_cross_entropy",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlm_cross_entropy_in_chunks(monkeypatch, dtype):
    monkeypatch.setattr(reference_module, "MAX_LOGITS", 4 * 50)
    assert reference_module.rows_per_chunk(11, 50) < 5
    with use_backend("reference"):
        op_check(mlm_cross_entropy, plain, inputs(11, 16, 50), dtype, name="mlm_cross_entropy")


def test_mlm_cross_entropy_empty(backend):
    arguments = inputs(0, 8, 20)
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if k != "labels"}
    loss = mlm_cross_entropy(**leaves, labels=arguments["labels"])
    loss.sum().backward()
    assert loss.shape == (0,)
    assert not any(leaf.grad.any() for leaf in leaves.values())


def test_mlm_cross_entropy_all_ignored(backend):
    arguments = inputs(6, 8, 20)
    arguments["labels"].fill_(-100)
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if k != "labels"}
    loss = mlm_cross_entropy(**leaves, labels=arguments["labels"])
    loss.sum().backward()
    assert not loss.any()
    assert not any(leaf.grad.any() for leaf in leaves.values())


def test_mlm_cross_entropy_noncontiguous(backend):
    op_check(
        mlm_cross_entropy,
        plain,
        inputs(9, 16, 50),
        torch.float32,
        name="mlm_cross_entropy",
        layout="noncontiguous",
    )


def test_mlm_cross_entropy_extreme_values(backend):
    arguments = inputs(5, 4, 30)
    arguments["weight"] = arguments["weight"] * 3e4
    labels = arguments["labels"]
    loss = mlm_cross_entropy(**arguments)
    torch.testing.assert_close(loss, plain(**arguments), rtol=1e-5, atol=1e-2)
    assert loss.isfinite().all()
    assert not loss[labels == -100].any()


def test_mlm_cross_entropy_masked_words(backend):
    """Words a bias of -inf masks have no part in the loss, however many lie side by side."""
    arguments = inputs(9, 16, 900)
    arguments["labels"] %= 250
    arguments["bias"][250:800] = -torch.inf
    arguments["bias"][850:] = -torch.inf
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if k != "labels"}
    loss = mlm_cross_entropy(**leaves, labels=arguments["labels"])
    expected = plain(**leaves, labels=arguments["labels"])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())


def test_mlm_cross_entropy_autocast(backend):
    op_check(
        mlm_cross_entropy,
        plain,
        inputs(9, 16, 50),
        torch.float32,
        name="mlm_cross_entropy",
        autocast=torch.bfloat16,
        reduction_rows=9,
    )


def test_mlm_cross_entropy_frozen_weight(backend):
    arguments = inputs(9, 16, 50)
    hidden = arguments.pop("hidden").requires_grad_()
    mlm_cross_entropy(hidden, **arguments).sum().backward()
    with assert_ran("mlm_cross_entropy_bwd", backend.name):
        arguments["weight"].requires_grad_()
        mlm_cross_entropy(hidden.detach(), **arguments).sum().backward()
    assert hidden.grad.any()
    assert arguments["weight"].grad.any()


def test_mlm_cross_entropy_deterministic(backend):
    arguments = inputs(30, 16, 200)
    grads = []
    for _ in range(2):
        leaves = {k: v.clone().requires_grad_() for k, v in arguments.items() if k != "labels"}
        mlm_cross_entropy(**leaves, labels=arguments["labels"]).sum().backward()
        grads.append(leaves)
    for name in grads[0]:
        assert_bitwise_equal(grads[0][name].grad, grads[1][name].grad, name)


def test_mlm_cross_entropy_opcheck(backend):
    torch.library.opcheck(mlm_cross_entropy_fwd, (*inputs(5, 8, 20).values(), -100, 0.1, 0.01))


def test_mlm_cross_entropy_compile_fullgraph():
    compiled = torch.compile(mlm_cross_entropy, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        arguments = inputs(rows, 8, 20)
        labels = arguments.pop("labels")
        losses = []
        for function in (mlm_cross_entropy, compiled):
            leaves = {k: v.clone().requires_grad_() for k, v in arguments.items()}
            function(**leaves, labels=labels).sum().backward()
            losses.append(leaves)
        for name in arguments:
            torch.testing.assert_close(losses[0][name].grad, losses[1][name].grad)


def test_mlm_cross_entropy_second_order_raises():
    arguments = inputs(4, 8, 20)
    hidden = arguments.pop("hidden").requires_grad_()
    loss = mlm_cross_entropy(hidden, **arguments).sum()
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([1, 20, 3, 4])}, "label 20 at row 1"),
        ({"labels": torch.tensor([1, 2, -1, 4])}, "label -1 at row 2"),
        ({"labels": torch.tensor([1.0, 2, 3, 4])}, "int64"),
        ({"labels": torch.tensor([1, 2])}, "labels"),
        ({"weight": torch.randn(20, 7)}, "weight"),
        ({"bias": torch.randn(19)}, "bias"),
    ],
)
def test_mlm_cross_entropy_bad_input_raises(change, message):
    with pytest.raises(ValueError, match=message):
        mlm_cross_entropy(**{**inputs(4, 8, 20), **change})
    with pytest.raises(ValueError, match="label_smoothing"):
        mlm_cross_entropy(**inputs(4, 8, 20), label_smoothing=1.0)
