"""Fresh memory filled with NaN, so that a result left unwritten cannot pass as a zero."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block `torch.empty` and its kin return NaN (integers: the largest value).

    PyTorch does this itself in deterministic mode, for C++ kernels as well; the mode is set to
    warn only, so that nothing else about the block changes.
    """
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled
