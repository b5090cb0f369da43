"""The sum of BERT's three embeddings, LayerNorm and dropout in Triton, and their gradients.

Letters: T rows, C features, V rows of a table.

Gradients of the tables are deterministic: rows are sorted by id and each id's rows are summed by
one program in their order; a table of a few rows is summed like a bias.
"""

import torch
import triton
import triton.language as tl

from .add_layer_norm import (
    gradient_block,
    gradient_of_norm,
    normalise,
    row_block,
    saved_normal,
    scale_and_shift,
    store_part,
)
from .common import block_of, on_device, rows_per_part, sum_parts
from .philox import dropout_settings, keep_rows

FEW_ROWS = 8


@triton.jit
def _table_rows(
    ids_ptr, table_ptr, table_rows, flag_ptr, row, inside, num_rows, num_cols, column, CHECK
):
    """Rows of a table in fp32; an id outside it is clamped and remembered in the flag."""
    index = tl.load(ids_ptr + row, mask=row < num_rows, other=0).to(tl.int64)
    if CHECK:
        outside = (index < 0) | (index >= table_rows)
        tl.store(flag_ptr + row * 0, tl.full(row.shape, 1, tl.int64), mask=outside)
        index = tl.minimum(tl.maximum(index, 0), table_rows - 1)
    at = table_ptr + index[:, None] * num_cols + column[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["threshold", "site"])
def _embed_layer_norm_fwd_kernel(
    input_ids_ptr,  # int64 or int32 (T,), unread with FROM_EMBEDS
    token_type_ids_ptr,  # int64 or int32 (T,)
    position_ids_ptr,  # int64 or int32 (T,)
    words_ptr,  # (V, C), or (T, C) with FROM_EMBEDS
    token_types_ptr,  # (types, C)
    positions_ptr,  # (positions, C)
    weight_ptr,  # (C,)
    bias_ptr,  # (C,), unread without HAS_BIAS
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    flag_ptr,  # int64 (1,), set where an id is outside its table; unwritten without CHECK
    y_ptr,  # (T, C)
    h_ptr,  # (T, C)
    mean_ptr,  # fp32 (T,)
    rstd_ptr,  # fp32 (T,)
    num_rows,
    num_cols,
    num_words,
    num_token_types,
    num_positions,
    eps,
    threshold,
    dropout_scale,
    site,
    FROM_EMBEDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    CHECK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS).to(tl.int64) + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    offset = row[:, None] * num_cols + column[None, :]
    if FROM_EMBEDS:
        h = tl.load(words_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    else:
        h = _table_rows(
            input_ids_ptr,
            words_ptr,
            num_words,
            flag_ptr,
            row,
            inside,
            num_rows,
            num_cols,
            column,
            CHECK,
        )
    h += _table_rows(
        token_type_ids_ptr,
        token_types_ptr,
        num_token_types,
        flag_ptr,
        row,
        inside,
        num_rows,
        num_cols,
        column,
        CHECK,
    )
    h += _table_rows(
        position_ids_ptr,
        positions_ptr,
        num_positions,
        flag_ptr,
        row,
        inside,
        num_rows,
        num_cols,
        column,
        CHECK,
    )
    tl.store(h_ptr + offset, h.to(h_ptr.dtype.element_ty), mask=inside)
    normal, mean, rstd = normalise(h, inside, num_cols, eps)
    y = scale_and_shift(normal, weight_ptr, bias_ptr, column, HAS_BIAS, num_cols)
    if DROPOUT:
        keep = keep_rows(rng_state_ptr, row, 0, num_cols, threshold, site, ROWS, COLS)
        y = tl.where(keep, y * dropout_scale, 0.0)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < num_rows)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)


@triton.jit(do_not_specialize=["threshold", "site"])
def _embed_layer_norm_bwd_kernel(
    dy_ptr,  # (T, C)
    h_ptr,  # (T, C)
    weight_ptr,  # (C,)
    mean_ptr,  # fp32 (T,)
    rstd_ptr,  # fp32 (T,)
    rng_state_ptr,  # int64 (2,), unread without DROPOUT
    dh_ptr,  # (T, C)
    wide_dh_ptr,  # fp32 (T, C), for the tables
    partial_ptr,  # fp32 (2, parts, C): weight, bias
    num_rows,
    num_cols,
    part_rows,
    threshold,
    dropout_scale,
    site,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLS)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(part * part_rows, tl.minimum((part + 1) * part_rows, num_rows), ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
        offset = row[:, None] * num_cols + column[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            keep = keep_rows(rng_state_ptr, row, 0, num_cols, threshold, site, ROWS, COLS)
            dy = tl.where(keep, dy * dropout_scale, 0.0)
        normal, rstd = saved_normal(h_ptr, mean_ptr, rstd_ptr, row, offset, inside, num_rows)
        dweight += dy * normal
        dbias += dy
        dh = gradient_of_norm(dy, normal, rstd, weight_ptr, column, num_cols)
        tl.store(wide_dh_ptr + offset, dh, mask=inside)
        tl.store(dh_ptr + offset, dh.to(dh_ptr.dtype.element_ty), mask=inside)
    store_part(partial_ptr, 0, dweight, column, num_cols)
    store_part(partial_ptr, 1, dbias, column, num_cols)


@triton.jit
def _table_gradient_kernel(
    dh_ptr,  # fp32 (T, C)
    sorted_ids_ptr,  # int64 (T,), rising
    order_ptr,  # int64 (T,), the rows they come from
    dtable_ptr,  # (V, C), zeros
    num_rows,
    num_cols,
    skipped,
    STEP: tl.constexpr,
    COLS: tl.constexpr,
):
    place = tl.program_id(0)
    index = tl.load(sorted_ids_ptr + place)
    before = tl.load(sorted_ids_ptr + place - 1, mask=place > 0, other=-1)
    if (index == before) | (index == skipped):
        return
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    sums = tl.zeros([STEP, COLS], tl.float32)
    whole = True
    while whole:
        places = place + tl.arange(0, STEP)
        same = tl.load(sorted_ids_ptr + places, mask=places < num_rows, other=-1) == index
        row = tl.load(order_ptr + places, mask=same, other=0)
        at = dh_ptr + row[:, None] * num_cols + column[None, :]
        sums += tl.load(at, mask=same[:, None] & (column < num_cols)[None, :], other=0.0)
        whole = tl.sum(same.to(tl.int32), 0) == STEP
        place += STEP
    at = dtable_ptr + index * num_cols + column
    tl.store(at, tl.sum(sums, 0).to(dtable_ptr.dtype.element_ty), mask=column < num_cols)


@triton.jit
def _small_table_gradient_kernel(
    dh_ptr,  # fp32 (T, C)
    ids_ptr,  # int64 or int32 (T,)
    partial_ptr,  # fp32 (parts, V, C)
    num_rows,
    num_cols,
    table_rows,
    part_rows,
    skipped,
    TABLE: tl.constexpr,
    COLS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    slot = tl.arange(0, TABLE)
    sums = tl.zeros([TABLE, COLS], tl.float32)
    for row in range(part * part_rows, tl.minimum((part + 1) * part_rows, num_rows)):
        index = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), table_rows - 1)
        at = dh_ptr + tl.cast(row, tl.int64) * num_cols + column
        gradient = tl.load(at, mask=column < num_cols, other=0.0)
        hit = (slot == index) & (slot != skipped)
        sums += tl.where(hit[:, None], gradient[None, :], 0.0)
    inside = (slot < table_rows)[:, None] & (column < num_cols)[None, :]
    at = partial_ptr + (part * table_rows + slot)[:, None] * num_cols + column[None, :]
    tl.store(at, sums, mask=inside)


def embed_layer_norm_fwd(
    input_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    word_weight: torch.Tensor | None,
    token_type_weight: torch.Tensor,
    position_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    inputs_embeds: torch.Tensor | None,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
    out_dtype: torch.dtype,
    flag: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the forward; arguments and results as the op `embed_layer_norm_fwd`.

    Args:
        flag: int64 scalar set where an id is outside its table; None: the ids have been checked.
    """
    words = (word_weight if inputs_embeds is None else inputs_embeds).contiguous()
    num_rows, num_cols = token_type_ids.shape[0], weight.shape[0]
    threshold, scale = dropout_settings(dropout_p)
    y = words.new_empty((num_rows, num_cols), dtype=out_dtype)
    h = words.new_empty((num_rows, num_cols))
    mean, rstd = (words.new_empty((num_rows, 1), dtype=torch.float32) for _ in range(2))
    if num_rows == 0:
        return y, h, mean, rstd
    rows, cols, warps = row_block(num_cols)
    with on_device(words):
        _embed_layer_norm_fwd_kernel[(triton.cdiv(num_rows, rows),)](
            token_type_ids if input_ids is None else input_ids.contiguous(),
            token_type_ids.contiguous(),
            position_ids.contiguous(),
            words,
            token_type_weight.contiguous(),
            position_weight.contiguous(),
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            mean if rng_state is None else rng_state,
            mean if flag is None else flag,
            y,
            h,
            mean,
            rstd,
            num_rows,
            num_cols,
            words.shape[0],
            token_type_weight.shape[0],
            position_weight.shape[0],
            eps,
            threshold,
            scale,
            site,
            FROM_EMBEDS=inputs_embeds is not None,
            HAS_BIAS=bias is not None,
            DROPOUT=threshold > 0,
            CHECK=flag is not None,
            ROWS=rows,
            COLS=cols,
            num_warps=warps,
        )
    return y, h, mean, rstd


def embed_layer_norm_bwd(
    dy: torch.Tensor,
    h: torch.Tensor,
    input_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    word_weight: torch.Tensor | None,
    token_type_weight: torch.Tensor,
    position_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    padding_idx: int | None,
    dropout_p: float,
    site: int,
    rng_state: torch.Tensor | None,
    needs: list[bool],
) -> tuple[torch.Tensor, ...]:
    """Launches the backward; arguments and results as the op `embed_layer_norm_bwd`."""
    num_rows, num_cols = h.shape
    threshold, scale = dropout_settings(dropout_p)
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    wide = dh if h.dtype == torch.float32 else torch.empty_like(dh, dtype=torch.float32)
    vectors = [torch.empty_like(weight), torch.empty_like(weight if bias is None else bias)]
    rows, cols, warps = gradient_block(num_cols)
    part_rows = rows_per_part(num_rows, rows)
    parts = triton.cdiv(num_rows, part_rows)
    partial = h.new_empty((2, parts, num_cols), dtype=torch.float32)
    if num_rows > 0:
        with on_device(h):
            _embed_layer_norm_bwd_kernel[(parts,)](
                dy.contiguous(),
                h.contiguous(),
                weight.contiguous(),
                mean,
                rstd,
                mean if rng_state is None else rng_state,
                dh,
                wide,
                partial,
                num_rows,
                num_cols,
                part_rows,
                threshold,
                scale,
                site,
                DROPOUT=threshold > 0,
                ROWS=rows,
                COLS=cols,
                num_warps=warps,
            )
    sum_parts(partial, vectors)
    tables = (
        (input_ids, word_weight, -1 if padding_idx is None else padding_idx),
        (token_type_ids, token_type_weight, -1),
        (position_ids, position_weight, -1),
    )
    empty = h.new_empty(0)
    gradients = [
        _table_gradient(wide, ids, table, skipped) if needed and ids is not None else empty.clone()
        for needed, (ids, table, skipped) in zip(needs, tables, strict=True)
    ]
    return dh, *gradients, vectors[0], empty if bias is None else vectors[1]


def _table_gradient(dh, ids, table, skipped) -> torch.Tensor:
    """Rows of dh (fp32) summed by id; `skipped` gets no gradient."""
    (num_rows, num_cols), table_rows = dh.shape, table.shape[0]
    dtable = torch.zeros_like(table, memory_format=torch.contiguous_format)
    if num_rows == 0:
        return dtable
    cols = block_of(num_cols, 256)
    column_blocks = triton.cdiv(num_cols, cols)
    with on_device(dh):
        if table_rows <= FEW_ROWS:
            part_rows = rows_per_part(num_rows, 16)
            parts = triton.cdiv(num_rows, part_rows)
            partial = dh.new_empty((1, parts, table_rows * num_cols))
            _small_table_gradient_kernel[(parts, column_blocks)](
                dh,
                ids.contiguous(),
                partial,
                num_rows,
                num_cols,
                table_rows,
                part_rows,
                skipped,
                TABLE=FEW_ROWS,
                COLS=cols,
                num_warps=4,
            )
            sum_parts(partial, [dtable.view(-1)])
            return dtable
        ordered, order = torch.sort(ids.long().clamp(0, table_rows - 1), stable=True)
        _table_gradient_kernel[(num_rows, column_blocks)](
            dh,
            ordered,
            order,
            dtable,
            num_rows,
            num_cols,
            skipped,
            STEP=8,
            COLS=cols,
            num_warps=4,
        )
    return dtable
