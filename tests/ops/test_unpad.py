"""unpad and pad: exact, and each other's gradient."""

import pytest
import torch

from fastbert.ops.unpad import pad, pad_op, unpad, unpad_op
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import noncontiguous

OP = "unpad"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(12, 7), (12,), (12, 3, 5)], ids=str)
def test_unpad_matches_reference(backend, shape, dtype):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    indices = torch.randperm(12)[:8]
    with assert_ran("unpad", backend.name):
        rows = unpad(x, indices)
    assert_bitwise_equal(rows, x.detach()[indices], "unpad")
    grad = torch.randn_like(rows)
    rows.backward(grad)
    expected = torch.zeros_like(x)
    expected[indices] = grad
    assert_bitwise_equal(x.grad, expected, "gradient of unpad")
    rows = rows.detach().requires_grad_()
    with assert_ran("pad", backend.name):
        padded = pad(rows, indices, 12)
    expected = torch.zeros_like(x)
    expected[indices] = rows.detach()
    assert_bitwise_equal(padded, expected, "pad")
    grad = torch.randn_like(padded)
    padded.backward(grad)
    assert_bitwise_equal(rows.grad, grad[indices], "gradient of pad")


@pytest.mark.parametrize("rows", [0, 5])
def test_unpad_empty(backend, rows):
    x = torch.randn(rows, 4, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    assert unpad(x, none).shape == (0, 4)
    assert not pad(unpad(x, none), none, 3).any()
    unpad(x, none).sum().backward()
    assert not x.grad.any()


def test_unpad_noncontiguous(backend):
    x = noncontiguous(torch.randn(6, 4))
    indices = torch.tensor([4, 1])
    assert_bitwise_equal(unpad(x, indices), x[indices], "unpad")
    assert_bitwise_equal(pad(x[:2], indices, 6)[indices], x[:2], "pad")


def test_unpad_opcheck(backend):
    indices = torch.tensor([4, 1])
    torch.library.opcheck(unpad_op, (torch.randn(6, 4), indices))
    torch.library.opcheck(pad_op, (torch.randn(2, 4), indices, 6))


def test_unpad_compile_fullgraph():
    def step(x, indices):
        return pad(unpad(x, indices) * 2, indices, x.shape[0])

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 9):
        x = torch.randn(rows, 4, requires_grad=True)
        indices = torch.tensor([4, 1])
        compiled(x, indices).square().sum().backward()
        expected = torch.zeros_like(x)
        expected[indices] = 8 * x.detach()[indices]
        torch.testing.assert_close(x.grad, expected)


def test_unpad_second_order_raises():
    x = torch.randn(6, 4, requires_grad=True)
    for result in (unpad(x, torch.tensor([1])), pad(x, torch.arange(6), 9)):
        with pytest.raises(RuntimeError, match="second-order"):
            torch.autograd.grad(result.sum(), x, create_graph=True)


def test_unpad_bad_input_raises():
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match="int64"):
        unpad(x, torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="one-dimensional"):
        unpad(x, torch.tensor([[1]]))
    with pytest.raises(ValueError, match="one entry per row"):
        pad(x, torch.tensor([1]), 9)
