"""Packed and cast copies of weights, kept between forwards and never stale.

A copy is made only in a forward without gradients and belongs to the module whose weights it
holds. It is dropped by that module's next forward with gradients, `train()`, `eval()` that ends
training (libraries call it before every batch), `_apply` (`.to()`, `.half()`), any optimizer step
in the process, and `refresh(model)`; it is left out of pickles and deep copies. A copy still there
is used only while `Fingerprint.matches()`: fused optimizers and writes through `.data` change
weights without raising `_version`, so the fingerprint also compares addresses and one value of
every row.

Only CPU weights are copied: comparing values on a GPU would stall the host at every layer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fastbert import extension

_optimizer_steps = 0


def _count_optimizer_step(optimizer, args, kwargs) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_optimizer_step)


def optimizer_steps() -> int:
    """Steps of all optimizers in the process so far."""
    return _optimizer_steps


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
        return all_match([self], tensors)


def all_match(fingerprints: Sequence[Fingerprint], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `tensors`, those of each fingerprint one after the other, match all of them."""
    if any(f.step != _optimizer_steps for f in fingerprints):
        return False
    if [key for f in fingerprints for key in f.keys] != [_key(t) for t in tensors]:
        return False
    views = [view for f in fingerprints for view in f.views]
    samples = [sample for f in fingerprints for sample in f.samples]
    if all(f.by_extension for f in fingerprints):
        return torch.ops.fastbert.samples_match(views, samples)
    return all(map(torch.equal, views, samples))


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


FROZEN = (
    "the model is frozen (by fastbert.freeze or quantize) and has packed weights only: keep a "
    "model that is not, or load it again"
)


class DroppedWeight(nn.Parameter):
    """Stands where a frozen layer's weight was: its shape and dtype, on the meta device.

    Whatever asks for more raises NotImplementedError: torch's own meta tensors would take writes
    and read as nothing without a word. Copies are the same object.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _DESCRIPTIONS or (function in _GRADIENT_SWITCHES and args[-1] is False):
            return super().__torch_function__(function, types, args, kwargs or {})
        name = torch.overrides.resolve_name(function) or function
        raise NotImplementedError(f"{name} needs weights that are gone; {FROZEN}")

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"DroppedWeight({tuple(self.shape)}, {self.dtype})"


_PROPERTIES = (
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_meta",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "shape",
)
_DESCRIPTIONS = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    torch.Tensor.__hash__,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_complex,
    torch.Tensor.is_floating_point,
    torch.Tensor.nelement,
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
}
_GRADIENT_SWITCHES = {torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_}


class FrozenWeights(NamedTuple):
    """What a frozen layer has in the place of its weights, in the order of the op `encoder`; empty
    in the modules around the layers.

    Attributes:
        packed: what the op reads. dropped: what its Linears hold.
    """

    packed: tuple[torch.Tensor, ...] = ()
    dropped: tuple[DroppedWeight, ...] = ()


class WeightCache:
    """The copies one module owns; empty in every pickle and deep copy.

    Attributes:
        frozen: what a frozen module has (fastbert/models/freeze.py), which nothing drops and deep
            copies share: its sources are gone. None in any other module.
        prepared: what a model was found to be (fastbert/models/prepared.py), by the dtype of
            autocast or None; dropped as copies are.
    """

    def __init__(self, frozen: FrozenWeights | None = None):
        self._entries: dict = {}
        self.frozen = frozen
        self.prepared: dict = {}

    def __deepcopy__(self, memo):
        return WeightCache(self.frozen)

    def __reduce__(self):
        if self.frozen is not None:
            raise NotImplementedError(f"pickling needs weights that are gone; {FROZEN}")
        return WeightCache, ()

    def __len__(self):
        return len(self._entries)

    def clear(self) -> None:
        """Drops every copy."""
        self._entries, self.prepared = {}, {}

    def entry(self, key) -> tuple[Fingerprint, torch.Tensor | None] | None:
        """What the copy under `key` was made of, and the copy; None where there is none."""
        return self._entries.get(key)

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
    """Base of modules that own a `WeightCache`; works on instances whose class was swapped in.

    A frozen one refuses, with NotImplementedError, what needs its weights.
    """

    @property
    def weight_cache(self) -> WeightCache:
        """The module's cache, made at first use."""
        return self.__dict__.setdefault("_weight_cache", WeightCache())

    def refuse_if_frozen(self, what: str) -> None:
        """Raises NotImplementedError where the weights that `what` needs are gone."""
        if self.weight_cache.frozen is not None:
            raise NotImplementedError(f"{what} needs weights that are gone; {FROZEN}")

    def refuse_if_frozen_within(self, what: str) -> None:
        """The same where those of a module inside are, before anything is done to the others."""
        for module in self.modules():
            if isinstance(module, CachesWeights):
                module.refuse_if_frozen(what)

    def train(self, mode: bool = True):
        if mode:
            self.refuse_if_frozen_within("train()")
        if mode or self.training:
            self.weight_cache.clear()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        if self.weight_cache.frozen is not None:
            # Libraries move models to the device they are on.
            parameter = next(p for p in self.parameters() if p.device.type != "meta")
            probe = torch.empty(0, dtype=parameter.dtype)
            moved = fn(probe)
            if (moved.device, moved.dtype) != (probe.device, probe.dtype):
                self.refuse_if_frozen("a change of dtype or device")
            return self
        self.weight_cache.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args, **kwargs):
        self.refuse_if_frozen("load_state_dict()")
        self.weight_cache.clear()
        return super()._load_from_state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args, **kwargs):
        self.refuse_if_frozen("state_dict()")
        return super()._save_to_state_dict(*args, **kwargs)


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


def all_kept(
    caches: Sequence[WeightCache], keys: Sequence, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """The copies under `keys`, one in each of `caches`, looked at all at once.

    Args:
        caches, keys: where the copies are.
        tensors: the weights they were made of, one copy's after the other's.

    Returns:
        The copies; None where one is missing or stale.
    """
    found = [cache.entry(key) for cache, key in zip(caches, keys, strict=True)]
    if None in found or not all_match([fingerprint for fingerprint, _ in found], tensors):
        return None
    return [copy for _, copy in found]


def refresh(model: nn.Module) -> None:
    """Drops every cached copy of `model`'s weights.

    Needed only after parts of a row of a weight were changed through `.data`, raw memory or under
    `torch.inference_mode()` between two forwards without gradients: every other change is noticed,
    whole rows (a head, a neuron) and blocks of columns wider than columns / rows among them.
    """
    for module in model.modules():
        if isinstance(module, CachesWeights):
            module.weight_cache.clear()
