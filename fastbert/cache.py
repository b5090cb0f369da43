"""Packed and cast copies of weights, kept between forwards and never stale.

A copy is made only in a forward without gradients and belongs to the module whose weights it
holds. It is dropped by that module's next forward with gradients, `train()`, `eval()`, `_apply`
(`.to()`, `.half()`), any optimizer step in the process, and `refresh(model)`; it is left out of
pickles and deep copies. A copy still there is used only while `Fingerprint.matches()`: fused
optimizers and writes through `.data` change weights without raising `_version`, so the fingerprint
also compares addresses and a sample of the values.

Only CPU weights are copied: comparing values on a GPU would stall the host at every layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

SAMPLES = 64
"""Values compared per weight: enough for an update, a swap or a rescaling; one changed element of
a large matrix can pass between them, which is what `refresh` is for."""

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
        views = [_sample_view(t) for t in tensors]
        self.pairs = [(view, view.clone()) for view in views]

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether `tensors` are the same storages, unwritten as far as can be seen."""
        if self.step != _optimizer_steps or self.keys != [_key(t) for t in tensors]:
            return False
        return all(torch.equal(view, sample) for view, sample in self.pairs)


def _key(tensor: torch.Tensor) -> tuple:
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride()


def _sample_view(tensor: torch.Tensor) -> torch.Tensor:
    """Bits of a grid of about SAMPLES elements: always a view, and NaN equals itself."""
    per_dim = max(2, round(SAMPLES ** (1 / max(1, tensor.dim()))))
    grid = tuple(slice(None, None, max(1, size // per_dim)) for size in tensor.shape)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach()[grid].view(bits[tensor.element_size()])


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

    Needed only after single elements of a weight were changed through `.data` or raw memory
    between two forwards without gradients: every other change is noticed.
    """
    for module in model.modules():
        if isinstance(module, CachesWeights):
            module.weight_cache.clear()
