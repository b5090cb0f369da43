"""Rows of a tensor chosen by index, and rows put back: the specification of `unpad` and `pad`."""

import torch


def unpad_reference(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` of x.

    Args:
        x: `(R, ...)`.
        indices: `(T,)` int64, unique.

    Returns:
        `(T, ...)`.
    """
    return x.index_select(0, indices)


def pad_reference(x: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Row t of x at row indices[t], zeros elsewhere: the inverse, and the gradient, of unpad.

    Args:
        x: `(T, ...)`.
        indices: `(T,)` int64, unique.
        num_rows: R.

    Returns:
        `(R, ...)`.
    """
    out = x.new_zeros((num_rows, *x.shape[1:]))
    return out.index_copy_(0, indices, x)
