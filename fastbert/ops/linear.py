"""`linear`: x Wᵀ + b in the dtype of x, whatever the weight's.

Letters: T rows, C inputs, F outputs.
"""

from collections.abc import Sequence

import torch

from fastbert import dispatch
from fastbert.ops.kernel_inputs import dtype_reasons
from fastbert.reference.linear import linear_bwd_reference, linear_reference


def _fwd_fake(x, weights, biases, packed):
    return x.new_empty((x.shape[0], sum(w.shape[0] for w in weights)))


def _bwd_fake(dy, x, weights, biases, need_dx, need_dweights, dresidual=None):
    like = x if dresidual is None else dresidual
    return (
        like.new_empty(x.shape) if need_dx else x.new_empty(0),
        [torch.empty_like(w) for w in weights] if need_dweights else [],
        [torch.empty_like(b) for b in biases],
    )


def _fwd_kernel_reasons(x, weights, *_) -> list[str]:
    return dtype_reasons(x=x, **{f"weight {i}": w for i, w in enumerate(weights)})


def _bwd_kernel_reasons(
    dy, x, weights, biases, need_dx, need_dweights, dresidual=None
) -> list[str]:
    return dtype_reasons(dy=dy, dresidual=dresidual) + _fwd_kernel_reasons(x, weights)


linear_fwd = dispatch.register_op(
    "linear_fwd",
    "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? packed) -> Tensor",
    room="linear",
    fake=_fwd_fake,
    reference=linear_reference,
    cpu=True,
    not_supported={"cpu": _fwd_kernel_reasons},
)
linear_bwd = dispatch.register_op(
    "linear_bwd",
    "(Tensor dy, Tensor x, Tensor[] weights, Tensor[] biases, bool need_dx, bool need_dweights, "
    "Tensor? dresidual=None) -> (Tensor dx, Tensor[] dweights, Tensor[] dbiases)",
    room="linear",
    fake=_bwd_fake,
    reference=linear_bwd_reference,
    cpu=True,
    not_supported={"cpu": _bwd_kernel_reasons},
)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, return_input, count, *parameters):
        weights, biases = list(parameters[:count]), list(parameters[count:])
        rows = autocast_input(x)
        ctx.save_for_backward(rows, *parameters)
        ctx.count = count
        ctx.input_dtype = x.dtype
        ctx.binding = dispatch.current_binding()
        ctx.set_materialize_grads(False)
        y = linear_fwd(rows, weights, biases, None)
        return (y, x.view_as(x)) if return_input else y

    @staticmethod
    def backward(ctx, dy, dresidual=None):
        dispatch.refuse_second_order("linear")
        x, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        needs = ctx.needs_input_grad
        if dy is None:
            return dresidual, *(None,) * (len(needs) - 1)
        first_bias = 3 + ctx.count
        need_dweights, need_dbiases = any(needs[3:first_bias]), any(needs[first_bias:])
        with dispatch.bound(ctx.binding):
            dx, dweights, dbiases = linear_bwd(
                dy, x, weights, biases if need_dbiases else [], needs[0], need_dweights, dresidual
            )
        gradients = [
            *(dweights if need_dweights else [None] * len(weights)),
            *(dbiases if need_dbiases else [None] * len(biases)),
        ]
        wanted = zip(gradients, needs[3:], strict=True)
        return (
            dx.to(ctx.input_dtype) if needs[0] else None,
            None,
            None,
            *(g if need else None for g, need in wanted),
        )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    packed: torch.Tensor | None = None,
    return_input: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x Wᵀ + b, as `torch.nn.functional.linear`; of several weights side by side.

    Products are summed in fp32 and rounded once. Under autocast x is cast as
    `torch.nn.functional.linear` casts it; a weight is read as it is and rounded on the way, and its
    gradient is not rounded to autocast's dtype.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        weight: `(F, C)`, or several such, stacked. bias: `(F,)`, or one per weight, or None.
        packed: the weights as `pack_weights` gives them, where no gradient is wanted.
        return_input: return x too, for a residual connection: what flows back through it is added
            to the input's gradient in the product's last step, not by a pass of its own.

    Returns:
        `(T, F)`, F of all weights together; the dtype of x (of autocast). With return_input also x.

    Raises:
        ValueError: shapes that do not fit.
        RuntimeError: in backward with create_graph=True.
    """
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    biases = [bias] if isinstance(bias, torch.Tensor) else list(bias or ())
    for index, matrix in enumerate(weights):
        check_linear("linear", x, matrix, biases[index] if index < len(biases) else None)
    if biases and len(biases) != len(weights):
        raise ValueError(f"linear: got {len(weights)} weights, but {len(biases)} biases")
    if dispatch.needs_grad(x, *weights, *biases):
        return _Linear.apply(x, return_input, len(weights), *weights, *biases)
    y = linear_fwd(autocast_input(x), weights, biases, packed)
    return (y, x) if return_input else y


def pack_weights(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Weights `(F_i, C)` as the matmul of inputs of `dtype` reads them.

    Bytes `(n,)` for the C++ matmul, else the weights stacked in `dtype`; None where they are that
    already. What was packed for one arithmetic is not used under another (another backend or
    instruction set, another float32 matmul precision).
    """
    like = weights[0].new_empty((0, weights[0].shape[1]), dtype=dtype)
    op = dispatch.OPS["linear_fwd"]
    if dispatch.choose(op, like.device, (like, weights)) == "cpu":
        return torch.ops.fastbert.pack_linear_weights([w.detach() for w in weights], dtype)
    if len(weights) == 1 and weights[0].dtype == dtype:
        return None
    return torch.cat([w.detach().to(dtype) for w in weights])


QUANTIZATIONS = ("weight_only", "dynamic")


def quantize_weights(weights: Sequence[torch.Tensor], mode: str) -> torch.Tensor:
    """Weights `(F_i, C)` in int8, as the C++ matmul of inputs of any dtype reads them.

    The arithmetic is that of `fastbert.reference.quantized_linear`. A row of x with an infinity or
    a NaN gives NaN; weights have to be finite.

    Args:
        weights: fp32/bf16/fp16, on a CPU, with the same number of columns.
        mode: `weight_only` or `dynamic`.

    Returns:
        Bytes `(n,)`, for `packed` of the registered op `linear_fwd` beside no weights.

    Raises:
        ValueError: unknown mode, no weights, other shapes, more than 133,144 columns.
        RuntimeError: the C++ kernels are not there.
    """
    check_quantization("quantize_weights", mode)
    if not weights:
        raise ValueError("quantize_weights: got no weights")
    op, device = dispatch.OPS["linear_fwd"], weights[0].device
    reasons = dispatch.not_supported_reasons(op, "cpu", device, (weights[0], weights))
    if reasons:
        raise RuntimeError(f"quantize_weights: needs the C++ kernels: {'; '.join(reasons)}")
    detached = [w.detach() for w in weights]
    return torch.ops.fastbert.quantize_linear_weights(detached, mode == "dynamic")


def check_quantization(name: str, mode: str) -> None:
    """Raises ValueError unless `mode` is known."""
    if mode not in QUANTIZATIONS:
        raise ValueError(f"{name}: mode must be 'weight_only' or 'dynamic', got {mode!r}")


def autocast_input(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype autocast gives a matmul on its device; as it is without autocast."""
    dtype = dispatch.autocast_dtype(x.device)
    return x if dtype is None or not x.is_floating_point() else x.to(dtype)


def check_linear(name, x, weight, bias) -> None:
    """Raises ValueError unless x `(T, C)`, weight `(F, C)` and bias `(F,)` fit."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{name}: x must be (T, C) and weight (F, C), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}"
        )
