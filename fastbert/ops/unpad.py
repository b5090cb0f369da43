"""`unpad` and `pad`: rows gathered by unique indices and put back; each is the other's gradient."""

import torch

from fastbert import dispatch
from fastbert.reference.unpad import pad_reference, unpad_reference


def _unpad_fake(x, indices):
    return x.new_empty((indices.shape[0], *x.shape[1:]))


def _pad_fake(x, indices, num_rows):
    return x.new_empty((num_rows, *x.shape[1:]))


unpad_op = dispatch.register_op(
    "unpad",
    "(Tensor x, Tensor indices) -> Tensor",
    room="unpad",
    fake=_unpad_fake,
    reference=unpad_reference,
    triton="fastbert.kernels.unpad:unpad",
    cpu=True,
    cuda=True,
)
pad_op = dispatch.register_op(
    "pad",
    "(Tensor x, Tensor indices, SymInt num_rows) -> Tensor",
    room="unpad",
    fake=_pad_fake,
    reference=pad_reference,
    triton="fastbert.kernels.unpad:pad",
    cpu=True,
    cuda=True,
)


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices):
        ctx.save_for_backward(indices)
        ctx.num_rows = x.shape[0]
        ctx.binding = dispatch.current_binding()
        return unpad_op(x, indices)

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("unpad")
        (indices,) = ctx.saved_tensors
        with dispatch.bound(ctx.binding):
            return pad_op(dy, indices, ctx.num_rows), None


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, indices, num_rows):
        ctx.save_for_backward(indices)
        ctx.binding = dispatch.current_binding()
        return pad_op(x, indices, num_rows)

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("pad")
        (indices,) = ctx.saved_tensors
        with dispatch.bound(ctx.binding):
            return unpad_op(dy, indices), None, None


def unpad(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` of x.

    Args:
        x: `(R, ...)`, any dtype.
        indices: `(T,)` int64, unique; a repeated index would lose gradient.

    Returns:
        `(T, ...)`, the dtype of x.

    Raises:
        ValueError: indices that are not one-dimensional int64.
        RuntimeError: in backward with create_graph=True.
    """
    check_indices("unpad", indices)
    if dispatch.needs_grad(x):
        return _Unpad.apply(x, indices)
    return unpad_op(x, indices)


def pad(x: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Row t of x at row indices[t] of a tensor that is zero elsewhere.

    Args:
        x: `(T, ...)`, any dtype.
        indices: `(T,)` int64, unique.
        num_rows: R, rows of the result.

    Returns:
        `(R, ...)`, the dtype of x.

    Raises:
        ValueError: indices that are not int64 of shape `(T,)`.
        RuntimeError: in backward with create_graph=True.
    """
    check_indices("pad", indices)
    if indices.shape[0] != x.shape[0]:
        raise ValueError(
            f"pad: indices must have one entry per row of x ({x.shape[0]}), got {indices.shape[0]}"
        )
    if dispatch.needs_grad(x):
        return _Pad.apply(x, indices, num_rows)
    return pad_op(x, indices, num_rows)


def check_indices(name: str, indices: torch.Tensor) -> None:
    """Raises ValueError unless `indices` is a one-dimensional int64 tensor."""
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise ValueError(
            f"{name}: indices must be one-dimensional int64, got {indices.dtype} of shape "
            f"{tuple(indices.shape)}"
        )
