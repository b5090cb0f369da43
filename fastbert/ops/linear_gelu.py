"""`linear_gelu`: GELU(x Wᵀ + b), and `gelu_mlp`: that times a second matrix.

Letters: T rows, C inputs, F intermediate.

Neither keeps the GELU's output for backward: it is recomputed from the pre-activation, so a token
costs C + F elements.
"""

import torch
import torch.nn.functional as F

from fastbert import dispatch
from fastbert.ops.bias_gelu import bias_gelu_bwd, bias_gelu_fwd, check_approximate
from fastbert.reference.precision import accumulation_dtype


def _fwd_fake(x, weight, bias, approximate):
    preact = x.new_empty((x.shape[0], weight.shape[0]))
    return torch.empty_like(preact), preact


def _bwd_fake(dy, x, weight, bias, preact, approximate, need_dx, need_dweight):
    dx = x.new_empty(x.shape) if need_dx else x.new_empty(0)
    dweight = weight.new_empty(weight.shape) if need_dweight else weight.new_empty(0)
    return dx, dweight, weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)


def _fwd_composed(x, weight, bias, approximate):
    """torch's matmul, then whichever `bias_gelu` serves this device."""
    preact = F.linear(x, weight, bias)
    return bias_gelu_fwd(preact, None, approximate), preact


def _bwd_composed(dy, x, weight, bias, preact, approximate, need_dx, need_dweight):
    dpreact, _ = bias_gelu_bwd(dy, preact, None, approximate)
    dx = dpreact @ weight if need_dx else x.new_empty(0)
    dweight = dpreact.t() @ x if need_dweight else weight.new_empty(0)
    if bias is None:
        return dx, dweight, weight.new_empty(0)
    return dx, dweight, _column_sums(dpreact, bias)


def _column_sums(gradient: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias: summed in fp32, rounded once."""
    return gradient.sum(0, dtype=accumulation_dtype(bias.dtype)).to(bias.dtype)


linear_gelu_fwd = dispatch.register_op(
    "linear_gelu_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, str approximate) -> (Tensor y, Tensor preact)",
    room="linear_gelu",
    fake=_fwd_fake,
    reference=_fwd_composed,
)
linear_gelu_bwd = dispatch.register_op(
    "linear_gelu_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor preact, str approximate, "
    "bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    room="linear_gelu",
    fake=_bwd_fake,
    reference=_bwd_composed,
)


def _gradients(ctx, dy, x, weight, bias, preact, needs):
    need_dx, need_dweight, need_dbias = needs
    dx, dweight, dbias = linear_gelu_bwd(
        dy, x, weight, bias if need_dbias else None, preact, ctx.approximate, need_dx, need_dweight
    )
    return (
        dx if need_dx else None,
        dweight if need_dweight else None,
        dbias if bias is not None and need_dbias else None,
    )


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, approximate):
        y, preact = linear_gelu_fwd(x, weight, bias, approximate)
        ctx.save_for_backward(x, weight, bias, preact)
        ctx.approximate = approximate
        ctx.binding = dispatch.current_binding()
        return y

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("linear_gelu")
        with dispatch.bound(ctx.binding):
            gradients = _gradients(ctx, dy, *ctx.saved_tensors, ctx.needs_input_grad[:3])
        return *gradients, None


class _GeluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_in, bias_in, weight_out, bias_out, approximate):
        y, preact = linear_gelu_fwd(x, weight_in, bias_in, approximate)
        ctx.save_for_backward(x, weight_in, bias_in, preact, weight_out, bias_out)
        ctx.approximate = approximate
        ctx.binding = dispatch.current_binding()
        return F.linear(y, weight_out, bias_out)

    @staticmethod
    def backward(ctx, dout):
        dispatch.refuse_second_order("gelu_mlp")
        *saved, weight_out, bias_out = ctx.saved_tensors
        preact = saved[-1]
        dweight_out = dbias_out = None
        gradients = (None, None, None)
        if ctx.needs_input_grad[4]:
            dbias_out = _column_sums(dout, bias_out)
        with dispatch.bound(ctx.binding):
            if ctx.needs_input_grad[3]:
                dweight_out = dout.t() @ bias_gelu_fwd(preact, None, ctx.approximate)
            if any(ctx.needs_input_grad[:3]):
                dy = dout @ weight_out
                gradients = _gradients(ctx, dy, *saved, ctx.needs_input_grad[:3])
        return *gradients, dweight_out, dbias_out, None


def linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, approximate: str
) -> torch.Tensor:
    """GELU(x Wᵀ + b), the first half of the feed-forward network of Vaswani et al. 2017, eq. 2.

    The pre-activation is rounded to the compute dtype, the GELU is computed in fp32. Under
    autocast all inputs are cast as `torch.nn.functional.linear` casts them.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        weight: `(F, C)`. bias: `(F,)` or None.
        approximate: `none` (exact, by erf) or `tanh`.

    Returns:
        `(T, F)`.

    Raises:
        ValueError: shapes that do not fit, or an unknown `approximate`.
        RuntimeError: in backward with create_graph=True.
    """
    _check("linear_gelu", x, weight, bias, approximate)
    x, weight, bias = autocast_inputs(x, weight, bias)
    if dispatch.needs_grad(x, weight, bias):
        return _LinearGelu.apply(x, weight, bias, approximate)
    return linear_gelu_fwd(x, weight, bias, approximate)[0]


def gelu_mlp(
    x: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor | None,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor | None = None,
    *,
    approximate: str,
) -> torch.Tensor:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, Vaswani et al. 2017, eq. 2, with GELU for ReLU.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        weight_in: `(F, C)`. bias_in: `(F,)` or None.
        weight_out: `(C, F)`. bias_out: `(C,)` or None.
        approximate: `none` (exact, by erf) or `tanh`.

    Returns:
        `(T, C)`.

    Raises:
        ValueError: shapes that do not fit, or an unknown `approximate`.
        RuntimeError: in backward with create_graph=True.
    """
    _check("gelu_mlp", x, weight_in, bias_in, approximate)
    if weight_out.dim() != 2 or weight_out.shape[1] != weight_in.shape[0]:
        raise ValueError(
            f"gelu_mlp: weight_out must have shape (C, {weight_in.shape[0]}), got "
            f"{tuple(weight_out.shape)}"
        )
    if bias_out is not None and bias_out.shape != weight_out.shape[:1]:
        raise ValueError(
            f"gelu_mlp: bias_out must have shape ({weight_out.shape[0]},), got "
            f"{tuple(bias_out.shape)}"
        )
    tensors = autocast_inputs(x, weight_in, bias_in, weight_out, bias_out)
    if dispatch.needs_grad(*tensors):
        return _GeluMlp.apply(*tensors, approximate)
    x, weight_in, bias_in, weight_out, bias_out = tensors
    return F.linear(linear_gelu_fwd(x, weight_in, bias_in, approximate)[0], weight_out, bias_out)


def autocast_inputs(x: torch.Tensor, *others: torch.Tensor | None) -> tuple:
    """The inputs in the dtype autocast gives a matmul on x's device; as they are without it."""
    dtype = dispatch.autocast_dtype(x.device)
    if dtype is None:
        return x, *others
    return tuple(None if t is None else t.to(dtype) for t in (x, *others))


def _check(name, x, weight, bias, approximate) -> None:
    check_approximate(name, approximate)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: x must be (T, C) and the first weight (F, C), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: the first bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
