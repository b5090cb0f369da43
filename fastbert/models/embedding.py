"""The first rows of a model: sums of embeddings, LayerNorm and dropout of packed tokens, fused.

Letters: T packed rows, E features.
"""

import torch
from torch import nn

from fastbert.encoder import dropout_p
from fastbert.models.packed import is_plain_table
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.reference.philox import SITE_EMBEDDING

Lookup = tuple[torch.Tensor, torch.Tensor]
"""Ids `(T,)` and the weight `(N, E)` of the table they point into."""


def embed_rows(
    words: nn.Module,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    *,
    token_types: Lookup | None,
    positions: Lookup | None,
    norm: nn.LayerNorm,
    dropout: nn.Module,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    """`(T, E)` = dropout(norm(word + token type + position)).

    Args:
        words: the table of words; called where it is no plain one.
        input_ids: `(T,)`, or None where `inputs_embeds` `(T, E)` are given in their place.
        token_types, positions: None in a family without.
        norm, dropout: plain modules.
        rng_state: `(2,)` int64, needed where dropout is active.
    """
    if inputs_embeds is None and not is_plain_table(words):
        # Adapters and transformers' input hook for checkpointing sit here.
        inputs_embeds, input_ids = words(input_ids), None
    values = words.weight if inputs_embeds is None else inputs_embeds
    num_rows = (inputs_embeds if input_ids is None else input_ids).shape[0]
    type_ids, type_weight = token_types or row_of_zeros(values, num_rows)
    position_ids, position_weight = positions or row_of_zeros(values, num_rows)
    p = dropout_p(dropout)
    return embed_layer_norm(
        input_ids,
        type_ids,
        position_ids,
        None if input_ids is None else words.weight,
        type_weight,
        position_weight,
        norm.weight,
        norm.bias,
        eps=norm.eps,
        inputs_embeds=inputs_embeds,
        padding_idx=getattr(words, "padding_idx", None),
        dropout_p=p,
        site=SITE_EMBEDDING,
        rng_state=rng_state if p > 0 else None,
    )


def row_of_zeros(values: torch.Tensor, num_rows: int) -> Lookup:
    """Stands for a table that is no part of the family; made anew, since Dynamo takes no tensor
    twice."""
    ids = values.new_zeros(num_rows, dtype=torch.int64)
    return ids, values.new_zeros(1, values.shape[-1])


def without_padding_gradient(table: nn.Embedding) -> torch.Tensor:
    """The table's weight, whose row for padding gets no gradient, as in torch's own lookup.

    The op knows such a row of word embeddings alone.
    """
    if table.padding_idx is None or not (torch.is_grad_enabled() and table.weight.requires_grad):
        return table.weight
    row = torch.full((1,), table.padding_idx, device=table.weight.device)
    return table.weight.index_copy(0, row, table.weight.detach()[row])
