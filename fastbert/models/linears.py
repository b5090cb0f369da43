"""Linear layers of transformers' own modules, poolers and heads, by the op `linear`.

A library's matmul sums in an order that depends on the number of rows; the op's does not. So that
a sentence's pooled output and logits are the same alone and in any batch, as its hidden states
are, `torch.nn.functional.linear` is redirected while such a module runs.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastbert.cache import CachesWeights, WeightCache, kept
from fastbert.encoder import compute_dtype, is_ordinary
from fastbert.ops import linear as linear_op


class _OwnLinears(TorchFunctionMode):
    def __init__(self, cache: WeightCache):
        super().__init__()
        self.cache = cache

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and not kwargs and _takes(*args):
            return own_linear(*args, cache=self.cache)
        return function(*args, **(kwargs or {}))


def _takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    tensors = [t for t in (x, weight, bias) if t is not None]
    return (
        x.dim() >= 1
        and weight.dim() == 2
        and all(t.device.type == "cpu" and is_ordinary(t) for t in tensors)
        and (compute_dtype(x) is not None or all(t.dtype == x.dtype for t in tensors))
    )


def own_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    cache: WeightCache | None = None,
) -> torch.Tensor:
    """`(..., F)` of x `(..., C)` by the op `linear`, the packed weight kept in `cache`."""
    packed = packed_weight(weight, compute_dtype(x) or x.dtype, cache)
    y = linear_op.linear(x.reshape(-1, x.shape[-1]), weight, bias, packed=packed)
    return y.view(*x.shape[:-1], weight.shape[0])


def packed_weight(
    weight: torch.Tensor, dtype: torch.dtype, cache: WeightCache | None
) -> torch.Tensor | None:
    """`weight` as the op reads it for rows of `dtype`, where `cache` may keep that."""
    key = ("linear", id(weight), dtype)
    return kept(cache, key, [weight], lambda: linear_op.pack_weights([weight], dtype))


@contextlib.contextmanager
def own_linears(module: CachesWeights) -> Iterator[None]:
    """Runs linear layers inside the block by the op, where no gradient is recorded and no graph
    traced."""
    if torch.is_grad_enabled():
        module.weight_cache.clear()
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        yield
        return
    with _OwnLinears(module.weight_cache):
        yield
