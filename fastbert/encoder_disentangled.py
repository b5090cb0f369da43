"""The fused encoder layer with disentangled attention (He et al. 2020, "DeBERTa", section 3.1): the
post-norm layer of fastbert/encoder.py, whose scores have terms of relative positions.

Letters: T packed rows, Q queried rows, N heads, D head dim, C hidden, R rows of relative positions.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn

from fastbert.cache import WeightCache, kept
from fastbert.encoder import (
    EncoderLayerSpec,
    dropout_p,
    dropout_rows,
    encoder_layer,
    is_plain_dropout,
    is_plain_linear,
    linear,
    stacked_linear,
)
from fastbert.ops.disentangled_attention import disentangled_attention
from fastbert.ops.unpad import pad, unpad
from fastbert.padding import PackedBatch, QueryRows
from fastbert.reference.philox import PLACE_ATTENTION, PLACE_POSITIONS, layer_site


@dataclass(slots=True, eq=False)
class DisentangledLayerSpec(EncoderLayerSpec):
    """One layer of DeBERTa: an `EncoderLayerSpec`, and

    Attributes:
        position_key, position_query: C to C projections of the relative positions' embeddings
            (which may be `key` and `query` themselves); None without that term.
        position_dropout: dropout module before them.
        position_buckets, max_relative_positions: as `disentangled_attention` takes them.
        qkv: C to N·3·D in place of `query`, `key` and `value`, which are None then: queries, keys
            and values of a head side by side. query_bias, value_bias: `(C,)`, added to them.
    """

    position_key: nn.Module | None
    position_query: nn.Module | None
    position_dropout: nn.Module | None
    position_buckets: int
    max_relative_positions: int
    qkv: nn.Module | None = None
    query_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None


def disentangled_layer(
    spec: DisentangledLayerSpec,
    hidden_states: torch.Tensor,
    positions: torch.Tensor | None,
    batch: PackedBatch,
    rng_state: torch.Tensor | None,
    cache: WeightCache | None,
    query_states: torch.Tensor | None = None,
    query: QueryRows | None = None,
) -> torch.Tensor:
    """One layer, as `encoder_layer`, whose attention reads relative positions.

    Args:
        spec: the layer.
        hidden_states: `(T, C)` packed rows, all of them real.
        positions: `(R, C)` embeddings of relative positions; None where neither term is.
        batch: where the rows come from; those of a sequence are neighbours in the padded batch.
        rng_state: `(2,)` int64, needed where dropout is active.
        cache: the layer's packed weights.
        query_states: `(T, C)`, or `(Q, C)` of the rows `query`: what queries and the residual
            connection are made of instead of hidden_states, which keys and values still are.
        query: the packed rows of query_states; None: all T.

    Returns:
        `(T, C)`, or `(Q, C)`.
    """
    attend = functools.partial(_self_attention, positions, query_states)
    return encoder_layer(spec, hidden_states, batch, rng_state, cache, query, attend=attend)


def _self_attention(
    positions, query_states, spec, hidden_states, batch, rng_state, cache, query
) -> tuple[torch.Tensor, torch.Tensor]:
    if query_states is None:
        (q, k, v), residual = _projected(spec, hidden_states, cache)
    else:
        (q, k, v), residual = _projected_apart(spec, query_states, hidden_states, cache)
    if query is not None:
        # Rows that nothing asks for have queries of 0: the kernel's tiles need no list of rows.
        q = pad(q, query.rows, len(k))
    position_key, position_query = _position_tables(positions, spec, rng_state, cache, q.dtype)
    out, _ = disentangled_attention(
        q,
        k,
        v,
        position_key,
        position_query,
        batch.cu_seqlens_q,
        max_seqlen=batch.max_seqlen,
        position_buckets=spec.position_buckets,
        max_relative_positions=spec.max_relative_positions,
        softmax_scale=spec.softmax_scale,
        dropout_p=spec.attention_dropout_p,
        site=layer_site(spec.index, PLACE_ATTENTION),
        rng_state=rng_state if spec.attention_dropout_p > 0 else None,
    )
    out = out.flatten(1)
    return out if query is None else unpad(out, query.rows), residual


def _projected(spec, hidden_states, cache) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Queries, keys and values `(T, N, D)`, and hidden_states for the residual connection."""
    heads = (spec.num_heads, spec.head_dim)
    if spec.qkv is not None:
        qkv = linear(spec.qkv, hidden_states, cache, "qkv").unflatten(-1, (heads[0], 3, heads[1]))
        q, k, v = qkv.unbind(2)
        query_bias, value_bias = (
            bias.to(q.dtype).view(heads) for bias in (spec.query_bias, spec.value_bias)
        )
        return (q + query_bias, k, v + value_bias), hidden_states
    projections = (spec.query, spec.key, spec.value)
    if all(map(is_plain_linear, projections)):
        qkv, hidden_states = stacked_linear(
            projections, hidden_states, cache, "qkv", return_input=True
        )
        return qkv.unflatten(-1, (3, *heads)).unbind(1), hidden_states
    return tuple(p(hidden_states).unflatten(-1, heads) for p in projections), hidden_states


def _projected_apart(
    spec, query_states, hidden_states, cache
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Queries of query_states, keys and values of hidden_states; and query_states."""
    if spec.qkv is not None:
        # Heads lie side by side in this weight: what is left out of each product is not worth the
        # copy of the rest.
        (q, _, _), _ = _projected(spec, query_states, cache)
        (_, k, v), _ = _projected(spec, hidden_states, cache)
        return (q, k, v), query_states
    heads = (spec.num_heads, spec.head_dim)
    q = linear(spec.query, query_states, cache, "query").unflatten(-1, heads)
    if all(map(is_plain_linear, (spec.key, spec.value))):
        kv = stacked_linear((spec.key, spec.value), hidden_states, cache, "kv")
        return (q, *kv.unflatten(-1, (2, *heads)).unbind(1)), query_states
    k, v = (project(hidden_states).unflatten(-1, heads) for project in (spec.key, spec.value))
    return (q, k, v), query_states


def _position_tables(positions, spec, rng_state, cache, dtype) -> list[torch.Tensor | None]:
    """Keys and queries `(R, N, D)` of the relative positions, None where there is no such term."""
    wanted = (spec.position_key, spec.position_query)
    projections = [p for p in wanted if p is not None]
    if not projections:
        return [None, None]
    plain = all(map(is_plain_linear, projections))
    dropped = dropout_p(spec.position_dropout) > 0 or not is_plain_dropout(spec.position_dropout)
    if dropped:
        site = layer_site(spec.index, PLACE_POSITIONS)
        positions = dropout_rows(spec.position_dropout, positions, site, rng_state)

    def project() -> torch.Tensor:
        if plain:
            return stacked_linear(projections, positions, cache, "positions")
        return torch.cat([projection(positions) for projection in projections], dim=-1)

    features = None
    if plain and not dropped:
        sources = [positions, *(t for p in projections for t in p.parameters())]
        features = kept(cache, ("position tables", dtype), sources, project)
    features = project() if features is None else features
    tables = iter(features.to(dtype).unflatten(-1, (-1, spec.num_heads, spec.head_dim)).unbind(1))
    return [None if projection is None else next(tables) for projection in wanted]
