"""`embed_layer_norm`: the sum of BERT's three embeddings, LayerNorm, dropout.

Letters: T rows, C features, V vocabulary.
"""

import torch

from fastbert import dispatch
from fastbert.ops import index_flags
from fastbert.ops.kernel_inputs import dtype_reasons, width_reasons
from fastbert.ops.philox import check_rng_state, row_keep_mask_op
from fastbert.reference.embed_layer_norm import (
    embed_layer_norm_bwd_reference,
    embed_layer_norm_reference,
)
from fastbert.reference.philox import SITE_EMBEDDING, dropout_threshold
from fastbert.reference.precision import accumulation_dtype


def _fwd_fake(
    input_ids,
    token_type_ids,
    position_ids,
    word_weight,
    token_type_weight,
    position_weight,
    weight,
    bias,
    eps,
    inputs_embeds,
    dropout_p,
    site,
    rng_state,
    out_dtype,
):
    shape = (token_type_ids.shape[0], weight.shape[0])
    words = word_weight if inputs_embeds is None else inputs_embeds
    mean = words.new_empty((shape[0], 1), dtype=accumulation_dtype(words.dtype))
    return words.new_empty(shape, dtype=out_dtype), words.new_empty(shape), mean, mean.clone()


def _bwd_fake(
    dy,
    h,
    input_ids,
    token_type_ids,
    position_ids,
    word_weight,
    token_type_weight,
    position_weight,
    weight,
    bias,
    mean,
    rstd,
    padding_idx,
    dropout_p,
    site,
    rng_state,
    needs,
):
    wanted = (needs[0] and input_ids is not None, needs[1], needs[2])
    tables = (word_weight, token_type_weight, position_weight)
    return (
        torch.empty_like(h),
        *(
            table.new_empty(table.shape) if want else h.new_empty(0)
            for want, table in zip(wanted, tables, strict=True)
        ),
        torch.empty_like(weight),
        h.new_empty(0) if bias is None else torch.empty_like(bias),
    )


def _keep_mask(num_rows, num_cols, dropout_p, site, rng_state):
    threshold = dropout_threshold(dropout_p)
    if threshold == 0:
        return threshold, None
    return threshold, row_keep_mask_op(rng_state, num_rows, num_cols, threshold, site)


def _within_tables(ids, tables):
    """The ids as kernels may use them: checked already on a CPU, clamped elsewhere."""
    return [
        index_flags.clamped(index, table.shape[0])
        if index is not None and index_flags.must_not_wait(index)
        else index
        for index, table in zip(ids, tables, strict=True)
    ]


def _fwd_with_mask(*args):
    *tensors, eps, inputs_embeds, dropout_p, site, rng_state, out_dtype = args
    tensors[:3] = _within_tables(tensors[:3], tensors[3:6])
    size = (tensors[1].shape[0], tensors[6].shape[0])
    threshold, keep = _keep_mask(*size, dropout_p, site, rng_state)
    return embed_layer_norm_reference(*tensors, eps, inputs_embeds, threshold, keep, out_dtype)


def _bwd_with_mask(*args):
    *tensors, padding_idx, dropout_p, site, rng_state, needs = args
    tensors[2:5] = _within_tables(tensors[2:5], tensors[5:8])
    threshold, keep = _keep_mask(*tensors[1].shape, dropout_p, site, rng_state)
    return embed_layer_norm_bwd_reference(*tensors, padding_idx, threshold, keep, needs)


def _fwd_triton(*args):
    from fastbert.kernels.embed_layer_norm import embed_layer_norm_fwd

    return embed_layer_norm_fwd(*args, *_flag(*args))


def _flag(input_ids, token_type_ids, *_) -> tuple[torch.Tensor | None]:
    """What kernels set where an id is outside its table, where nobody has looked at them."""
    return (index_flags.flag_for(token_type_ids),)


def _fwd_kernel_reasons(*args) -> list[str]:
    words, *tables = args[3:6] if args[9] is None else (args[9], *args[4:6])
    reasons = dtype_reasons(words=words) + width_reasons(words)
    if any(table.dtype != words.dtype for table in tables):
        reasons.append("the tables differ in dtype, the kernels take one")
    return reasons


def _bwd_kernel_reasons(dy, h, *args) -> list[str]:
    tables = dict(zip(("word", "token_type", "position"), args[3:6], strict=True))
    return dtype_reasons(dy=dy, h=h, **tables) + width_reasons(h)


embed_layer_norm_fwd = dispatch.register_op(
    "embed_layer_norm_fwd",
    "(Tensor? input_ids, Tensor token_type_ids, Tensor position_ids, Tensor? word_weight, "
    "Tensor token_type_weight, Tensor position_weight, Tensor weight, Tensor? bias, float eps, "
    "Tensor? inputs_embeds, float dropout_p, int site, Tensor? rng_state, ScalarType out_dtype) "
    "-> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    room="embed_layer_norm",
    fake=_fwd_fake,
    reference=_fwd_with_mask,
    triton="fastbert.ops.embed_layer_norm:_fwd_triton",
    cpu=True,
    cuda=True,
    cuda_extra=("Tensor? flag", _flag),
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _fwd_kernel_reasons),
)
embed_layer_norm_bwd = dispatch.register_op(
    "embed_layer_norm_bwd",
    "(Tensor dy, Tensor h, Tensor? input_ids, Tensor token_type_ids, Tensor position_ids, "
    "Tensor? word_weight, Tensor token_type_weight, Tensor position_weight, Tensor weight, "
    "Tensor? bias, Tensor mean, Tensor rstd, int? padding_idx, float dropout_p, int site, "
    "Tensor? rng_state, bool[3] needs) -> (Tensor dh, Tensor dword, Tensor dtoken_type, "
    "Tensor dposition, Tensor dweight, Tensor dbias)",
    room="embed_layer_norm",
    fake=_bwd_fake,
    reference=_bwd_with_mask,
    triton="fastbert.kernels.embed_layer_norm:embed_layer_norm_bwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _bwd_kernel_reasons),
)


class _EmbedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        inputs_embeds,
        word_weight,
        token_type_weight,
        position_weight,
        weight,
        bias,
        ids,
        options,
    ):
        eps, padding_idx, dropout_p, site, rng_state, out_dtype = options
        tables = (word_weight, token_type_weight, position_weight)
        y, h, mean, rstd = embed_layer_norm_fwd(
            *ids,
            *tables,
            weight,
            bias,
            eps,
            inputs_embeds,
            dropout_p,
            site,
            rng_state,
            out_dtype,
        )
        ctx.save_for_backward(h, *ids, *tables, weight, bias, mean, rstd, rng_state)
        ctx.options = (padding_idx, dropout_p, site)
        ctx.binding = dispatch.current_binding()
        return y

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("embed_layer_norm")
        *saved, rng_state = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with dispatch.bound(ctx.binding):
            dh, *table_gradients, dweight, dbias = embed_layer_norm_bwd(
                dy, *saved, *ctx.options, rng_state, list(needs[1:4])
            )
        has_ids = saved[1] is not None
        wanted = (needs[1] and has_ids, needs[2], needs[3])
        gradients = [g if want else None for g, want in zip(table_gradients, wanted, strict=True)]
        return (
            None if has_ids else dh,
            *gradients,
            dweight,
            dbias if needs[5] else None,
            None,
            None,
        )


def embed_layer_norm(
    input_ids: torch.Tensor | None,
    token_type_ids: torch.Tensor,
    position_ids: torch.Tensor,
    word_weight: torch.Tensor | None,
    token_type_weight: torch.Tensor,
    position_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    inputs_embeds: torch.Tensor | None = None,
    padding_idx: int | None = None,
    dropout_p: float = 0.0,
    site: int = SITE_EMBEDDING,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = dropout(LayerNorm(word[ids] + token_type[types] + position[positions])).

    Devlin et al. 2019, section 3 and figure 2; the dropout comes after the norm, as in the
    released model. Sum, norm and all gradients are accumulated in fp32, in a fixed order.

    Args:
        input_ids: `(T,)` int64, or None where inputs_embeds is given.
        token_type_ids, position_ids: `(T,)` int64.
        word_weight: `(V, C)`, or None where inputs_embeds is given.
        token_type_weight: `(types, C)`. position_weight: `(positions, C)`.
        weight: `(C,)`. bias: `(C,)` or None.
        eps: added to the variance.
        inputs_embeds: `(T, C)`, in place of the word embeddings.
        padding_idx: id whose embedding gets no gradient.
        dropout_p: probability of dropping, in [0, 1].
        site: which dropout of the model.
        rng_state: `(2,)` int64 on the ids' device, where dropout_p > 0.

    Returns:
        `(T, C)` in the dtype of the embeddings (fp32 under CUDA autocast).

    Raises:
        ValueError: both or neither of input_ids and inputs_embeds, shapes that do not fit, on a
            CPU an id outside its table (elsewhere see fastbert.ops.index_flags), dropout_p outside
            [0, 1], a wrong rng_state.
        RuntimeError: in backward with create_graph=True.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("embed_layer_norm: specify exactly one of input_ids and inputs_embeds")
    if input_ids is not None and word_weight is None:
        raise ValueError("embed_layer_norm: input_ids need word_weight, the table of embeddings")
    if input_ids is None:
        word_weight = None
    ids = (input_ids, token_type_ids, position_ids)
    tables = (word_weight, token_type_weight, position_weight)
    _check_ids(ids, tables)
    if inputs_embeds is not None and inputs_embeds.shape != (
        token_type_ids.shape[0],
        weight.shape[0],
    ):
        raise ValueError(
            f"embed_layer_norm: inputs_embeds must have shape ({token_type_ids.shape[0]}, "
            f"{weight.shape[0]}), got {tuple(inputs_embeds.shape)}"
        )
    if dropout_threshold(dropout_p) > 0:
        check_rng_state("embed_layer_norm", rng_state, token_type_ids.device)
    else:
        rng_state = None
    words = word_weight if inputs_embeds is None else inputs_embeds
    autocast = words.device.type != "cpu" and dispatch.autocast_dtype(words.device) is not None
    out_dtype = torch.float32 if autocast else words.dtype
    if dispatch.needs_grad(inputs_embeds, *tables, weight, bias):
        options = (eps, padding_idx, dropout_p, site, rng_state, out_dtype)
        return _EmbedLayerNorm.apply(inputs_embeds, *tables, weight, bias, ids, options)
    y, _, _, _ = embed_layer_norm_fwd(
        *ids, *tables, weight, bias, eps, inputs_embeds, dropout_p, site, rng_state, out_dtype
    )
    return y


def _check_ids(ids, tables) -> None:
    """Shapes and dtypes everywhere; ranges on a CPU, where reading them costs no wait."""
    names = ("input_ids", "token_type_ids", "position_ids")
    for name, index, table in zip(names, ids, tables, strict=True):
        if index is None:
            continue
        if index.dtype not in (torch.int64, torch.int32) or index.shape != ids[1].shape:
            raise ValueError(
                f"embed_layer_norm: {name} must be int64 of shape {tuple(ids[1].shape)}, got "
                f"{index.dtype} of shape {tuple(index.shape)}"
            )
        if dispatch.is_checkable(index):
            low, high = (int(v) for v in torch.aminmax(index))
            if low < 0 or high >= table.shape[0]:
                wrong = low if low < 0 else high
                row = int((index == wrong).nonzero()[0])
                raise ValueError(
                    f"{name} holds {wrong} at row {row}, but its table has {table.shape[0]} rows "
                    f"(0 to {table.shape[0] - 1}); check the tokenizer against the model's config"
                )
