"""mlm_distillation against linear layers, torch's cross-entropy and its KL divergence."""

import pytest
import torch

from fastbert import use_backend
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.mlm_distillation import mlm_distillation, mlm_distillation_fwd
from fastbert.reference import mlm_cross_entropy as reference_module
from fastbert.testing.compare import assert_bitwise_equal, op_check
from fastbert.testing.counters import assert_ran
from fastbert.testing.plain import plain_mlm_distillation

OP = "mlm_distillation"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STUDENT = ("hidden", "weight", "bias")


def inputs(rows, width, vocab, bias=True, teacher_width=None):
    labels = torch.randint(vocab, (rows,))
    labels[::3] = -100
    deep = width if teacher_width is None else teacher_width
    return {
        "hidden": torch.randn(rows, width),
        "weight": torch.randn(vocab, width) * width**-0.5,
        "bias": torch.randn(vocab) if bias else None,
        "labels": labels,
        "teacher_hidden": torch.randn(rows, deep),
        "teacher_weight": torch.randn(vocab, deep) * deep**-0.5,
        "teacher_bias": torch.randn(vocab) if bias else None,
    }


def differentiated(arguments):
    """The arguments with gradients, and the student's leaves among them."""
    leaves = {k: arguments[k].clone().requires_grad_() for k in STUDENT}
    return {**arguments, **leaves}, leaves


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2), (7, 33, 101), (40, 64, 999), (35, 24, 300, True, 70)],
    ids=["smallest", "odd", "larger", "wider teacher"],
)
def test_mlm_distillation_matches_reference(backend, shape, dtype):
    with (
        assert_ran("mlm_distillation_fwd", backend.name),
        assert_ran("mlm_distillation_bwd", backend.name),
    ):
        op_check(
            mlm_distillation,
            plain_mlm_distillation,
            inputs(*shape),
            dtype,
            name=OP,
            reduction_rows=shape[0],
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 7.0])
def test_mlm_distillation_temperatures(backend, temperature, bias):
    op_check(
        lambda **a: mlm_distillation(**a, temperature=temperature),
        lambda **a: plain_mlm_distillation(**a, temperature=temperature),
        inputs(12, 16, 50, bias),
        torch.float32,
        name=OP,
        reduction_rows=12,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlm_distillation_in_chunks(monkeypatch, dtype):
    monkeypatch.setattr(reference_module, "MAX_LOGITS", 4 * 50)
    assert reference_module.rows_per_chunk(11, 50) < 5
    with use_backend("reference"):
        op_check(mlm_distillation, plain_mlm_distillation, inputs(11, 16, 50), dtype, name=OP)


def test_mlm_distillation_has_the_loss_of_mlm_cross_entropy(backend):
    arguments = inputs(13, 16, 300)
    alone = mlm_cross_entropy(*(arguments[k] for k in (*STUDENT, "labels")))
    torch.testing.assert_close(mlm_distillation(**arguments)[0], alone)


def test_mlm_distillation_of_equals_is_nothing(backend):
    """A student like its teacher: no soft loss, and no gradient of it."""
    arguments = inputs(9, 16, 300)
    for name in STUDENT:
        arguments[f"teacher_{name}"] = arguments[name].clone()
    arguments, leaves = differentiated(arguments)
    _, soft_loss = mlm_distillation(**arguments)
    torch.testing.assert_close(soft_loss, torch.zeros(9), rtol=0, atol=1e-5)
    soft_loss.sum().backward()
    for leaf in leaves.values():
        torch.testing.assert_close(leaf.grad, torch.zeros_like(leaf), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 6])
def test_mlm_distillation_of_nothing(backend, rows):
    """No rows, or none that counts."""
    arguments = inputs(rows, 8, 20)
    arguments["labels"].fill_(-100)
    arguments, leaves = differentiated(arguments)
    losses = mlm_distillation(**arguments)
    sum(loss.sum() for loss in losses).backward()
    assert all(loss.shape == (rows,) and not loss.any() for loss in losses)
    assert not any(leaf.grad.any() for leaf in leaves.values())


def test_mlm_distillation_noncontiguous(backend):
    op_check(
        mlm_distillation,
        plain_mlm_distillation,
        inputs(9, 16, 50),
        torch.float32,
        name=OP,
        layout="noncontiguous",
    )


def test_mlm_distillation_extreme_values(backend):
    arguments = inputs(5, 4, 30)
    for name in ("weight", "teacher_weight"):
        arguments[name] = arguments[name] * 3e4
    for ours, theirs in zip(
        mlm_distillation(**arguments), plain_mlm_distillation(**arguments), strict=True
    ):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-2)


def test_mlm_distillation_masked_words(backend):
    """Words that biases of -inf mask have no part in the losses, however many lie side by side."""
    arguments = inputs(9, 16, 900)
    arguments["labels"] %= 250
    for name in ("bias", "teacher_bias"):
        arguments[name][250:800] = -torch.inf
        arguments[name][850:] = -torch.inf
    arguments["teacher_bias"][10:20] = -torch.inf
    kept = [i for i in range(900) if i < 250 or 800 <= i < 850]
    short = {
        k: v[kept] if k.removeprefix("teacher_") in ("weight", "bias") else v
        for k, v in arguments.items()
    }
    short["teacher_bias"] = short["teacher_bias"].clamp(min=-1e4)
    arguments, leaves = differentiated(arguments)
    losses = mlm_distillation(**arguments)
    for ours, theirs in zip(losses, plain_mlm_distillation(**short), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    sum(loss.sum() for loss in losses).backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves.values())


def test_mlm_distillation_autocast(backend):
    op_check(
        mlm_distillation,
        plain_mlm_distillation,
        inputs(9, 16, 50),
        torch.float32,
        name=OP,
        autocast=torch.bfloat16,
        reduction_rows=9,
    )


@pytest.mark.parametrize("index", [0, 1])
def test_mlm_distillation_of_one_loss(backend, index):
    """One of the losses alone, for the weight alone."""
    arguments = inputs(9, 16, 50)
    arguments["weight"].requires_grad_()
    with assert_ran("mlm_distillation_bwd", backend.name):
        mlm_distillation(**arguments)[index].sum().backward()
    ours, arguments["weight"].grad = arguments["weight"].grad, None
    plain_mlm_distillation(**arguments)[index].sum().backward()
    torch.testing.assert_close(ours, arguments["weight"].grad, rtol=1e-5, atol=1e-6)


def test_mlm_distillation_deterministic(backend):
    arguments = inputs(30, 16, 700)
    grads = []
    for _ in range(2):
        given, leaves = differentiated(arguments)
        sum(loss.sum() for loss in mlm_distillation(**given)).backward()
        grads.append(leaves)
    for name in STUDENT:
        assert_bitwise_equal(grads[0][name].grad, grads[1][name].grad, name)


def test_mlm_distillation_opcheck(backend):
    torch.library.opcheck(mlm_distillation_fwd, (*inputs(5, 8, 20).values(), -100, 2.0))


def test_mlm_distillation_compile_fullgraph():
    compiled = torch.compile(mlm_distillation, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 8):
        arguments = inputs(rows, 8, 20)
        grads = []
        for function in (mlm_distillation, compiled):
            given, leaves = differentiated(arguments)
            sum(loss.sum() for loss in function(**given)).backward()
            grads.append(leaves)
        for name in STUDENT:
            torch.testing.assert_close(grads[0][name].grad, grads[1][name].grad)


def test_mlm_distillation_second_order_raises():
    arguments, leaves = differentiated(inputs(4, 8, 20))
    loss = sum(loss.sum() for loss in mlm_distillation(**arguments))
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(loss, leaves["hidden"], create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([1, 20, 3, 4])}, "mlm_distillation: label 20 at row 1"),
        ({"labels": torch.tensor([1, 2])}, "labels"),
        ({"weight": torch.randn(20, 7)}, "weight"),
        ({"bias": torch.randn(19)}, "bias"),
        ({"teacher_hidden": torch.randn(4, 7)}, "teacher_weight"),
        ({"teacher_hidden": torch.randn(3, 8)}, "the teacher 3 and 20; both must"),
        ({"teacher_weight": torch.randn(21, 8)}, "the teacher 4 and 21; both must"),
        ({"teacher_bias": torch.randn(19)}, "teacher_bias"),
        ({"teacher_hidden": torch.randn(4, 8).half()}, "float32 like hidden, got torch.float16"),
    ],
)
def test_mlm_distillation_bad_input_raises(change, message):
    with pytest.raises(ValueError, match=message):
        mlm_distillation(**{**inputs(4, 8, 20), **change})
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            mlm_distillation(**inputs(4, 8, 20), temperature=temperature)
