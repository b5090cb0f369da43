"""Logits beside a loss that cost nothing until somebody looks at them.

In training the loss needs the head's output at labelled rows only, and `outputs.logits` over all
positions and the whole vocabulary would be most of the head's work. `LazyLogits` stands in for that
tensor: shape, dtype and device are known, and so is what `.float()` changes about them; every other
use computes the values. The output object hands out ordinary tensors at any attribute, index or
tuple access and the stand-in only where containers are walked (`items()`, pytrees), which is what
Accelerate, DDP and Trainer do to every output without looking at the values.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

from fastbert.cache import Fingerprint
from fastbert.dispatch import autocast_dtype

METADATA = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    torch.Tensor.ndimension,
    torch.Tensor.is_complex,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_sparse")
    ),
    torch.Tensor.is_quantized.__get__,
    torch.Tensor.requires_grad.__get__,
}


class Deferred:
    """Values computed at most once, in the autocast and gradient modes of their forward, from
    weights that must not have changed since.

    Args:
        compute: the head applied to the forward's hidden states.
        weights: what `compute` reads.
        device: where it runs.
    """

    def __init__(
        self,
        compute: Callable[[], torch.Tensor],
        weights: Sequence[torch.Tensor],
        device: torch.device,
    ):
        self._compute = compute
        self._weights = list(weights)
        self._fingerprint = Fingerprint(self._weights)
        self._device = device
        self._autocast_dtype = autocast_dtype(device)
        self._grad = torch.is_grad_enabled()
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """The logits.

        Raises:
            RuntimeError: the head's weights changed after the forward.
        """
        if self._value is None:
            if not self._fingerprint.matches(self._weights):
                raise RuntimeError(
                    "logits were first read after the weights changed (an optimizer step or a "
                    "write), so the values of this forward are gone; read them before the step, "
                    "or call the model under torch.no_grad()"
                )
            with (
                torch.set_grad_enabled(self._grad),
                torch.autocast(
                    self._device.type,
                    dtype=self._autocast_dtype,
                    enabled=self._autocast_dtype is not None,
                ),
            ):
                self._value = self._compute()
            self._compute = self._weights = self._fingerprint = None
        return self._value


class LazyLogits(torch.Tensor):
    """A tensor whose values are computed at their first use; only metadata is free.

    Args:
        deferred: the values.
        shape, dtype, device: of the values after the cast to `dtype`.
    """

    @staticmethod
    def __new__(cls, deferred: Deferred, shape, dtype: torch.dtype, device: torch.device):
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=torch.is_grad_enabled()
        )
        self.deferred = deferred
        return self

    def materialize(self) -> torch.Tensor:
        """The ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.deferred.value().to(self.dtype)

    def _cast(self, dtype: torch.dtype) -> "LazyLogits":
        with torch._C.DisableTorchFunctionSubclass():
            return LazyLogits(self.deferred, self.shape, dtype, self.device)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.Tensor.float and len(args) == 1 and not kwargs:
            return args[0]._cast(torch.float32)
        to_dtype = func is torch.Tensor.to and len(args) == 2 and not kwargs
        if to_dtype and isinstance(args[1], torch.dtype):
            return args[0]._cast(args[1])
        args, kwargs = torch.utils._pytree.tree_map_only(
            LazyLogits, LazyLogits.materialize, (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(
            LazyLogits, LazyLogits.materialize, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        return self.materialize().__reduce_ex__(protocol)

    def __repr__(self, **kwargs):
        return repr(self.materialize())


class LazyFields:
    """Ordinary tensors at every access by name, index or tuple, once the object is built."""

    def __post_init__(self):
        super().__post_init__()
        self.__dict__["_built"] = True

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if type(value) is LazyLogits and "_built" in super().__getattribute__("__dict__"):
            return value.materialize()
        return value

    def __getitem__(self, key):
        if isinstance(key, str):
            return _ordinary(super().__getitem__(key))
        return self.to_tuple()[key]

    def get(self, key, default=None):
        return _ordinary(super().get(key, default))

    def to_tuple(self) -> tuple:
        return tuple(_ordinary(v) for v in self.values())


def _ordinary(value):
    return value.materialize() if type(value) is LazyLogits else value


@dataclasses.dataclass
class LazyMaskedLMOutput(LazyFields, MaskedLMOutput):
    """transformers' `MaskedLMOutput` whose logits are computed when first read."""


@dataclasses.dataclass
class LazyPreTrainingOutput(LazyFields, BertForPreTrainingOutput):
    """transformers' `BertForPreTrainingOutput` whose prediction_logits are computed when first
    read."""
