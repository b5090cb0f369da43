"""The processes of a run: one, or those that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True)
class Processes:
    """This process among all of them.

    Attributes:
        rank, size: number of this one, and how many there are.
        group: of torch.distributed, by which they speak; None: the default one.
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is this process that writes what is written once."""
        return self.rank == 0

    def apart(self) -> "Processes":
        """The same by connections of their own, for a thread that speaks beside the main one."""
        if self.size == 1:
            return self
        return replace(self, group=distributed.new_group(backend="gloo"))

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            distributed.barrier(self.group)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            distributed.all_reduce(values, group=self.group)
        return values

    def gathered(self, value: Any) -> list:
        """What each process gives, by rank."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        distributed.all_gather_object(values, value, self.group)
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
