"""`linear_gelu`: GELU(x Wᵀ + b), and `gelu_mlp`: that times a second matrix.

Letters: T rows, C inputs, F intermediate.

Neither keeps the GELU's output for backward: it is recomputed from the pre-activation, so a token
costs C + F elements.
"""

import torch

from fastbert import dispatch
from fastbert.ops.bias_gelu import bias_gelu_bwd, bias_gelu_fwd, check_approximate
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.ops.linear import autocast_input, check_linear, linear_bwd, linear_fwd


def _fwd_fake(x, weight, bias, packed, approximate, keep_preact):
    y = x.new_empty((x.shape[0], weight.shape[0]))
    return y, torch.empty_like(y) if keep_preact else x.new_empty(0)


def _bwd_fake(dy, x, weight, bias, preact, approximate, need_dx, need_dweight):
    dx = x.new_empty(x.shape if need_dx else 0)
    dweight = weight.new_empty(weight.shape if need_dweight else 0)
    return dx, dweight, weight.new_empty(0) if bias is None else torch.empty_like(bias)


def _mlp_bwd_fake(
    dout,
    x,
    weight_in,
    bias_in,
    preact,
    weight_out,
    bias_out,
    approximate,
    needs,
    dresidual=None,
):
    need_dx, need_dweight_in, need_dweight_out = needs
    empty = x.new_empty(0)
    like = x if dresidual is None else dresidual
    return (
        like.new_empty(x.shape) if need_dx else x.new_empty(0),
        torch.empty_like(weight_in) if need_dweight_in else empty,
        empty if bias_in is None else torch.empty_like(bias_in),
        torch.empty_like(weight_out) if need_dweight_out else empty.clone(),
        empty.clone() if bias_out is None else torch.empty_like(bias_out),
    )


def _fwd_composed(x, weight, bias, packed, approximate, keep_preact):
    """The matmul, then the GELU, by whatever serves each."""
    preact = linear_fwd(x, [weight], [] if bias is None else [bias], packed)
    y = bias_gelu_fwd(preact, None, approximate)
    return y, preact if keep_preact else x.new_empty(0)


def _bwd_composed(dy, x, weight, bias, preact, approximate, need_dx, need_dweight, dresidual=None):
    dpreact, _ = bias_gelu_bwd(dy, preact, None, approximate)
    biases = [] if bias is None else [bias]
    dx, dweights, dbiases = linear_bwd(
        dpreact, x, [weight], biases, need_dx, need_dweight, dresidual
    )
    empty = weight.new_empty(0)
    return dx, dweights[0] if need_dweight else empty, dbiases[0] if biases else empty.clone()


def _mlp_bwd_composed(
    dout,
    x,
    weight_in,
    bias_in,
    preact,
    weight_out,
    bias_out,
    approximate,
    needs,
    dresidual=None,
    fused=None,
):
    """`fused`: gives the gradient of the pre-activation and of bias_in from dout in one."""
    need_dx, need_dweight_in, need_dweight_out = needs
    inner = need_dx or need_dweight_in or bias_in is not None
    y = bias_gelu_fwd(preact, None, approximate) if need_dweight_out else preact
    biases = [] if bias_out is None else [bias_out]
    need_dy = inner and fused is None
    dy, dweights, dbiases = linear_bwd(dout, y, [weight_out], biases, need_dy, need_dweight_out)
    empties = [x.new_empty(0) for _ in range(5)]
    gradients = empties[:3]
    if need_dy:
        gradients = _bwd_composed(
            dy, x, weight_in, bias_in, preact, approximate, need_dx, need_dweight_in, dresidual
        )
    elif inner:
        dpreact, dbias_in = fused(
            dout.to(x.dtype), weight_out.to(x.dtype), preact, bias_in, approximate
        )
        dx, dweights_in, _ = linear_bwd(
            dpreact, x, [weight_in], [], need_dx, need_dweight_in, dresidual
        )
        gradients = (dx, dweights_in[0] if need_dweight_in else empties[1], dbias_in)
    return (
        *gradients,
        dweights[0] if need_dweight_out else empties[3],
        dbiases[0] if biases else empties[4],
    )


def _fwd_triton(x, weight, bias, packed, approximate, keep_preact):
    from fastbert.kernels import linear_gelu, tuned

    if x.numel() == 0 or not tuned.fused_is_faster("linear_gelu_fwd", x, *weight.shape):
        return _fwd_composed(x, weight, bias, packed, approximate, keep_preact)
    cast = packed if packed is not None and packed.dtype == x.dtype else weight.to(x.dtype)
    return linear_gelu.fused_fwd(x, cast, bias, approximate, keep_preact)


def _mlp_bwd_triton(dout, x, weight_in, bias_in, preact, weight_out, *rest):
    from fastbert.kernels import linear_gelu, tuned

    depth, num_cols = weight_out.shape
    faster = preact.numel() > 0 and tuned.fused_is_faster("gelu_mlp_bwd", x, num_cols, depth)
    fused = linear_gelu.fused_bwd if faster else None
    tensors = (dout, x, weight_in, bias_in, preact, weight_out)
    return _mlp_bwd_composed(*tensors, *rest, fused=fused)


def _fwd_kernel_reasons(x, weight, *_) -> list[str]:
    return dtype_reasons(x=x, weight=weight)


def _bwd_kernel_reasons(dy, x, weight, *_) -> list[str]:
    return dtype_reasons(dy=dy, x=x, weight=weight)


def _mlp_bwd_kernel_reasons(
    dout,
    x,
    weight_in,
    bias_in,
    preact,
    weight_out,
    bias_out,
    approximate,
    needs,
    dresidual=None,
) -> list[str]:
    return dtype_reasons(
        dout=dout, x=x, weight_in=weight_in, weight_out=weight_out, dresidual=dresidual
    )


linear_gelu_fwd = dispatch.register_op(
    "linear_gelu_fwd",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? packed, str approximate, bool keep_preact) "
    "-> (Tensor y, Tensor preact)",
    room="linear_gelu",
    fake=_fwd_fake,
    reference=_fwd_composed,
    triton="fastbert.ops.linear_gelu:_fwd_triton",
    cpu=True,
    not_supported={"cpu": _fwd_kernel_reasons, "triton": _fwd_kernel_reasons},
)
linear_gelu_bwd = dispatch.register_op(
    "linear_gelu_bwd",
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor preact, str approximate, "
    "bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    room="linear_gelu",
    fake=_bwd_fake,
    reference=_bwd_composed,
    triton="fastbert.ops.linear_gelu:_bwd_composed",
    cpu=True,
    not_supported={"cpu": _bwd_kernel_reasons, "triton": _bwd_kernel_reasons},
)
gelu_mlp_bwd = dispatch.register_op(
    "gelu_mlp_bwd",
    "(Tensor dout, Tensor x, Tensor weight_in, Tensor? bias_in, Tensor preact, Tensor weight_out, "
    "Tensor? bias_out, str approximate, bool[3] needs, Tensor? dresidual=None) -> (Tensor dx, "
    "Tensor dweight_in, Tensor dbias_in, Tensor dweight_out, Tensor dbias_out)",
    room="linear_gelu",
    fake=_mlp_bwd_fake,
    reference=_mlp_bwd_composed,
    triton="fastbert.ops.linear_gelu:_mlp_bwd_triton",
    cpu=True,
    not_supported={"cpu": _mlp_bwd_kernel_reasons, "triton": _mlp_bwd_kernel_reasons},
)


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, approximate):
        y, preact = linear_gelu_fwd(x, weight, bias, None, approximate, True)
        ctx.save_for_backward(x, weight, bias, preact)
        ctx.approximate = approximate
        ctx.binding = dispatch.current_binding()
        return y

    @staticmethod
    def backward(ctx, dy):
        dispatch.refuse_second_order("linear_gelu")
        x, weight, bias, preact = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        with dispatch.bound(ctx.binding):
            dx, dweight, dbias = linear_gelu_bwd(
                dy,
                x,
                weight,
                bias if need_dbias else None,
                preact,
                ctx.approximate,
                need_dx,
                need_dweight,
            )
        return (
            dx if need_dx else None,
            dweight if need_dweight else None,
            dbias if need_dbias else None,
            None,
        )


class _GeluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, return_input, weight_in, bias_in, weight_out, bias_out, approximate):
        rows = autocast_input(x)
        y, preact = linear_gelu_fwd(rows, weight_in, bias_in, None, approximate, True)
        ctx.save_for_backward(rows, weight_in, bias_in, preact, weight_out, bias_out)
        ctx.approximate = approximate
        ctx.input_dtype = x.dtype
        ctx.binding = dispatch.current_binding()
        ctx.set_materialize_grads(False)
        out = linear_fwd(y, [weight_out], [] if bias_out is None else [bias_out], None)
        return (out, x.view_as(x)) if return_input else out

    @staticmethod
    def backward(ctx, dout, dresidual=None):
        dispatch.refuse_second_order("gelu_mlp")
        x, weight_in, bias_in, preact, weight_out, bias_out = ctx.saved_tensors
        need_dx, _, *needs, _ = ctx.needs_input_grad
        if dout is None:
            return dresidual, *(None,) * 6
        with dispatch.bound(ctx.binding):
            dx, *gradients = gelu_mlp_bwd(
                dout,
                x,
                weight_in,
                bias_in if needs[1] else None,
                preact,
                weight_out,
                bias_out if needs[3] else None,
                ctx.approximate,
                [need_dx, needs[0], needs[2]],
                dresidual,
            )
        return (
            dx.to(ctx.input_dtype) if need_dx else None,
            None,
            *(g if need else None for g, need in zip(gradients, needs, strict=True)),
            None,
        )


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    approximate: str,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """GELU(x Wᵀ + b), the first half of the feed-forward network of Vaswani et al. 2017, eq. 2.

    The pre-activation is rounded to the compute dtype, the GELU is computed in fp32. Under
    autocast x is cast as `torch.nn.functional.linear` casts it; weights as in `linear`.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        weight: `(F, C)`. bias: `(F,)` or None.
        approximate: `none` (exact, by erf) or `tanh`.
        packed: the weight as `pack_weights` gives it, where no gradient is wanted.

    Returns:
        `(T, F)`.

    Raises:
        ValueError: shapes that do not fit, or an unknown `approximate`.
        RuntimeError: in backward with create_graph=True.
    """
    check_approximate("linear_gelu", approximate)
    check_linear("linear_gelu", x, weight, bias)
    x = autocast_input(x)
    if dispatch.needs_grad(x, weight, bias):
        return _LinearGelu.apply(x, weight, bias, approximate)
    return linear_gelu_fwd(x, weight, bias, packed, approximate, False)[0]


def gelu_mlp(
    x: torch.Tensor,
    weight_in: torch.Tensor,
    bias_in: torch.Tensor | None,
    weight_out: torch.Tensor,
    bias_out: torch.Tensor | None = None,
    *,
    approximate: str,
    packed_in: torch.Tensor | None = None,
    packed_out: torch.Tensor | None = None,
    return_input: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """GELU(x W₁ᵀ + b₁) W₂ᵀ + b₂, Vaswani et al. 2017, eq. 2, with GELU for ReLU.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        weight_in: `(F, C)`. bias_in: `(F,)` or None.
        weight_out: `(C, F)`. bias_out: `(C,)` or None.
        approximate: `none` (exact, by erf) or `tanh`.
        packed_in, packed_out: the weights as `pack_weights` gives them, where no gradient is
            wanted.
        return_input: return x too, for a residual connection, as `linear` does.

    Returns:
        `(T, C)`. With return_input also x.

    Raises:
        ValueError: shapes that do not fit, or an unknown `approximate`.
        RuntimeError: in backward with create_graph=True.
    """
    check_approximate("gelu_mlp", approximate)
    check_linear("gelu_mlp", x, weight_in, bias_in)
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
    parameters = (weight_in, bias_in, weight_out, bias_out)
    if dispatch.needs_grad(x, *parameters):
        return _GeluMlp.apply(x, return_input, *parameters, approximate)
    y, _ = linear_gelu_fwd(autocast_input(x), weight_in, bias_in, packed_in, approximate, False)
    out = linear_fwd(y, [weight_out], [] if bias_out is None else [bias_out], packed_out)
    return (out, x) if return_input else out
