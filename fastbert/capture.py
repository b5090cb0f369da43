"""Running work before its capture and capturing it, as torch.cuda asks for."""

from collections.abc import Callable

import torch


def warm_up(work: Callable, device: torch.device):
    """Runs `work` on a stream of its own: what is captured must not have run on the default one
    alone, where libraries would tie their workspaces to it."""
    stream = torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = work()
    current.wait_stream(stream)
    return result


def capture(work: Callable, device: torch.device, pool=None) -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of `work`, and what it returned: tensors that each replay writes.

    Args:
        work: run once without executing anything on the device.
        device: a GPU.
        pool: memory of another graph (`graph.pool()`) that never runs at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result
