"""`attention`: softmax attention over packed sequences, with dropout and a window.

Letters: Tq query rows, Tk key rows, N heads, D head dim, C = N·D, B sequences.
"""

import itertools

import torch

from fastbert import dispatch
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.ops.philox import check_rng_state, score_keep_mask_op
from fastbert.reference.attention import attention_bwd_reference, attention_reference
from fastbert.reference.attention_padded import (
    attention_padded_bwd_reference,
    attention_padded_reference,
)
from fastbert.reference.philox import check_score_limits, dropout_threshold
from fastbert.reference.precision import accumulation_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_HEAD_DIM = 128
"""Largest head the Triton and CUDA kernels hold in registers."""


def _fwd_fake(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    window,
    dropout_p,
    site,
    rng_state,
):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def _bwd_fake(dout, q, k, v, *args):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def keep_masks(num_heads, dropout_p, site, rng_state):
    """Threshold, and the masks of a range of sequences as the references ask for them."""
    threshold = dropout_threshold(dropout_p)

    def masks(first: int, last: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        index = torch.arange(first, last, device=rng_state.device)
        args = (rng_state, index, num_heads, seqlen_q, seqlen_k, threshold, site)
        return score_keep_mask_op(*args)

    return threshold, masks if threshold else None


def _fwd_with_mask(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    window,
    dropout_p,
    site,
    rng_state,
):
    threshold, masks = keep_masks(q.shape[1], dropout_p, site, rng_state)
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if q.device.type == "cpu":
        return attention_reference(*tensors, softmax_scale, window, threshold, masks)
    bounds = (max_seqlen_q, max_seqlen_k)
    return attention_padded_reference(*tensors, *bounds, softmax_scale, window, threshold, masks)


def _bwd_with_mask(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    window,
    dropout_p,
    site,
    rng_state,
):
    threshold, masks = keep_masks(q.shape[1], dropout_p, site, rng_state)
    tensors = (dout, q, k, v, softmax_lse, cu_seqlens_q, cu_seqlens_k)
    if q.device.type == "cpu":
        return attention_bwd_reference(*tensors, softmax_scale, window, threshold, masks)
    bounds = (max_seqlen_q, max_seqlen_k)
    return attention_padded_bwd_reference(
        *tensors, *bounds, softmax_scale, window, threshold, masks
    )


def _packed_qkv_bwd_fake(dout, qkv, num_heads, *args):
    return qkv.new_empty(qkv.shape)


def _packed_qkv_bwd_composed(
    dout, qkv, num_heads, out, softmax_lse, cu_seqlens, max_seqlen, *options
):
    q, k, v = _split_heads(qkv, num_heads)
    saved = (out, softmax_lse, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    gradients = attention_bwd(dout, q, k, v, *saved, *options)
    return torch.cat([g.flatten(1) for g in gradients], dim=1)


def _kernel_reasons(*args) -> list[str]:
    tensors = [a for a in args[:4] if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return dtype_reasons(**{f"argument {i}": t for i, t in enumerate(tensors)})


def _gpu_reasons(*args) -> list[str]:
    heads = next(a for a in args[:2] if isinstance(a, torch.Tensor) and a.dim() == 3)
    return _kernel_reasons(*args) + head_dim_reasons(heads.shape[-1])


def _packed_qkv_gpu_reasons(dout, qkv, num_heads, *args) -> list[str]:
    return _kernel_reasons(dout, qkv) + head_dim_reasons(qkv.shape[-1] // (3 * num_heads))


def head_dim_reasons(head_dim: int) -> list[str]:
    if 0 < head_dim <= MAX_HEAD_DIM:
        return []
    return [f"the head dim is {head_dim}, the kernel takes 1 to {MAX_HEAD_DIM}"]


_OPTIONS = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, int[2]? window, float dropout_p, int site, Tensor? rng_state"
)
attention_fwd = dispatch.register_op(
    "attention_fwd",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor softmax_lse)",
    room="attention",
    fake=_fwd_fake,
    reference=_fwd_with_mask,
    triton="fastbert.kernels.attention:attention_fwd",
    cpu=True,
    cuda=True,
    not_supported={"cpu": _kernel_reasons, "triton": _gpu_reasons, "cuda": _gpu_reasons},
)
attention_bwd = dispatch.register_op(
    "attention_bwd",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    room="attention",
    fake=_bwd_fake,
    reference=_bwd_with_mask,
    triton="fastbert.kernels.attention:attention_bwd",
    cpu=True,
    cuda=True,
    not_supported={"cpu": _kernel_reasons, "triton": _gpu_reasons, "cuda": _gpu_reasons},
)
attention_packed_qkv_bwd = dispatch.register_op(
    "attention_packed_qkv_bwd",
    "(Tensor dout, Tensor qkv, int num_heads, Tensor out, Tensor softmax_lse, Tensor cu_seqlens, "
    "SymInt max_seqlen, float softmax_scale, int[2]? window, float dropout_p, int site, "
    "Tensor? rng_state) -> Tensor dqkv",
    room="attention",
    fake=_packed_qkv_bwd_fake,
    reference=_packed_qkv_bwd_composed,
    triton="fastbert.kernels.attention:attention_packed_qkv_bwd",
    cpu=True,
    cuda=True,
    not_supported={
        "cpu": _kernel_reasons,
        "triton": _packed_qkv_gpu_reasons,
        "cuda": _packed_qkv_gpu_reasons,
    },
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, options, rng_state):
        # Dynamo takes no tensor twice, so None stands for the lengths of the queries.
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        out, lse = attention_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, rng_state)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, rng_state)
        ctx.options = options
        ctx.binding = dispatch.current_binding()
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        dispatch.refuse_second_order("attention")
        *saved, rng_state = ctx.saved_tensors
        with dispatch.bound(ctx.binding):
            gradients = attention_bwd(dout, *saved, *ctx.options, rng_state)
        return *gradients, None, None, None, None


class _AttentionPackedQkv(torch.autograd.Function):
    """The same on one tensor of queries, keys and values, whose gradient is one tensor too."""

    @staticmethod
    def forward(ctx, qkv, num_heads, cu_seqlens, options, rng_state):
        q, k, v = _split_heads(qkv, num_heads)
        out, lse = attention_fwd(q, k, v, cu_seqlens, cu_seqlens, *options, rng_state)
        ctx.save_for_backward(qkv, out, lse, cu_seqlens, rng_state)
        ctx.num_heads = num_heads
        ctx.options = options
        ctx.binding = dispatch.current_binding()
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        dispatch.refuse_second_order("attention")
        qkv, out, lse, cu_seqlens, rng_state = ctx.saved_tensors
        max_seqlen, _, *options = ctx.options
        with dispatch.bound(ctx.binding):
            dqkv = attention_packed_qkv_bwd(
                dout, qkv, ctx.num_heads, out, lse, cu_seqlens, max_seqlen, *options, rng_state
            )
        return dqkv, None, None, None, None


def _split_heads(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    return qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    site: int = 0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """out = dropout(softmax(q kᵀ · softmax_scale)) v within each packed sequence.

    Vaswani et al. 2017, eq. 1; computed as in Dao et al. 2022. Queries and keys of a sequence may
    differ in number: query-only rows come after its real rows.

    Args:
        q: `(Tq, N, D)`; k, v: `(Tk, N, D)`; fp32/bf16/fp16, last dim contiguous, views allowed.
        cu_seqlens_q, cu_seqlens_k: `(B+1,)` int32, first row of each sequence; rows behind the
            last one are idle.
        max_seqlen_q, max_seqlen_k: bounds of the lengths, known on the host; never read back from
            the device.
        softmax_scale: factor on the scores; None: 1/√D.
        window: (left, right): query i of a sequence sees its keys i-left to i+right, -1 for no
            bound; None: all keys.
        dropout_p: probability of dropping a probability, in [0, 1].
        site: which dropout of the model.
        rng_state: `(2,)` int64 on q's device, where dropout_p > 0.

    Returns:
        out: `(Tq, N, D)`, 0 in idle rows and where a query has no key. softmax_lse: `(N, Tq)`
        fp32, log Σ exp of the scaled scores before dropout, -inf there; not differentiable; None
        where a peer is bound (docs/peers.md).

    Raises:
        NotImplementedError: a bound implementation cannot take these inputs.
        ValueError: shapes, dtypes or lengths that do not fit, dropout_p outside [0, 1], a wrong
            rng_state, lengths beyond the dropout stream's limits.
        RuntimeError: in backward with create_graph=True.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options, rng_state = _options(
        q.shape[1:],
        cu_seqlens_q,
        (max_seqlen_q, max_seqlen_k),
        softmax_scale,
        window,
        dropout_p,
        site,
        rng_state,
    )
    peer = dispatch.peer("attention")
    if peer is not None:
        return peer(q, k, v, cu_seqlens_q, cu_seqlens_k, *options), None
    if dispatch.needs_grad(q, k, v):
        keys = None if cu_seqlens_k is cu_seqlens_q else cu_seqlens_k
        return _Attention.apply(q, k, v, cu_seqlens_q, keys, options, rng_state)
    return attention_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, rng_state)


def attention_packed_qkv(
    qkv: torch.Tensor,
    num_heads: int,
    cu_seqlens: torch.Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float | None = None,
    window: tuple[int, int] | None = None,
    dropout_p: float = 0.0,
    site: int = 0,
    rng_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention` on the output of one projection: `(T, 3·C)`, queries, keys, values.

    Args:
        qkv: `(T, 3·C)`, last dim contiguous.
        num_heads: N.
        cu_seqlens: `(B+1,)` int32. max_seqlen: bound of the lengths.

    Returns, Raises: as `attention`.
    """
    if qkv.dim() != 2 or qkv.shape[1] % (3 * num_heads):
        raise ValueError(
            f"attention_packed_qkv: qkv must have shape (T, 3·{num_heads}·D), got "
            f"{tuple(qkv.shape)}"
        )
    q, k, v = _split_heads(qkv, num_heads)
    _check(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options, rng_state = _options(
        q.shape[1:],
        cu_seqlens,
        (max_seqlen, max_seqlen),
        softmax_scale,
        window,
        dropout_p,
        site,
        rng_state,
    )
    peer = dispatch.peer("attention")
    if peer is not None:
        return peer(q, k, v, cu_seqlens, cu_seqlens, *options), None
    if dispatch.needs_grad(qkv):
        return _AttentionPackedQkv.apply(qkv, num_heads, cu_seqlens, options, rng_state)
    return attention_fwd(q, k, v, cu_seqlens, cu_seqlens, *options, rng_state)


def _options(
    head_shape, cu_seqlens, max_seqlens, softmax_scale, window, dropout_p, site, rng_state
):
    num_heads, head_dim = head_shape
    if window is not None:
        window = [int(side) for side in window]
        if len(window) != 2 or min(window) < -1:
            raise ValueError(
                f"attention: window must be (left, right), each -1 or more, got {window}"
            )
    if dropout_threshold(dropout_p) > 0:
        check_rng_state("attention", rng_state, cu_seqlens.device)
        check_score_limits(cu_seqlens[:-1], num_heads, *max_seqlens)
    else:
        rng_state = None
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    return (*max_seqlens, scale, window, dropout_p, site), rng_state


def _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:]:
        raise ValueError(
            "attention: q must be (Tq, N, D) and k, v (Tk, N, D), got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"attention: q, k, v must share a float dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "attention: cu_seqlens_q and cu_seqlens_k must have the same shape (B+1,), got "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    for name, cu_seqlens, rows, bound in (
        ("q", cu_seqlens_q, q.shape[0], max_seqlen_q),
        ("k", cu_seqlens_k, k.shape[0], max_seqlen_k),
    ):
        longest = max(checked_lengths("attention", f"cu_seqlens_{name}", cu_seqlens, rows))
        if longest > bound:
            raise ValueError(
                f"attention: max_seqlen_{name} is {bound}, but a sequence has {longest} rows"
            )


def checked_lengths(op: str, name: str, cu_seqlens: torch.Tensor, rows: int) -> list[int]:
    """0 and the lengths of the sequences; 0 alone where the host cannot see them without waiting.

    Raises:
        ValueError: unless `cu_seqlens` rises from 0 to at most `rows`.
    """
    if not dispatch.is_checkable(cu_seqlens):
        return [0]
    starts = cu_seqlens.tolist()
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] > rows or min(lengths, default=0) < 0:
        raise ValueError(f"{op}: {name} must rise from 0 to at most {rows} rows, got {starts}")
    return [0, *lengths]
