"""`disentangled_attention`: DeBERTa's attention over packed sequences, with dropout.

Letters: T packed rows, N heads, D head dim, B sequences, R rows of a position table, M half the
width of the bucket table.
"""

import functools

import torch

from fastbert import dispatch
from fastbert.ops.attention import DTYPES, checked_lengths, head_dim_reasons, keep_masks
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.ops.philox import check_rng_state
from fastbert.reference.disentangled_attention import (
    disentangled_attention_bwd_reference,
    disentangled_attention_reference,
    relative_buckets,
)
from fastbert.reference.philox import check_score_limits, dropout_threshold
from fastbert.reference.precision import accumulation_dtype


def _fwd_fake(q, k, v, position_key, position_query, buckets, cu_seqlens, *options):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def _bwd_fake(dout, q, k, v, position_key, position_query, *args):
    tables = (q.new_empty(0 if t is None else t.shape) for t in (position_key, position_query))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *tables


def _fwd_with_mask(
    q,
    k,
    v,
    position_key,
    position_query,
    buckets,
    cu_seqlens,
    max_seqlen,
    softmax_scale,
    dropout_p,
    site,
    rng_state,
):
    return disentangled_attention_reference(
        q,
        k,
        v,
        position_key,
        position_query,
        buckets,
        cu_seqlens,
        softmax_scale,
        *keep_masks(q.shape[1], dropout_p, site, rng_state),
    )


def _bwd_with_mask(
    dout,
    q,
    k,
    v,
    position_key,
    position_query,
    out,
    softmax_lse,
    buckets,
    cu_seqlens,
    max_seqlen,
    softmax_scale,
    dropout_p,
    site,
    rng_state,
):
    return disentangled_attention_bwd_reference(
        dout,
        q,
        k,
        v,
        position_key,
        position_query,
        softmax_lse,
        buckets,
        cu_seqlens,
        softmax_scale,
        *keep_masks(q.shape[1], dropout_p, site, rng_state),
    )


def _kernel_reasons(q, k, v, *args) -> list[str]:
    return dtype_reasons(q=q, k=k, v=v)


def _gpu_reasons(q, k, *args) -> list[str]:
    # Of either direction's first two arguments the second has heads.
    return dtype_reasons(q=q) + head_dim_reasons(k.shape[-1])


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? position_key, Tensor? position_query"
_OPTIONS = (
    "Tensor buckets, Tensor cu_seqlens, SymInt max_seqlen, float softmax_scale, float dropout_p, "
    "int site, Tensor? rng_state"
)
disentangled_attention_fwd = dispatch.register_op(
    "disentangled_attention_fwd",
    f"({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor softmax_lse)",
    room="disentangled_attention",
    fake=_fwd_fake,
    reference=_fwd_with_mask,
    triton="fastbert.kernels.disentangled_attention:disentangled_attention_fwd",
    cpu=True,
    cuda=True,
    not_supported={"cpu": _kernel_reasons, "triton": _gpu_reasons, "cuda": _gpu_reasons},
)
disentangled_attention_bwd = dispatch.register_op(
    "disentangled_attention_bwd",
    f"(Tensor dout, {_INPUTS}, Tensor out, Tensor softmax_lse, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dposition_key, Tensor dposition_query)",
    room="disentangled_attention",
    fake=_bwd_fake,
    reference=_bwd_with_mask,
    triton="fastbert.kernels.disentangled_attention:disentangled_attention_bwd",
    cpu=True,
    cuda=True,
    not_supported={"cpu": _kernel_reasons, "triton": _gpu_reasons, "cuda": _gpu_reasons},
)


class _DisentangledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, position_key, position_query, buckets, cu_seqlens, options, rng_state
    ):
        inputs = (q, k, v, position_key, position_query)
        out, lse = disentangled_attention_fwd(*inputs, buckets, cu_seqlens, *options, rng_state)
        ctx.save_for_backward(*inputs, out, lse, buckets, cu_seqlens, rng_state)
        ctx.options = options
        ctx.binding = dispatch.current_binding()
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        dispatch.refuse_second_order("disentangled_attention")
        *saved, rng_state = ctx.saved_tensors
        with dispatch.bound(ctx.binding):
            *gradients, dkey, dquery = disentangled_attention_bwd(
                dout, *saved, *ctx.options, rng_state
            )
        _, _, _, position_key, position_query, *_ = saved
        dkey = None if position_key is None else dkey
        dquery = None if position_query is None else dquery
        return *gradients, dkey, dquery, None, None, None, None


def disentangled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_key: torch.Tensor | None,
    position_query: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int,
    position_buckets: int,
    max_relative_positions: int,
    softmax_scale: float,
    dropout_p: float = 0.0,
    site: int = 0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = dropout(softmax(softmax_scale · A)) v within each packed sequence, where
    A[i, j] = q[i]·k[j] + q[i]·position_key[b] + k[j]·position_query[b], b the bucket of i - j.

    He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", eq. 4 without
    its last term; buckets as `fastbert.reference.disentangled_attention.relative_buckets` says.

    Args:
        q, k, v: `(T, N, D)`; fp32/bf16/fp16, last dim contiguous, views allowed.
        position_key: `(R, N, D)` like q, the keys of relative positions (content to position), R
            twice the buckets to each side. None: without this term.
        position_query: `(R, N, D)` like q, their queries (position to content). None: without.
        cu_seqlens: `(B+1,)` int32, first row of each sequence; rows behind the last one are idle.
        max_seqlen: bound of the lengths, known on the host.
        position_buckets: buckets to each side, logarithmic beyond half of them; below 1 for one a
            distance, as the first DeBERTa has it.
        max_relative_positions: distances told apart to each side.
        softmax_scale: factor on the sum of the terms.
        dropout_p: probability of dropping a probability, in [0, 1].
        site: which dropout of the model.
        rng_state: `(2,)` int64 on q's device, where dropout_p > 0.

    Returns:
        out: `(T, N, D)`, 0 in idle rows. softmax_lse: `(N, T)` fp32, log Σ exp of the scaled
        scores before dropout, -inf there; not differentiable.

    Raises:
        NotImplementedError: a bound implementation cannot take these inputs.
        ValueError: shapes, dtypes, lengths or numbers of positions that do not fit, dropout_p
            outside [0, 1], a wrong rng_state, lengths beyond the dropout stream's limits.
        RuntimeError: in backward with create_graph=True.
    """
    positions = {"position_key": position_key, "position_query": position_query}
    _check(q, k, v, cu_seqlens, max_seqlen)
    _check_positions(q, positions, position_buckets, max_relative_positions)
    if dropout_threshold(dropout_p) > 0:
        check_rng_state("disentangled_attention", rng_state, q.device)
        check_score_limits(cu_seqlens[:-1], q.shape[1], max_seqlen, max_seqlen)
    else:
        rng_state = None
    buckets = _buckets(position_buckets, max_relative_positions, q.device)
    inputs = (q, k, v, position_key, position_query)
    options = (max_seqlen, softmax_scale, dropout_p, site)
    if dispatch.needs_grad(*inputs):
        return _DisentangledAttention.apply(*inputs, buckets, cu_seqlens, options, rng_state)
    return disentangled_attention_fwd(*inputs, buckets, cu_seqlens, *options, rng_state)


def _buckets(position_buckets: int, max_relative_positions: int, device) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return relative_buckets(position_buckets, max_relative_positions).to(device)
    return _kept_buckets(position_buckets, max_relative_positions, device)


@functools.lru_cache(maxsize=16)
def _kept_buckets(position_buckets: int, max_relative_positions: int, device) -> torch.Tensor:
    """The same tensor for every layer and step; made on the CPU, whose logarithms decide the
    borders of the buckets."""
    # A tensor made in inference mode could not be saved for a later backward.
    with torch.inference_mode(False):
        return relative_buckets(position_buckets, max_relative_positions).to(device)


def _check(q, k, v, cu_seqlens, max_seqlen) -> None:
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "disentangled_attention: q, k, v must share a shape (T, N, D), got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            "disentangled_attention: q, k, v must share a float dtype, got "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if cu_seqlens.dim() != 1:
        raise ValueError(
            f"disentangled_attention: cu_seqlens must have shape (B+1,), got "
            f"{tuple(cu_seqlens.shape)}"
        )
    longest = max(checked_lengths("disentangled_attention", "cu_seqlens", cu_seqlens, q.shape[0]))
    if longest > max_seqlen:
        raise ValueError(
            f"disentangled_attention: max_seqlen is {max_seqlen}, but a sequence has {longest} rows"
        )


def _check_positions(q, positions, position_buckets, max_relative_positions) -> None:
    # Without a wider range the logarithm of the last distance would be 0 or negative.
    least = position_buckets // 2 + 2 if position_buckets > 0 else 1
    if max_relative_positions < least or position_buckets == 1:
        raise ValueError(
            "disentangled_attention: position_buckets must be below 1 or above 1, and "
            f"max_relative_positions at least {least} beside position_buckets={position_buckets}, "
            f"got {max_relative_positions}"
        )
    span = position_buckets if position_buckets > 0 else max_relative_positions
    expected = (2 * span, *q.shape[1:])
    for name, table in positions.items():
        if table is None:
            continue
        if table.shape != expected or table.dtype != q.dtype:
            raise ValueError(
                f"disentangled_attention: {name} must be {q.dtype} of shape {expected}, got "
                f"{table.dtype} of shape {tuple(table.shape)}"
            )
