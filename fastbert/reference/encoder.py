"""All layers of a post-norm encoder in plain PyTorch: the specification of `encoder`.

Letters: T packed rows, N heads, C hidden, F intermediate, L layers.
"""

import torch
import torch.nn.functional as F

from fastbert.reference.add_layer_norm import add_layer_norm_reference
from fastbert.reference.attention import attention_reference
from fastbert.reference.linear import linear_reference


def encoder_reference(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    norms: list[torch.Tensor],
    packed: list[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    num_heads: int,
    softmax_scale: float,
    eps: float,
    approximate: str,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y = LN(x' + FFN(x')), x' = LN(x + Attention(x)), L times over (Devlin et al. 2019, section 3;
    Vaswani et al. 2017, section 3).

    8·T·C² + 4·T·C·F FLOPs a layer beside attention's. Every projection reads and gives
    compute_dtype; the sum with a residual and its norm have the dtype of x.

    Args:
        x: `(T, C)`.
        weights: six a layer: query, key, value and attention output `(C, C)`, intermediate
            `(F, C)`, output `(C, F)`.
        biases: theirs.
        norms: four a layer, `(C,)`: weight and bias of the norm behind the attention, and of the
            one behind the feed-forward network.
        packed: passed over here.
        cu_seqlens_q: `(B+1,)`, first row of each sequence.
        cu_seqlens_k: `(B+1,)`, the same for the rows that are attended to alone, the first of each
            sequence; one without any gets nothing from the attention.
        num_heads: N. softmax_scale: factor on the scores. eps: of the norms.
        approximate: `none` or `tanh`, the form of GELU.
        compute_dtype: of the projections and the attention; None: that of x.

    Returns:
        `(T, C)`, in the dtype of x.
    """
    x = x.clone() if not biases else x
    compute_dtype = compute_dtype or x.dtype
    keys = _key_rows(cu_seqlens_q, cu_seqlens_k)
    for layer in range(len(biases) // 6):
        w, b = (tensors[6 * layer : 6 * layer + 6] for tensors in (weights, biases))
        weight_in, bias_in, weight_out, bias_out = norms[4 * layer : 4 * layer + 4]
        qkv = linear_reference(x.to(compute_dtype), w[:3], b[:3])
        q, k, v = qkv.unflatten(1, (3, num_heads, -1)).unbind(1)
        context, _ = attention_reference(
            q, k[keys], v[keys], cu_seqlens_q, cu_seqlens_k, softmax_scale, None, 0, None
        )
        projected = linear_reference(context.flatten(1), w[3:4], b[3:4])
        x = _add_norm(projected, x, weight_in, bias_in, eps)
        hidden = linear_reference(x.to(compute_dtype), w[4:5], b[4:5])
        hidden = F.gelu(hidden, approximate=approximate)
        x = _add_norm(linear_reference(hidden, w[5:], b[5:]), x, weight_out, bias_out, eps)
    return x


def _key_rows(cu_seqlens_q, cu_seqlens_k) -> torch.Tensor:
    """`(Tk,)` rows that are attended to."""
    shifts = (cu_seqlens_q - cu_seqlens_k)[:-1].long()
    shifts = shifts.repeat_interleave(cu_seqlens_k.diff().long())
    return torch.arange(len(shifts), device=shifts.device) + shifts


def _add_norm(x, residual, weight, bias, eps) -> torch.Tensor:
    dtype = residual.dtype
    return add_layer_norm_reference(x, None, residual, weight, bias, eps, 0, None, dtype, False)[0]
