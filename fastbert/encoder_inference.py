"""All layers of a post-norm encoder by one op, where no gradient is recorded.

The layers' modules are not called then, so this is for exactly known ones only: plain modules
without hooks over ordinary tensors, no dropout in force. Nothing is remembered here of what a model
was (fastbert/models/prepared.py does). The packed weights are those the layers cache for
themselves, under the same keys (fastbert/cache.py); biases and norms are read as they are.

Letters: T packed rows, C hidden.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fastbert import dispatch
from fastbert.cache import FrozenWeights, WeightCache, all_kept
from fastbert.encoder import (
    PLAIN_NORMS,
    EncoderLayerSpec,
    compute_dtype,
    dropout_p,
    is_ordinary,
    is_plain_dropout,
    is_unhooked,
    packed,
)
from fastbert.ops.encoder import LINEARS, PACKED, encoder_fwd
from fastbert.padding import PackedBatch

REPLACED = ("encoder", "linear", "attention", "linear_gelu", "add_layer_norm")
"""Ops whose work the one op does; it runs where each of them would be the C++ kernel."""


class Parameters(NamedTuple):
    """The layers' tensors in the order of the op; no weights where the layers are frozen."""

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    norms: list[torch.Tensor]


def encode(
    specs: Sequence[EncoderLayerSpec],
    caches: Sequence[WeightCache],
    hidden_states: torch.Tensor,
    batch: PackedBatch,
) -> tuple[torch.Tensor | None, str | None]:
    """The rows behind the last layer, with the bits of calling `encoder_layer` for each.

    Args:
        specs: the layers. caches: of their packed weights; all frozen or none.
        hidden_states: `(T, C)` packed rows.
        batch: where the rows come from.

    Returns:
        `(T, C)` and None; or None, and why the layers have to be called.

    Raises:
        ValueError: frozen layers, and another dtype, instruction set or float32 matmul precision
            than when they were frozen.
    """
    reason = _why_not_called_at_once(hidden_states)
    parameters = None
    if reason is None:
        parameters, reason = plain_parameters(specs, caches, hidden_states)
    if parameters is None:
        return None, reason
    weights, biases, norms = parameters
    frozen = not weights
    if dispatch.needs_grad(hidden_states, *biases, *norms) or (
        torch.is_grad_enabled() and not frozen
    ):
        return None, "gradients are recorded"
    packed_weights = packed_layers(weights, caches, hidden_states)
    if packed_weights is None:
        return None, "another thread, which has bound another backend, packed the weights for it"
    tensors = (hidden_states, weights, biases, norms, packed_weights)
    # Of a sequence's rows the real ones come first.
    starts = (batch.cu_seqlens_q, batch.cu_seqlens_k)
    numbers = numbers_of(specs[0])
    return encoder_fwd(*tensors, *starts, *numbers, compute_dtype(hidden_states)), None


def plain_parameters(
    specs: Sequence[EncoderLayerSpec], caches: Sequence[WeightCache], hidden_states: torch.Tensor
) -> tuple[Parameters | None, str | None]:
    """The layers' tensors, where the op computes what their modules do of rows like hidden_states
    `(T, C)`; else None and why it does not."""
    if not specs:
        return None, "there are no layers"
    if not dispatch.bound_to(*REPLACED) <= {"auto", "cpu"}:
        return None, "another backend than the C++ kernels is bound"
    first, parameters = specs[0], Parameters([], [], [])
    numbers = None
    for spec, cache in zip(specs, caches, strict=True):
        reason = _append_layer(spec, cache.frozen, parameters)
        if reason is not None:
            return None, f"layer {spec.index}: {reason}"
        numbers = numbers or numbers_of(spec)
        if numbers_of(spec) != numbers or spec.attention_norm.eps != spec.output_norm.eps:
            return None, "the layers differ in heads, scaling, activation or the norms' eps"
    if len(parameters.weights) not in (0, len(specs) * LINEARS):
        return None, "some layers are frozen, others are not"
    if compute_dtype(hidden_states) not in (None, hidden_states.dtype):
        if not parameters.weights:
            return None, "autocast is on"
        if hidden_states.dtype != torch.float32:
            return None, f"autocast is on, and the rows are {hidden_states.dtype}"
    if first.num_heads * first.head_dim != hidden_states.shape[1]:
        return None, "heads were pruned"
    op, device = dispatch.OPS["encoder_fwd"], hidden_states.device
    reasons = dispatch.not_supported_reasons(op, "cpu", device, (hidden_states, *parameters))
    return (None, "; ".join(reasons)) if reasons else (parameters, None)


def linears_of(spec: EncoderLayerSpec) -> tuple[nn.Module, ...]:
    """The layer's Linears in the order of the op."""
    return (
        spec.query,
        spec.key,
        spec.value,
        spec.attention_output,
        spec.intermediate,
        spec.output,
    )


def packed_layers(
    weights: Sequence[torch.Tensor], caches: Sequence[WeightCache], hidden_states: torch.Tensor
) -> list[torch.Tensor] | None:
    """The layers' weights as the op takes them: what frozen layers, which have no others, hold in
    their place, or what their caches do; None where those are for another backend."""
    if not weights:
        return [t for cache in caches for t in cache.frozen.packed]
    found = _packed_by_caches(weights, caches, hidden_states)
    return found if all(t is not None and t.dtype == torch.uint8 for t in found) else None


def _packed_by_caches(
    weights: Sequence[torch.Tensor], caches: Sequence[WeightCache], hidden_states: torch.Tensor
) -> list[torch.Tensor | None]:
    dtype = compute_dtype(hidden_states) or hidden_states.dtype
    keys = [(key, dtype) for key, _ in PACKED]
    owners = [cache for cache in caches for _ in PACKED]
    found = all_kept(owners, keys * len(caches), weights)
    if found is not None:
        return found
    return [
        packed(cache, key, weights[index * LINEARS : (index + 1) * LINEARS][part], hidden_states)
        for index, cache in enumerate(caches)
        for key, part in PACKED
    ]


def _why_not_called_at_once(hidden_states: torch.Tensor) -> str | None:
    """What about the call needs the layers one by one."""
    if dispatch.is_symbolic(hidden_states):
        return "a graph is traced"
    return None


def _append_layer(
    spec: EncoderLayerSpec, frozen: FrozenWeights | None, parameters: Parameters
) -> str | None:
    """Adds a plain layer's tensors to those before; of any other says why it is none."""
    if spec.approximate is None:
        return "the activation is no GELU, or has hooks"
    linears = linears_of(spec)
    for index, linear in enumerate(linears):
        weight, bias = _tensors_of(linear, {nn.Linear})
        if not is_ordinary(bias) or (frozen is None and not is_ordinary(weight)):
            return "a Linear was replaced or has hooks, no bias, or a tensor of another kind"
        if frozen is None:
            parameters.weights.append(weight)
        elif weight is not frozen.dropped[index]:
            return "a weight was replaced after freezing"
        parameters.biases.append(bias)
    for norm in (spec.attention_norm, spec.output_norm):
        tensors = _tensors_of(norm, PLAIN_NORMS)
        if not all(map(is_ordinary, tensors)) or len(norm.normalized_shape) != 1:
            return "a LayerNorm was replaced or has hooks, no bias, or a tensor of another kind"
        parameters.norms.extend(tensors)
    for dropout in (spec.attention_output_dropout, spec.output_dropout):
        if dropout is None:
            continue
        if not is_plain_dropout(dropout):
            return "a Dropout was replaced or has hooks"
        if dropout_p(dropout) > 0:
            return "dropout is in force"
    return "dropout is in force" if spec.attention_dropout_p > 0 else None


def _tensors_of(
    module: nn.Module, kinds: Collection[type]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weight and bias of an unhooked module of one of `kinds`, not derived; else None twice.

    Through the module's own tables: attribute access on modules is a search, and this runs for
    every module of every forward.
    """
    if type(module) not in kinds or not is_unhooked(module):
        return None, None
    own = module._parameters
    return own.get("weight"), own.get("bias")


def numbers_of(spec: EncoderLayerSpec) -> tuple:
    """The op's last arguments, which all layers have to share."""
    return spec.num_heads, spec.softmax_scale, spec.output_norm.eps, spec.approximate
