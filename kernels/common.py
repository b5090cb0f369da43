"""What the launchers share: block sizes, the device of a launch."""

import contextlib

import torch
import triton


def block_of(size: int, largest: int) -> int:
    """The smallest power of two that holds `size`, at most `largest`."""
    return min(largest, triton.next_power_of_2(max(1, size)))


def on_device(tensor: torch.Tensor):
    """A context in which kernels are launched on `tensor`'s device.

    Triton launches on the current device; on another one of a machine with several it would read
    memory that is not there (NVIDIA/apex#770).
    """
    if tensor.device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
