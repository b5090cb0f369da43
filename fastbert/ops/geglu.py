"""`geglu`: GELU of one half of the features times the other. Letters: T rows, F features."""

import torch

from fastbert import dispatch
from fastbert.ops.bias_gelu import check_approximate
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.reference.geglu import geglu_bwd_reference, geglu_fwd_reference


def _fwd_fake(x, bias, approximate):
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _bwd_fake(dy, x, bias, approximate):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0) if bias is None else torch.empty_like(bias)


def _kernel_reasons(*args) -> list[str]:
    return dtype_reasons(x=args[-3], bias=args[-2])


geglu_fwd = dispatch.register_op(
    "geglu_fwd",
    "(Tensor x, Tensor? bias, str approximate) -> Tensor",
    room="geglu",
    fake=_fwd_fake,
    reference=geglu_fwd_reference,
    triton="fastbert.kernels.geglu:geglu_fwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _kernel_reasons),
)
geglu_bwd = dispatch.register_op(
    "geglu_bwd",
    "(Tensor dy, Tensor x, Tensor? bias, str approximate) -> (Tensor dx, Tensor dbias)",
    room="geglu",
    fake=_bwd_fake,
    reference=geglu_bwd_reference,
    triton="fastbert.kernels.geglu:geglu_bwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _kernel_reasons),
)


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, approximate):
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        ctx.binding = dispatch.current_binding()
        return geglu_fwd(x, bias, approximate)

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("geglu")
        x, bias = ctx.saved_tensors
        with dispatch.bound(ctx.binding):
            dx, dbias = geglu_bwd(dy, x, bias, ctx.approximate)
        return dx, dbias if bias is not None else None, None


def geglu(x: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str) -> torch.Tensor:
    """GELU(u)·v with (u, v) = x + bias: Shazeer 2020, "GLU Variants Improve Transformer", eq. 5.

    Computed in fp32 and rounded once to the dtype of x; GELU(u) is not kept for backward.

    Args:
        x: `(T, 2·F)`, fp32/bf16/fp16 (fp64 by the reference): u, which goes through GELU, then v.
        bias: `(2·F,)`, any of these dtypes, or None.
        approximate: `none` (exact, by erf) or `tanh`.

    Returns:
        `(T, F)`, the dtype of x.

    Raises:
        ValueError: unknown `approximate`, an x that is not `(T, 2·F)` or a bias that is not
            `(2·F,)`.
        RuntimeError: in backward with create_graph=True.
    """
    check_approximate("geglu", approximate)
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"geglu: x must have shape (T, 2·F), got {tuple(x.shape)}")
    if bias is not None and bias.shape != x.shape[1:]:
        raise ValueError(f"geglu: bias must have shape ({x.shape[1]},), got {tuple(bias.shape)}")
    if dispatch.needs_grad(x, bias):
        return _Geglu.apply(x, bias, approximate)
    return geglu_fwd(x, bias, approximate)
