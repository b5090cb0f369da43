"""The fused encoder layer on packed rows: post-norm self-attention and feed-forward (Devlin et al.
2019, section 3; Vaswani et al. 2017, section 3), described by a spec that each family fills in.

Letters: T packed rows, N heads, D head dim, C hidden, F intermediate.

A module that is exactly what its type says, without hooks, is fused: its weights are read and its
forward is not called. Any other Linear, activation, LayerNorm or Dropout (LoRA, quantised,
sharded, hooked) is called on the packed rows, and what is around it stays fused.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fastbert import dispatch
from fastbert.cache import WeightCache, kept
from fastbert.ops import linear as linear_op
from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.ops.attention import attention, attention_packed_qkv
from fastbert.ops.linear_gelu import gelu_mlp, linear_gelu
from fastbert.ops.philox import row_keep_mask
from fastbert.ops.unpad import unpad
from fastbert.padding import PackedBatch, QueryRows
from fastbert.reference.philox import (
    PLACE_ATTENTION,
    PLACE_ATTENTION_OUTPUT,
    PLACE_FFN_OUTPUT,
    dropout_scale,
    dropout_threshold,
    layer_site,
)


@dataclass(slots=True, eq=False)
class EncoderLayerSpec:
    """One post-norm layer: its modules and numbers.

    Attributes:
        index: place in the encoder from 0; decides the dropout sites.
        query, key, value, attention_output: C to C projections.
        intermediate: C to F. output: F to C.
        activation: the activation module or function. approximate: `none` or `tanh` where it is a
            form of GELU the ops know, else None.
        attention_dropout_p: probability in force for attention probabilities.
        attention_output_dropout, output_dropout: dropout modules before the residual; None: none.
        attention_norm, output_norm: LayerNorms after the residual.
        num_heads: N. head_dim: D. softmax_scale: factor on the scores.
    """

    index: int
    query: nn.Module
    key: nn.Module
    value: nn.Module
    attention_output: nn.Module
    attention_output_dropout: nn.Module | None
    attention_norm: nn.Module
    intermediate: nn.Module
    activation: Callable
    approximate: str | None
    output: nn.Module
    output_dropout: nn.Module | None
    output_norm: nn.Module
    num_heads: int
    head_dim: int
    softmax_scale: float
    attention_dropout_p: float


def encoder_layer(
    spec: EncoderLayerSpec,
    hidden_states: torch.Tensor,
    batch: PackedBatch,
    rng_state: torch.Tensor | None,
    cache: WeightCache | None,
    query: QueryRows | None = None,
    *,
    attend: Callable | None = None,
) -> torch.Tensor:
    """One layer: y = LN(x' + FFN(x')), x' = LN(x + Attention(x)).

    Args:
        spec: the layer.
        hidden_states: `(T, C)` packed rows.
        batch: where the rows come from.
        rng_state: `(2,)` int64, needed where dropout is active.
        cache: the layer's packed weights.
        query: the R rows to compute, which attend to all; None: all T.
        attend: what stands for the self-attention, of the same arguments: the heads' outputs, and
            hidden_states for the residual connection.

    Returns:
        `(T, C)`, or `(R, C)`.
    """
    if cache is not None and torch.is_grad_enabled():
        cache.clear()
    attend = attend or _self_attention
    context, residual = attend(spec, hidden_states, batch, rng_state, cache, query)
    attended = add_norm(
        linear(spec.attention_output, context, cache, "attention_output"),
        residual,
        spec.attention_output_dropout,
        spec.attention_norm,
        layer_site(spec.index, PLACE_ATTENTION_OUTPUT),
        rng_state,
    )
    return _feed_forward(spec, attended, rng_state, cache)


def _self_attention(
    spec, hidden_states, batch, rng_state, cache, query
) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads' outputs, and hidden_states for the residual connection: T rows, or query's."""
    options = {
        "softmax_scale": spec.softmax_scale,
        "dropout_p": spec.attention_dropout_p,
        "site": layer_site(spec.index, PLACE_ATTENTION),
        "rng_state": rng_state if spec.attention_dropout_p > 0 else None,
    }
    plain = all(map(is_plain_linear, (spec.query, spec.key, spec.value)))
    if plain and batch.kv_indices is None and query is None:
        qkv, hidden_states = stacked_linear(
            (spec.query, spec.key, spec.value), hidden_states, cache, "qkv", return_input=True
        )
        out, _ = attention_packed_qkv(
            qkv, spec.num_heads, batch.cu_seqlens_q, max_seqlen=batch.max_seqlen, **options
        )
        return out.flatten(1), hidden_states
    rows, cu_seqlens_q = hidden_states, batch.cu_seqlens_q
    if batch.kv_indices is not None:
        rows = unpad(hidden_states, batch.kv_indices)
    if query is not None:
        hidden_states, cu_seqlens_q = unpad(hidden_states, query.rows), query.cu_seqlens
    q = linear(spec.query, hidden_states, cache, "query")
    if plain:
        k, v = stacked_linear((spec.key, spec.value), rows, cache, "kv").chunk(2, dim=-1)
    else:
        k, v = spec.key(rows), spec.value(rows)
    heads = (spec.num_heads, spec.head_dim)
    out, _ = attention(
        q.unflatten(-1, heads),
        k.unflatten(-1, heads),
        v.unflatten(-1, heads),
        cu_seqlens_q,
        batch.cu_seqlens_k,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_k=batch.max_seqlen,
        **options,
    )
    return out.flatten(1), hidden_states


def _feed_forward(spec, hidden_states, rng_state, cache) -> torch.Tensor:
    fused_in = spec.approximate is not None and is_plain_linear(spec.intermediate)
    if fused_in and is_plain_linear(spec.output):
        inner, outer = spec.intermediate.weight, spec.output.weight
        projected, hidden_states = gelu_mlp(
            hidden_states,
            inner,
            spec.intermediate.bias,
            outer,
            spec.output.bias,
            approximate=spec.approximate,
            packed_in=packed(cache, "intermediate", [inner], hidden_states),
            packed_out=packed(cache, "output", [outer], hidden_states),
            return_input=True,
        )
    elif fused_in:
        activated = linear_gelu(
            hidden_states,
            spec.intermediate.weight,
            spec.intermediate.bias,
            approximate=spec.approximate,
            packed=packed(cache, "intermediate", [spec.intermediate.weight], hidden_states),
        )
        projected = linear(spec.output, activated, cache, "output")
    else:
        activated = spec.activation(spec.intermediate(hidden_states))
        projected = linear(spec.output, activated, cache, "output")
    site = layer_site(spec.index, PLACE_FFN_OUTPUT)
    return add_norm(
        projected, hidden_states, spec.output_dropout, spec.output_norm, site, rng_state
    )


def linear(module: nn.Module, x: torch.Tensor, cache: WeightCache | None, key) -> torch.Tensor:
    """`module(x)`, by the op and a packed copy of its weight where it is plain."""
    if not is_plain_linear(module):
        return module(x)
    weight = packed(cache, key, [module.weight], x)
    return linear_op.linear(x, module.weight, module.bias, packed=weight)


def stacked_linear(
    modules, x: torch.Tensor, cache: WeightCache | None, key, *, return_input: bool = False
):
    """The outputs of several Linears of one input side by side, by one matmul; and x where the op
    is to return it."""
    weights, biases = [m.weight for m in modules], None
    if any(m.bias is not None for m in modules):
        biases = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules]
    weight = packed(cache, key, weights, x)
    return linear_op.linear(x, weights, biases, packed=weight, return_input=return_input)


def packed(cache: WeightCache | None, key, weights, x: torch.Tensor) -> torch.Tensor | None:
    """The weights as the matmul of x reads them, where the cache may keep them."""
    dtype = compute_dtype(x) or x.dtype
    return kept(cache, (key, dtype), weights, lambda: linear_op.pack_weights(weights, dtype))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    dropout: nn.Module | None,
    norm: nn.Module,
    site: int,
    rng_state: torch.Tensor | None,
    *,
    return_sum: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """norm(residual + dropout(x)), fused where both modules are plain; and the sum itself, for
    pre-norm layers, where `return_sum` asks for it."""
    if is_plain_norm(norm) and (dropout is None or is_plain_dropout(dropout)):
        p = 0.0 if dropout is None else dropout_p(dropout)
        return add_layer_norm(
            x,
            residual,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            dropout_p=p,
            site=site,
            rng_state=rng_state if p > 0 else None,
            return_sum=return_sum,
        )
    if dropout is not None:
        x = dropout(x)
    total = x if residual is None else x + residual
    return (norm(total), total) if return_sum else norm(total)


def dropout_rows(module: nn.Module, x: torch.Tensor, site: int, rng_state) -> torch.Tensor:
    """`module(x)` of rows of features, from the dropout stream where the module is plain."""
    if not is_plain_dropout(module):
        return module(x)
    p = dropout_p(module)
    if p == 0:
        return x
    keep = row_keep_mask(rng_state, *x.shape, dropout_p=p, site=site)
    return torch.where(keep, x * dropout_scale(dropout_threshold(p)), 0)


# --- what may be fused ----------------------------------------------------------------------------


def compute_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype autocast gives matmuls on x's device, None without autocast."""
    return dispatch.autocast_dtype(x.device)


def is_unhooked(module: nn.Module) -> bool:
    """Whether calling `module` runs its class's forward and nothing else.

    transformers' own hooks for recording outputs do not count: layers keep theirs because they are
    called, and attention weights are recorded on transformers' own path only.
    """
    state = module.__dict__
    if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    if "forward" in state:
        return False
    hooks = state["_forward_hooks"]
    return not hooks or all(
        getattr(hook, "__name__", "") == "output_capturing_hook" for hook in hooks.values()
    )


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is no subclass: quantised and sharded weights are, inside plain modules."""
    return type(tensor) in (nn.Parameter, torch.Tensor)


def is_plain_linear(module: nn.Module) -> bool:
    """Whether `module` is an unhooked nn.Linear, not derived, over an ordinary weight."""
    return type(module) is nn.Linear and is_ordinary(module.weight) and is_unhooked(module)


PLAIN_NORMS: set[type] = {nn.LayerNorm}
"""torch's LayerNorm, and what families add that computes and names the same."""


def is_plain_norm(module: nn.Module) -> bool:
    """Whether `module` is an unhooked LayerNorm over the last dimension, with a weight."""
    return (
        type(module) in PLAIN_NORMS
        and module.weight is not None
        and is_ordinary(module.weight)
        and len(module.normalized_shape) == 1
        and is_unhooked(module)
    )


def is_plain_dropout(module: nn.Module) -> bool:
    """Whether `module` is an unhooked nn.Dropout (or an identity)."""
    return type(module) in (nn.Dropout, nn.Identity) and is_unhooked(module)


def dropout_p(module: nn.Module) -> float:
    """The probability in force: 0 in eval, each module by its own flag."""
    return module.p if isinstance(module, nn.Dropout) and module.training else 0.0
