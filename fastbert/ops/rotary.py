"""`rotary`: queries and keys of one projection turned by their rows' positions.

Letters: T rows, N heads, D head dim, P rows of the tables.
"""

import torch

from fastbert import dispatch
from fastbert.ops import index_flags
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.reference.rotary import rotary_reference


def _fake(qkv, num_heads, cos, sin, index, inverse):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _within_tables(qkv, num_heads, cos, sin, index, inverse):
    """The reference on an index that was checked on a CPU and is clamped elsewhere."""
    if index_flags.must_not_wait(index):
        index = index_flags.clamped(index, cos.shape[0])
    return rotary_reference(qkv, num_heads, cos, sin, index, inverse)


def _kernel_reasons(qkv, *_) -> list[str]:
    return dtype_reasons(qkv=qkv)


rotary_op = dispatch.register_op(
    "rotary",
    "(Tensor qkv, int num_heads, Tensor cos, Tensor sin, Tensor index, bool inverse) -> Tensor",
    room="rotary",
    fake=_fake,
    reference=_within_tables,
    triton="fastbert.kernels.rotary:rotary",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _kernel_reasons),
)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, num_heads, cos, sin, index):
        ctx.save_for_backward(cos, sin, index)
        ctx.num_heads = num_heads
        ctx.binding = dispatch.current_binding()
        return rotary_op(qkv, num_heads, cos, sin, index, False)

    @staticmethod
    def backward(ctx, dout):
        dispatch.refuse_second_order("rotary")
        with dispatch.bound(ctx.binding):
            dqkv = rotary_op(dout, ctx.num_heads, *ctx.saved_tensors, True)
        return dqkv, None, None, None, None


def rotary(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
) -> torch.Tensor:
    """Rotary position embedding, Su et al. 2021, eq. 34, in one pass over queries and keys.

    Element i of a head, i < D/2, and element i + D/2 are a pair (u, v), which becomes
    (u·cos - v·sin, v·cos + u·sin). Computed in fp32 and rounded once.

    Args:
        qkv: `(T, 3·N·D)`, fp32/bf16/fp16 (fp64 by the reference): queries, keys, values, as
            `attention_packed_qkv` takes them; D even.
        num_heads: N.
        cos, sin: `(P, D/2)`, of the angles; no gradient flows to them.
        index: `(T,)` int64, the tables' row of each row, its position as a rule.

    Returns:
        `(T, 3·N·D)` in the dtype of qkv; the values are copied.

    Raises:
        ValueError: shapes that do not fit, an odd D, on a CPU an index outside the tables
            (elsewhere Triton makes such rows NaN, the reference sets fastbert.ops.index_flags).
        RuntimeError: in backward with create_graph=True.
    """
    _check(qkv, num_heads, cos, sin, index)
    if dispatch.needs_grad(qkv):
        return _Rotary.apply(qkv, num_heads, cos, sin, index)
    return rotary_op(qkv, num_heads, cos, sin, index, False)


def _check(qkv, num_heads, cos, sin, index) -> None:
    if qkv.dim() != 2 or num_heads < 1 or qkv.shape[1] % (6 * num_heads):
        raise ValueError(
            f"rotary: qkv must have shape (T, 3·{num_heads}·D) with an even D, got "
            f"{tuple(qkv.shape)}"
        )
    half = qkv.shape[1] // (6 * num_heads)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dim() != 2 or table.shape[1] != half or table.shape != cos.shape:
            raise ValueError(
                f"rotary: {name} must have shape ({cos.shape[0]}, {half}), half a head a row, got "
                f"{tuple(table.shape)}"
            )
    if index.dtype != torch.int64 or index.shape != qkv.shape[:1]:
        raise ValueError(
            f"rotary: index must be int64 of shape ({qkv.shape[0]},), got {index.dtype} of shape "
            f"{tuple(index.shape)}"
        )
    if index.numel() and dispatch.is_checkable(index):
        low, high = (int(v) for v in torch.aminmax(index))
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"rotary: index holds {low if low < 0 else high}, but cos and sin have "
                f"{cos.shape[0]} rows"
            )
