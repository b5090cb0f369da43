"""The device that ops are timed on: a GPU where there is one, for the Triton and CUDA kernels, else
the CPU. CUDA_VISIBLE_DEVICES= (empty) times the C++ kernels on a machine with both."""

from collections.abc import Callable

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def waited_for(function: Callable) -> Callable:
    """`function` and, on a GPU, the end of what it launched."""
    if DEVICE.type == "cpu":
        return function

    def to_its_end():
        result = function()
        torch.cuda.synchronize()
        return result

    return to_its_end
