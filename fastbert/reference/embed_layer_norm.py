"""The three embeddings of BERT, summed, normalised and dropped, in plain PyTorch: the
specification of `embed_layer_norm`. Letters: T rows, C features, V vocabulary."""

import torch
import torch.nn.functional as F

from fastbert.reference.philox import dropout_scale
from fastbert.reference.precision import accumulation_dtype


def embed_layer_norm_reference(
    input_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    word_weight: torch.Tensor,
    token_type_weight: torch.Tensor,
    position_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    inputs_embeds: torch.Tensor | None,
    threshold: int,
    keep_mask: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """h = word[ids] + token_type[types] + position[positions]; y = dropout(LayerNorm(h)).

    Devlin et al. 2019, section 3 and figure 2.

    Args:
        input_ids: `(T,)` int64, or None where inputs_embeds `(T, C)` takes its place.
        token_type_ids, position_ids: `(T,)` int64.
        word_weight: `(V, C)`. token_type_weight: `(types, C)`. position_weight: `(positions, C)`.
        weight: `(C,)`. bias: `(C,)` or None.
        threshold, keep_mask: of the dropout after the norm.
        out_dtype: dtype of y.

    Returns:
        y: `(T, C)`. h: `(T, C)` in the dtype of the sum. mean, rstd: `(T, 1)`, fp32.
    """
    words = F.embedding(input_ids, word_weight) if inputs_embeds is None else inputs_embeds
    accumulate = accumulation_dtype(words.dtype)
    h = words.to(accumulate) + F.embedding(token_type_ids, token_type_weight)
    h += F.embedding(position_ids, position_weight)
    y, mean, rstd = torch.native_layer_norm(
        h,
        (h.shape[-1],),
        weight.to(accumulate),
        None if bias is None else bias.to(accumulate),
        eps,
    )
    if threshold > 0:
        y = torch.where(keep_mask, y, 0).mul_(dropout_scale(threshold))
    return y.to(out_dtype), h.to(words.dtype), mean, rstd


def embed_layer_norm_bwd_reference(
    dy: torch.Tensor,
    h: torch.Tensor,
    input_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    word_weight: torch.Tensor,
    token_type_weight: torch.Tensor,
    position_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    padding_idx: int | None,
    threshold: int,
    keep_mask: torch.Tensor | None,
    needs: list[bool],
) -> tuple[torch.Tensor, ...]:
    """Gradients of `embed_layer_norm_reference`, accumulated in fp32 in a fixed order.

    Args:
        dy: `(T, C)`. h, mean, rstd: saved by forward.
        padding_idx: id whose embedding gets no gradient, as in torch's Embedding.
        needs: whether the word, token type and position gradients are wanted.

    Returns:
        dh: `(T, C)`, the gradient of inputs_embeds. dword, dtoken_type, dposition: the shapes of
        the tables, `(0,)` where not wanted. dweight: `(C,)`. dbias: `(C,)`; `(0,)` without bias.
    """
    accumulate = accumulation_dtype(h.dtype)
    dy = dy.to(accumulate)
    if threshold > 0:
        dy = torch.where(keep_mask, dy, 0).mul_(dropout_scale(threshold))
    # Centred first: torch computes h·rstd - mean·rstd, which leaves a rest where h is its mean.
    dh, dweight, dbias = torch.ops.aten.native_layer_norm_backward.default(
        dy,
        torch.sub(h, mean),
        (h.shape[-1],),
        torch.zeros_like(mean),
        rstd,
        weight.to(accumulate),
        None if bias is None else bias.to(accumulate),
        [True, True, bias is not None],
    )
    empty = h.new_empty(0)
    tables = (
        (input_ids, word_weight, padding_idx),
        (token_type_ids, token_type_weight, None),
        (position_ids, position_weight, None),
    )
    table_gradients = [
        _table_gradient(dh, ids, table, skip) if needed and ids is not None else empty
        for needed, (ids, table, skip) in zip(needs, tables, strict=True)
    ]
    return (
        dh.to(h.dtype),
        *table_gradients,
        dweight.to(weight.dtype),
        empty if bias is None else dbias.to(bias.dtype),
    )


def _table_gradient(dh, ids, table, padding_idx) -> torch.Tensor:
    rows = table.shape[0]
    if rows <= 8:
        # A matmul: a handful of rows would make every token wait for the same one.
        row = torch.arange(rows, device=ids.device)[:, None]
        one_hot = ids[None, :] == row
        if padding_idx is not None:
            one_hot &= row != padding_idx
        return (one_hot.to(dh.dtype) @ dh).to(table.dtype)
    skip = -1 if padding_idx is None else padding_idx
    gradient = torch.ops.aten.embedding_dense_backward.default(dh, ids, rows, skip, False)
    return gradient.to(table.dtype)
