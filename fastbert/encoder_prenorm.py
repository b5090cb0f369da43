"""The fused pre-norm encoder layer on packed rows, as ModernBERT has it (Warner et al. 2024,
section 2.1): norms before the sublayers (Xiong et al. 2020, figure 1b), rotary positions, sliding
windows, gated feed-forward. What is fused and what is called is decided as in fastbert/encoder.py.

Letters: T packed rows, N heads, D head dim, C hidden, F intermediate, P positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fastbert.cache import WeightCache
from fastbert.encoder import (
    add_norm,
    dropout_rows,
    is_plain_linear,
    is_unhooked,
    linear,
)
from fastbert.ops.attention import attention, attention_packed_qkv
from fastbert.ops.geglu import geglu
from fastbert.ops.rotary import rotary
from fastbert.ops.unpad import unpad
from fastbert.padding import PackedBatch
from fastbert.reference.philox import (
    PLACE_ATTENTION,
    PLACE_ATTENTION_OUTPUT,
    PLACE_FFN_INNER,
    layer_site,
)


class Rotation(NamedTuple):
    """The angles of a layer: cos, sin `(P, D/2)`, and index `(T,)` int64, the row of them that
    each packed row takes."""

    cos: torch.Tensor
    sin: torch.Tensor
    index: torch.Tensor


@dataclass(slots=True, eq=False)
class PreNormLayerSpec:
    """One pre-norm layer: its modules and numbers.

    Attributes:
        index: place in the encoder from 0; decides the dropout sites.
        attention_norm: LayerNorm before the attention, or Identity.
        qkv: C to 3·C, queries, keys, values. attention_output: C to C.
        attention_output_dropout: dropout module before the residual, or Identity.
        feed_forward_norm: LayerNorm before the feed-forward.
        gated: C to 2·F. activation: of its first half, module or function. approximate: `none` or
            `tanh` where that is a form of GELU the ops know, else None.
        inner_dropout: dropout module of the F gated features. output: F to C.
        num_heads: N. head_dim: D. softmax_scale: factor on the scores.
        attention_dropout_p: probability in force for attention probabilities.
        window: keys a query sees to each side of its own position; None: all.
    """

    index: int
    attention_norm: nn.Module
    qkv: nn.Module
    attention_output: nn.Module
    attention_output_dropout: nn.Module
    feed_forward_norm: nn.Module
    gated: nn.Module
    activation: Callable
    approximate: str | None
    inner_dropout: nn.Module
    output: nn.Module
    num_heads: int
    head_dim: int
    softmax_scale: float
    attention_dropout_p: float
    window: int | None


def pre_norm_layer(
    spec: PreNormLayerSpec,
    hidden_states: torch.Tensor,
    batch: PackedBatch,
    rotation: Rotation,
    rng_state: torch.Tensor | None,
    cache: WeightCache | None,
) -> torch.Tensor:
    """One layer: y = x' + FFN(LN(x')), x' = x + Attention(LN(x)).

    Args:
        spec: the layer.
        hidden_states: `(T, C)` packed rows.
        batch: where the rows come from. A window counts packed rows: where it is narrower than
            the batch, the rows of a sequence must be neighbours in the padded batch too.
        rotation: of queries and keys.
        rng_state: `(2,)` int64, needed where dropout is active.
        cache: the layer's packed weights.

    Returns:
        `(T, C)`.
    """
    if cache is not None and torch.is_grad_enabled():
        cache.clear()
    normed = hidden_states
    if type(spec.attention_norm) is not nn.Identity or not is_unhooked(spec.attention_norm):
        normed = add_norm(hidden_states, None, None, spec.attention_norm, 0, None)
    context = _self_attention(spec, normed, batch, rotation, rng_state, cache)
    normed, hidden_states = add_norm(
        linear(spec.attention_output, context, cache, "attention_output"),
        hidden_states,
        spec.attention_output_dropout,
        spec.feed_forward_norm,
        layer_site(spec.index, PLACE_ATTENTION_OUTPUT),
        rng_state,
        return_sum=True,
    )
    return hidden_states + _gated_feed_forward(spec, normed, rng_state, cache)


def _self_attention(spec, normed, batch, rotation, rng_state, cache) -> torch.Tensor:
    """The heads' outputs `(T, C)`."""
    qkv = linear(spec.qkv, normed, cache, "qkv")
    qkv = rotary(qkv, spec.num_heads, *rotation)
    narrow = spec.window is not None and batch.max_seqlen > spec.window + 1
    options = {
        "softmax_scale": spec.softmax_scale,
        "window": (spec.window, spec.window) if narrow else None,
        "dropout_p": spec.attention_dropout_p,
        "site": layer_site(spec.index, PLACE_ATTENTION),
        "rng_state": rng_state if spec.attention_dropout_p > 0 else None,
    }
    if batch.kv_indices is None:
        out, _ = attention_packed_qkv(
            qkv, spec.num_heads, batch.cu_seqlens_q, max_seqlen=batch.max_seqlen, **options
        )
        return out.flatten(1)
    q, keys_and_values = qkv.split((qkv.shape[1] // 3, qkv.shape[1] // 3 * 2), dim=1)
    k, v = unpad(keys_and_values, batch.kv_indices).chunk(2, dim=1)
    heads = (spec.num_heads, spec.head_dim)
    out, _ = attention(
        q.unflatten(1, heads),
        k.unflatten(1, heads),
        v.unflatten(1, heads),
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_k=batch.max_seqlen,
        **options,
    )
    return out.flatten(1)


def _gated_feed_forward(spec, normed, rng_state, cache) -> torch.Tensor:
    halves = linear(spec.gated, normed, cache, "gated")
    if spec.approximate is not None and is_plain_linear(spec.gated):
        activated = geglu(halves, approximate=spec.approximate)
    else:
        turned, gate = halves.chunk(2, dim=-1)
        activated = spec.activation(turned) * gate
    activated = dropout_rows(
        spec.inner_dropout, activated, layer_site(spec.index, PLACE_FFN_INNER), rng_state
    )
    return linear(spec.output, activated, cache, "output")
