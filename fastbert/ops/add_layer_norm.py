"""`add_layer_norm`: LayerNorm(residual + dropout(x + linear_bias)), every part but the norm
optional. Letters: T rows, C features."""

import torch

from fastbert import dispatch
from fastbert.ops.kernel_inputs import dtype_reasons, width_reasons
from fastbert.ops.philox import check_rng_state, row_keep_mask_op
from fastbert.reference.add_layer_norm import (
    add_layer_norm_bwd_reference,
    add_layer_norm_reference,
)
from fastbert.reference.philox import dropout_scale, dropout_threshold


def _is_identity(linear_bias, residual, dropout_p) -> bool:
    """Whether h is x itself."""
    return linear_bias is None and residual is None and dropout_threshold(dropout_p) == 0


def _fwd_fake(
    x, linear_bias, residual, weight, bias, eps, dropout_p, site, rng_state, out_dtype, keep_sum
):
    y = x.new_empty(x.shape, dtype=out_dtype)
    statistics = x.new_empty((x.shape[0], 1), dtype=_statistics_dtype(x))
    if not keep_sum or _is_identity(linear_bias, residual, dropout_p):
        h = x.new_empty(0)
    else:
        h = x.new_empty(x.shape, dtype=_sum_dtype(x, residual))
    return y, h, statistics, torch.empty_like(statistics)


def _bwd_fake(
    dy, dh, h, weight, bias, mean, rstd, linear_bias, dropout_p, site, rng_state, x_dtype
):
    same = dropout_threshold(dropout_p) == 0 and x_dtype == h.dtype
    dx = h.new_empty(0) if same else h.new_empty(h.shape, dtype=x_dtype)
    return (
        dx,
        h.new_empty(h.shape),
        torch.empty_like(weight),
        h.new_empty(0) if bias is None else torch.empty_like(bias),
        h.new_empty(0) if linear_bias is None else torch.empty_like(linear_bias),
    )


def _statistics_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _sum_dtype(x, residual):
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _keep_mask(rows, dropout_p, site, rng_state):
    threshold = dropout_threshold(dropout_p)
    if threshold == 0:
        return threshold, None
    return threshold, row_keep_mask_op(rng_state, *rows.shape, threshold, site)


def _fwd_with_mask(
    x, linear_bias, residual, weight, bias, eps, dropout_p, site, rng_state, out_dtype, keep_sum
):
    threshold, keep = _keep_mask(x, dropout_p, site, rng_state)
    return add_layer_norm_reference(
        x, linear_bias, residual, weight, bias, eps, threshold, keep, out_dtype, keep_sum
    )


def _bwd_with_mask(
    dy, dh, h, weight, bias, mean, rstd, linear_bias, dropout_p, site, rng_state, x_dtype
):
    threshold, keep = _keep_mask(h, dropout_p, site, rng_state)
    return add_layer_norm_bwd_reference(
        dy, dh, h, weight, bias, mean, rstd, threshold, keep, x_dtype, linear_bias
    )


def _fwd_kernel_reasons(x, linear_bias, residual, *_) -> list[str]:
    return dtype_reasons(x=x, residual=residual) + width_reasons(x)


def _bwd_kernel_reasons(dy, dh, h, *_) -> list[str]:
    return dtype_reasons(dy=dy, h=h) + width_reasons(h)


add_layer_norm_fwd = dispatch.register_op(
    "add_layer_norm_fwd",
    "(Tensor x, Tensor? linear_bias, Tensor? residual, Tensor weight, Tensor? bias, float eps, "
    "float dropout_p, int site, Tensor? rng_state, ScalarType out_dtype, "
    "bool keep_sum) -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    room="add_layer_norm",
    fake=_fwd_fake,
    reference=_fwd_with_mask,
    triton="fastbert.kernels.add_layer_norm:add_layer_norm_fwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _fwd_kernel_reasons),
)
add_layer_norm_bwd = dispatch.register_op(
    "add_layer_norm_bwd",
    "(Tensor dy, Tensor? dh, Tensor h, Tensor weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "Tensor? linear_bias, float dropout_p, int site, Tensor? rng_state, ScalarType x_dtype) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias, Tensor dlinear_bias)",
    room="add_layer_norm",
    fake=_bwd_fake,
    reference=_bwd_with_mask,
    triton="fastbert.kernels.add_layer_norm:add_layer_norm_bwd",
    cpu=True,
    cuda=True,
    not_supported=dict.fromkeys(("cpu", "triton", "cuda"), _bwd_kernel_reasons),
)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, residual, weight, bias, linear_bias, eps, dropout_p, site, rng_state, out_dtype
    ):
        options = (eps, dropout_p, site, rng_state, out_dtype, True)
        y, h, mean, rstd = add_layer_norm_fwd(x, linear_bias, residual, weight, bias, *options)
        ctx.identity = _is_identity(linear_bias, residual, dropout_p)
        total = x if ctx.identity else h
        ctx.save_for_backward(total, weight, bias, mean, rstd, linear_bias, rng_state)
        ctx.options = (dropout_p, site)
        ctx.x_dtype = x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.binding = dispatch.current_binding()
        ctx.set_materialize_grads(False)
        if ctx.identity:
            ctx.mark_non_differentiable(h)
        return y, h

    @staticmethod
    def backward(ctx, dy, dh):
        dispatch.refuse_second_order("add_layer_norm")
        total, weight, bias, mean, rstd, linear_bias, rng_state = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(total)
        dropout_p, site = ctx.options
        with dispatch.bound(ctx.binding):
            dx, dresidual, dweight, dbias, dlinear_bias = add_layer_norm_bwd(
                dy,
                None if ctx.identity else dh,
                total,
                weight,
                bias,
                mean,
                rstd,
                linear_bias,
                dropout_p,
                site,
                rng_state,
                ctx.x_dtype,
            )
        if ctx.x_dtype == total.dtype and dropout_threshold(dropout_p) == 0:
            dx = dresidual
        residual_dtype = ctx.residual_dtype
        return (
            dx,
            None if residual_dtype is None else dresidual.to(residual_dtype),
            dweight,
            None if bias is None else dbias,
            None if linear_bias is None else dlinear_bias,
            *(None,) * 5,
        )


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    linear_bias: torch.Tensor | None = None,
    eps: float,
    dropout_p: float = 0.0,
    site: int = 0,
    rng_state: torch.Tensor | None = None,
    return_sum: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """h = residual + dropout(x + linear_bias); y = LayerNorm(h)·weight + bias.

    The sublayer connection of Vaswani et al. 2017, section 5.4, with the normalisation of Ba et
    al. 2016, eq. 4. Sum and statistics are fp32, each output is rounded once.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        residual: `(T, C)` or None; may be wider than x (fp32 under autocast).
        weight: `(C,)`. bias: `(C,)` or None.
        linear_bias: `(C,)` or None, the bias of the linear layer that made x.
        eps: added to the variance.
        dropout_p: probability of dropping, in [0, 1]; 1 drops everything.
        site: which dropout of the model.
        rng_state: `(2,)` int64 on x's device, where dropout_p > 0.
        return_sum: return h too, for pre-norm models.

    Returns:
        y: `(T, C)` in the dtype `torch.nn.functional.layer_norm` gives h here (fp32 under CUDA
        autocast, else h's). h: `(T, C)` in the wider dtype of x and residual.

    Raises:
        ValueError: shapes that do not fit, dropout_p outside [0, 1], a wrong rng_state.
        NotImplementedError: a bound implementation cannot take these inputs.
        RuntimeError: in backward with create_graph=True.
    """
    _check(x, residual, weight, bias, linear_bias)
    if dropout_threshold(dropout_p) > 0:
        check_rng_state("add_layer_norm", rng_state, x.device)
    else:
        rng_state = None
    out_dtype = layer_norm_dtype(x, residual)
    peer = dispatch.peer("add_layer_norm")
    if peer is not None:
        h = _sum(x, linear_bias, residual, dropout_p, site, rng_state)
        y = peer(h.to(out_dtype), weight, bias, eps)
        return (y, h) if return_sum else y
    if dispatch.needs_grad(x, residual, weight, bias, linear_bias):
        y, h = _AddLayerNorm.apply(
            x, residual, weight, bias, linear_bias, eps, dropout_p, site, rng_state, out_dtype
        )
    else:
        options = (eps, dropout_p, site, rng_state, out_dtype, return_sum)
        y, h, _, _ = add_layer_norm_fwd(x, linear_bias, residual, weight, bias, *options)
    if not return_sum:
        return y
    return y, x if _is_identity(linear_bias, residual, dropout_p) else h


def _sum(x, linear_bias, residual, dropout_p, site, rng_state) -> torch.Tensor:
    """h by PyTorch's own autograd, for a peer that has the norm alone; the same elements drop."""
    threshold, keep = _keep_mask(x, dropout_p, site, rng_state)
    total = x if linear_bias is None else x + linear_bias
    if threshold > 0:
        total = torch.where(keep, total * dropout_scale(threshold), 0)
    return total if residual is None else residual + total


def layer_norm_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """Dtype of the normalised output: CUDA's autocast runs layer_norm in fp32, the CPU's leaves
    its dtype alone."""
    if x.device.type != "cpu" and dispatch.autocast_dtype(x.device) is not None:
        return torch.float32
    return _sum_dtype(x, residual)


def _check(x, residual, weight, bias, linear_bias) -> None:
    if x.dim() != 2:
        raise ValueError(f"add_layer_norm: x must have shape (T, C), got {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"add_layer_norm: residual must have shape {tuple(x.shape)} like x, got "
            f"{tuple(residual.shape)}"
        )
    for name, vector in (("weight", weight), ("bias", bias), ("linear_bias", linear_bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"add_layer_norm: {name} must have shape ({x.shape[-1]},), got "
                f"{tuple(vector.shape)}"
            )
