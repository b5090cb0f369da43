"""Packed and cast copies of weights, kept between forwards and never stale.

A copy is made only in a forward without gradients and belongs to the module whose weights it
holds. It is dropped by that module's next forward with gradients, `train()`, `eval()`, `_apply`
(`.to()`, `.half()`), any optimizer step in the process, and `refresh(model)`; it is left out of
pickles and deep copies. A copy still there is used only while `Fingerprint.matches()`: fused
optimizers and writes through `.data` change weights without raising `_version`, so the fingerprint
also compares addresses and one value of every row.

Only CPU weights are copied: comparing values on a GPU would stall the host at every layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastbert import extension

_optimizer_steps = 0


def _count_optimizer_step(optimizer, args, kwargs) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


class Fingerprint:
    """What can be compared cheaply to see whether tensors still hold the values they held.

    Args:
        tensors: plain dense tensors on one device; not changed, not kept alive beyond their
            storage.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.step = _optimizer_steps
        self.keys = [_key(t) for t in tensors]
        self.views = [view for t in tensors for view in _sample_views(t)]
        self.samples = [view.clone() for view in self.views]
        # Torch's comparison waits for one element after the other.
        self.by_extension = extension.load() is None and all(
            view.device.type == "cpu" and view.dim() in (1, 2) for view in self.views
        )

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors` are the same storages, unwritten as far as can be seen."""
        if self.step != _optimizer_steps or self.keys != [_key(t) for t in tensors]:
            return False
        if self.by_extension:
            return torch.ops.fastbert.samples_match(self.views, self.samples)
        return all(map(torch.equal, self.views, self.samples))


def _key(tensor: torch.Tensor) -> tuple:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride()


def _sample_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Bits of one element of every row of a matrix, along diagonals, so that every column, or in a
    matrix of R rows and C > R columns every (C // R)-th, is met too; of the whole of anything else.

    An ablated head or neuron is a block of rows or columns. Always views, and NaN equals itself.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.detach().view(bits[tensor.element_size()])
    if tensor.dim() != 2 or tensor.numel() == 0 or not tensor.is_contiguous():
        return [tensor]
    rows, columns = tensor.shape
    step = max(1, columns // rows)
    length = min(rows, columns // step)
    count, rest = divmod(rows, length)
    start, end = tensor.storage_offset(), tensor.storage_offset() + count * length * columns
    diagonals = tensor.as_strided((count, length), (length * columns, columns + step), start)
    return [diagonals, tensor.as_strided((rest,), (columns + step,), end)]


class WeightCache:
    """The copies one module owns; empty in every pickle and deep copy."""

    def __init__(self):
        self._entries: dict = {}

    def __deepcopy__(self, memo):
        return WeightCache()

    def __reduce__(self):
        return WeightCache, ()

    def __len__(self):
        return len(self._entries)

    def clear(self) -> None:
        """Drops every copy."""
        self._entries = {}

    def get(
        self, key, tensors: Sequence[torch.Tensor], build: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor | None:
        """The copy under `key` if its sources are unchanged, else `build()`, kept."""
        entries = self._entries
        found = entries.get(key)
        if found is not None and found[0].matches(tensors):
            return found[1]
        value = build()
        entries[key] = Fingerprint(tensors), value
        return value


class CachesWeights(nn.Module):
    """Base of modules that own a `WeightCache`; works on instances whose class was swapped in."""

    @property
    def weight_cache(self) -> WeightCache:
        """The module's cache, made at first use."""
        return self.__dict__.setdefault("_weight_cache", WeightCache())

    def train(self, mode: bool = True):
        self.weight_cache.clear()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.weight_cache.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs):
        self.weight_cache.clear()
        return super()._load_from_state_dict(*args, **kwargs)


def kept(
    cache: WeightCache | None,
    key,
    tensors: Sequence[torch.Tensor],
    build: Callable[[], torch.Tensor | None],
) -> torch.Tensor | None:
    """The copy of `tensors` that `build` makes, kept in `cache`; None where none may be kept.

    A copy is kept where no gradient is recorded, no graph is traced and the tensors are ordinary
    ones on a CPU.

    Args:
        cache: the owner's cache.
        key: what the copy is, unique in `cache`.
        tensors: the weights it is made of.
        build: makes it.
    """
    if cache is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not all(type(t) in (nn.Parameter, torch.Tensor) and t.device.type == "cpu" for t in tensors):
        return None
    return cache.get(key, tensors, build)


def refresh(model: nn.Module) -> None:
    """Drops every cached copy of `model`'s weights.

    Needed only after parts of a row of a weight were changed through `.data`, raw memory or under
    `torch.inference_mode()` between two forwards without gradients: every other change is noticed,
    whole rows (a head, a neuron) and blocks of columns wider than columns / rows among them.
    """
    for module in model.modules():
        if isinstance(module, CachesWeights):
            module.weight_cache.clear()
