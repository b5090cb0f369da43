"""The processes of a run: one, or those that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """This process among all of them.

    Attributes:
        rank, size: number of this one, and how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it is this process that writes what is written once."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            distributed.barrier()

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Joins the processes that torchrun started, for the block; alone without torchrun.

    Args:
        device: where this process computes; gloo connects CPUs, nccl GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    # What the host asks goes by gloo, so that it never waits for a GPU.
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
