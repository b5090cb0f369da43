"""`encoder`: all layers of a post-norm encoder on packed rows by one call, for inference.

Letters: T packed rows, N heads, C hidden, F intermediate, L layers.
"""

from collections.abc import Sequence

import torch

from fastbert import dispatch
from fastbert.ops.attention import checked_lengths
from fastbert.ops.bias_gelu import check_approximate
from fastbert.ops.kernel_inputs import dtype_reasons, width_reasons
from fastbert.ops.linear import check_linear, pack_weights, quantize_weights
from fastbert.reference.encoder import encoder_reference

LINEARS, NORMS = 6, 4
"""Weights and biases of a layer, and vectors of its norms."""
PACKED = (
    ("qkv", slice(0, 3)),
    ("attention_output", slice(3, 4)),
    ("intermediate", slice(4, 5)),
    ("output", slice(5, 6)),
)
"""What a layer's weights are packed into, and which of them are in each."""


def _fwd_fake(x, *_):
    return x.new_empty(x.shape)


def _fwd_kernel_reasons(x, weights, biases, norms, *_) -> list[str]:
    return dtype_reasons(x=x) + _unknown_dtypes([*weights, *biases, *norms]) + width_reasons(x)


def _unknown_dtypes(parameters) -> list[str]:
    by_dtype = {t.dtype: t for t in parameters}
    return dtype_reasons(**{f"a {dtype} parameter": t for dtype, t in by_dtype.items()})


encoder_fwd = dispatch.register_op(
    "encoder_fwd",
    "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] norms, Tensor[] packed, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int num_heads, float softmax_scale, float eps, "
    "str approximate, ScalarType? compute_dtype=None) -> Tensor",
    room="encoder",
    fake=_fwd_fake,
    reference=encoder_reference,
    cpu=True,
    not_supported={"cpu": _fwd_kernel_reasons},
)


def encoder(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    *,
    num_heads: int,
    softmax_scale: float,
    eps: float,
    approximate: str,
    packed: Sequence[torch.Tensor] | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """L layers y = LN(x' + FFN(x')), x' = LN(x + Attention(x)), Devlin et al. 2019, section 3.

    Gives the bits that `linear`, `attention_packed_qkv`, `linear_gelu` and `add_layer_norm` give
    one after the other, without gradients and dropout; with compute_dtype those they give under
    autocast to it. Not affected by autocast itself.

    Args:
        x: `(T, C)`, fp32/bf16/fp16.
        weights: six a layer: query, key, value and attention output `(C, C)`, intermediate
            `(F, C)`, output `(C, F)`.
        biases: theirs.
        norms: four a layer, `(C,)`: weight and bias of the norm behind the attention, and of the
            one behind the feed-forward network.
        cu_seqlens: `(B+1,)` int32, first row of each sequence.
        num_heads: N. softmax_scale: factor on the scores. eps: of the norms.
        approximate: `none` or `tanh`, the form of GELU.
        packed: what `pack_layers` gives for the weights and compute_dtype; None: packed now.
            The registered op takes what `quantize_layers` gives, too, beside no weights.
        cu_seqlens_k: `(B+1,)` int32, as cu_seqlens of the rows that are attended to alone, the
            first of each sequence; None: all are. A sequence without any gets nothing from the
            attention.
        compute_dtype: of the projections and the attention, where x, to which they are added, is
            fp32; None: that of x.

    Returns:
        `(T, C)`, in the dtype of x.

    Raises:
        ValueError: shapes or numbers of tensors that do not fit, or an unknown `approximate`; a
            compute_dtype that is not that of x, which is not fp32.
        NotImplementedError: gradients are recorded and wanted.
    """
    check_approximate("encoder", approximate)
    _check_layers(x, weights, biases, norms, num_heads)
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    _check_sequences(cu_seqlens, cu_seqlens_k, len(x))
    if dispatch.needs_grad(x, *weights, *biases, *norms):
        raise NotImplementedError(
            "encoder: computes no gradients; call it under torch.no_grad(), or the layers' own ops"
        )
    compute_dtype = compute_dtype or x.dtype
    if compute_dtype != x.dtype and x.dtype != torch.float32:
        raise ValueError(
            f"encoder: x must be fp32 or {compute_dtype}, which is compute_dtype, got {x.dtype}"
        )
    packed = pack_layers(weights, compute_dtype) if packed is None else list(packed)
    numbers = (num_heads, softmax_scale, eps, approximate, compute_dtype)
    parameters = (list(weights), list(biases), list(norms), packed)
    return encoder_fwd(x, *parameters, cu_seqlens, cu_seqlens_k, *numbers)


def pack_layers(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The layers' weights as `pack_weights` gives them, four tensors a layer; none where the C++
    matmul does not run."""
    layers = [weights[i : i + LINEARS] for i in range(0, len(weights), LINEARS)]
    found = [pack_weights(layer[part], dtype) for layer in layers for _, part in PACKED]
    return found if all(t is not None and t.dtype == torch.uint8 for t in found) else []


def quantize_layers(weights: Sequence[torch.Tensor], mode: str) -> list[torch.Tensor]:
    """The layers' weights as `quantize_weights` gives them, four tensors a layer."""
    layers = [weights[i : i + LINEARS] for i in range(0, len(weights), LINEARS)]
    return [quantize_weights(layer[part], mode) for layer in layers for _, part in PACKED]


def _check_sequences(cu_seqlens, cu_seqlens_k, rows) -> None:
    lengths, keys = (
        checked_lengths("encoder", name, starts, rows)
        for name, starts in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k))
    )
    if len(lengths) != len(keys) or any(k > n for n, k in zip(lengths, keys, strict=True)):
        raise ValueError(
            "encoder: cu_seqlens_k must count as many sequences as cu_seqlens and no more rows of "
            f"each, got lengths {keys[1:]} and {lengths[1:]}"
        )


def _check_layers(x, weights, biases, norms, num_heads) -> None:
    layers = len(biases) // LINEARS
    counts = (len(weights), len(biases), len(norms))
    if counts != (layers * LINEARS, layers * LINEARS, layers * NORMS):
        raise ValueError(
            f"encoder: a layer has {LINEARS} weights, {LINEARS} biases and {NORMS} vectors of "
            f"norms, got {counts[0]}, {counts[1]} and {counts[2]}"
        )
    if x.dim() != 2 or num_heads < 1 or x.shape[1] % num_heads:
        raise ValueError(
            f"encoder: x must be (T, C) with C a multiple of num_heads={num_heads}, got "
            f"{tuple(x.shape)}"
        )
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        # The last reads what the one before it gives.
        inputs = x.shape[1] if index % LINEARS < LINEARS - 1 else len(biases[index - 1])
        check_linear("encoder", x.new_empty((0, inputs)), weight, bias)
        if index % LINEARS != LINEARS - 2 and weight.shape[0] != x.shape[1]:
            raise ValueError(
                f"encoder: weight {index} must have {x.shape[1]} rows, got {tuple(weight.shape)}"
            )
    for index, vector in enumerate(norms):
        if vector.shape != x.shape[1:]:
            raise ValueError(
                f"encoder: norms[{index}] must have shape ({x.shape[1]},), got "
                f"{tuple(vector.shape)}"
            )
