"""What the kernels of every op take, as reasons for `not_supported`."""

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_COLUMNS = 8192
"""Widest row the norms hold: in buffers on the stack in C++, in registers in Triton."""


def dtype_reasons(**tensors: torch.Tensor | None) -> list[str]:
    """One reason per named tensor whose dtype no kernel takes."""
    return [
        f"{name} is {tensor.dtype}, kernels take fp32, bf16 and fp16"
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES
    ]


def width_reasons(rows: torch.Tensor) -> list[str]:
    """A reason against rows that are wider than the norms hold, or that are empty."""
    columns = rows.shape[-1]
    if 0 < columns <= MAX_COLUMNS:
        return []
    return [f"rows have {columns} columns, kernels take 1 to {MAX_COLUMNS}"]
