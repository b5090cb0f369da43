"""What a forward keeps for its backward."""

from collections.abc import Callable, Iterable

import torch


def saved_bytes(forward: Callable[[], object], parameters: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of distinct storages that autograd saves while `forward` runs, parameters left out."""
    excluded = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = forward()
    del kept
    return sum(s.nbytes() for s in storages.values())
