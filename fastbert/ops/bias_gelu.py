"""`bias_gelu`: GELU(x + bias) with its gradients. Letters: F features."""

import torch

from fastbert import dispatch
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.reference.bias_gelu import (
    APPROXIMATIONS,
    bias_gelu_bwd_reference,
    bias_gelu_fwd_reference,
)


def _fwd_fake(x, bias, approximate):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _bwd_fake(dy, x, bias, approximate):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0) if bias is None else torch.empty_like(bias)


def _kernel_reasons(*args) -> list[str]:
    return dtype_reasons(x=args[-3], bias=args[-2])


bias_gelu_fwd = dispatch.register_op(
    "bias_gelu_fwd",
    "(Tensor x, Tensor? bias, str approximate) -> Tensor",
    room="bias_gelu",
    fake=_fwd_fake,
    reference=bias_gelu_fwd_reference,
    triton="fastbert.kernels.bias_gelu:bias_gelu_fwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _kernel_reasons),
)
bias_gelu_bwd = dispatch.register_op(
    "bias_gelu_bwd",
    "(Tensor dy, Tensor x, Tensor? bias, str approximate) -> (Tensor dx, Tensor dbias)",
    room="bias_gelu",
    fake=_bwd_fake,
    reference=bias_gelu_bwd_reference,
    triton="fastbert.kernels.bias_gelu:bias_gelu_bwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _kernel_reasons),
)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, approximate):
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        ctx.binding = dispatch.current_binding()
        return bias_gelu_fwd(x, bias, approximate)

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("bias_gelu")
        x, bias = ctx.saved_tensors
        with dispatch.bound(ctx.binding):
            dx, dbias = bias_gelu_bwd(dy, x, bias, ctx.approximate)
        return dx, dbias if bias is not None else None, None


def bias_gelu(
    x: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str
) -> torch.Tensor:
    """GELU(x + bias), Hendrycks & Gimpel 2016, section 2.

    The sum and the GELU are computed in fp32 and rounded once to the dtype of x.

    Args:
        x: `(..., F)`, fp32/bf16/fp16 (fp64 by the reference).
        bias: `(F,)`, any of these dtypes, or None.
        approximate: `none` (exact, by erf) or `tanh`.

    Returns:
        `(..., F)`, the dtype of x.

    Raises:
        ValueError: unknown `approximate`, or a bias whose shape is not `(F,)`.
        RuntimeError: in backward with create_graph=True.
    """
    check_approximate("bias_gelu", approximate)
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(
            f"bias_gelu: bias must have shape ({x.shape[-1]},), got {tuple(bias.shape)}"
        )
    if dispatch.needs_grad(x, bias):
        return _BiasGelu.apply(x, bias, approximate)
    return bias_gelu_fwd(x, bias, approximate)


def check_approximate(name: str, approximate: str) -> None:
    """Raises ValueError unless `approximate` names a form of GELU."""
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"{name}: approximate must be 'none' or 'tanh', got {approximate!r}")
