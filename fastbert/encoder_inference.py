"""All layers of a post-norm encoder by one op, where no gradient is recorded.

The layers' modules are not called then, so this is for exactly known ones only: plain modules
without hooks over ordinary tensors, no dropout in force. The modules are asked at every forward;
nothing is remembered of what a model was. The packed weights are those the layers cache for
themselves, under the same keys (fastbert/cache.py); biases and norms are read as they are.

Letters: T packed rows, C hidden.
"""

from collections.abc import Sequence

import torch

from fastbert import dispatch
from fastbert.cache import WeightCache
from fastbert.encoder import (
    EncoderLayerSpec,
    compute_dtype,
    dropout_p,
    is_ordinary,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    packed,
)
from fastbert.ops.encoder import PACKED, encoder_fwd
from fastbert.padding import PackedBatch

REPLACED = ("encoder", "linear", "attention", "linear_gelu", "add_layer_norm")
"""Ops whose work the one op does; it runs where each of them would be the C++ kernel."""


def encode(
    specs: Sequence[EncoderLayerSpec],
    caches: Sequence[WeightCache],
    hidden_states: torch.Tensor,
    batch: PackedBatch,
) -> torch.Tensor | None:
    """The rows behind the last layer, with the bits of calling `encoder_layer` for each.

    Args:
        specs: the layers. caches: of their packed weights.
        hidden_states: `(T, C)` packed rows.
        batch: where the rows come from.

    Returns:
        `(T, C)`; None where the layers have to be called.
    """
    if not (specs and _takes(hidden_states, batch) and all(map(_is_plain, specs))):
        return None
    numbers = [_numbers(spec) for spec in specs]
    if any(other != numbers[0] for other in numbers) or not _fits(specs[0], hidden_states):
        return None
    weights, biases, norms = [], [], []
    for spec in specs:
        for module in _linears(spec):
            weights.append(module.weight)
            biases.append(module.bias)
        for module in (spec.attention_norm, spec.output_norm):
            norms += (module.weight, module.bias)
    if not all(map(is_ordinary, biases + norms)):
        return None
    packed_weights = [
        packed(cache, key, weights[first:][part], hidden_states)
        for cache, first in zip(caches, range(0, len(weights), 6), strict=True)
        for key, part in PACKED
    ]
    if any(t is None or t.dtype != torch.uint8 for t in packed_weights):
        # Another thread, which has bound another backend, packed them for its own arithmetic.
        return None
    arguments = (hidden_states, weights, biases, norms, packed_weights, batch.cu_seqlens_q)
    op = dispatch.OPS["encoder_fwd"]
    if dispatch.not_supported_reasons(op, "cpu", hidden_states.device, arguments):
        return None
    return encoder_fwd(*arguments, *numbers[0])


def _takes(hidden_states: torch.Tensor, batch: PackedBatch) -> bool:
    """Whether this is a call that records nothing and that the C++ kernels serve."""
    return (
        not torch.is_grad_enabled()
        and hidden_states.device.type == "cpu"
        and not dispatch.is_symbolic(hidden_states)
        and compute_dtype(hidden_states) is None
        and batch.kv_indices is None
        and dispatch.bound_to(*REPLACED) <= {"auto", "cpu"}
    )


def _linears(spec: EncoderLayerSpec) -> tuple:
    return (
        spec.query,
        spec.key,
        spec.value,
        spec.attention_output,
        spec.intermediate,
        spec.output,
    )


def _is_plain(spec: EncoderLayerSpec) -> bool:
    """Whether the op computes what the layer's modules do."""
    dropouts = [m for m in (spec.attention_output_dropout, spec.output_dropout) if m is not None]
    return (
        spec.approximate is not None
        and spec.attention_dropout_p == 0
        and all(map(is_plain_linear, _linears(spec)))
        and is_plain_norm(spec.attention_norm)
        and is_plain_norm(spec.output_norm)
        and all(is_plain_dropout(module) and dropout_p(module) == 0 for module in dropouts)
    )


def _numbers(spec: EncoderLayerSpec) -> tuple:
    """What all layers have to share; the norms' eps, if they do."""
    eps = {spec.attention_norm.eps, spec.output_norm.eps}
    return (
        spec.num_heads,
        spec.softmax_scale,
        eps.pop() if len(eps) == 1 else None,
        spec.approximate,
    )


def _fits(spec: EncoderLayerSpec, hidden_states: torch.Tensor) -> bool:
    """Whether the heads are as wide as the rows, as they are not once some were pruned."""
    return _numbers(spec)[2] is not None and (
        spec.num_heads * spec.head_dim == hidden_states.shape[1]
    )
