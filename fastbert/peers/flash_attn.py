"""`attention` by flash-attn (Dao-AILab/flash-attention), three generations of it.

They bring their own autograd and are called by their public function, the one thing their versions
have in common, so they stand beside the registered op and not inside it. Dropout is drawn from
their own stream (flash-attn 2; the others have none): masks are not those of docs/dropout.md.

Letters: Tq query rows, Tk key rows, N heads, D head dim, B sequences.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastbert import dispatch

DEVICES = ("cuda",)
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
"""Head dims are multiples of it, for 16-byte loads; flash-attn 2 pads by itself, the others
refuse."""


@dataclass(frozen=True)
class Generation:
    """One generation of flash-attn.

    Args:
        module: where its `flash_attn_varlen_func` is.
        install: the step that makes it importable.
        dropout: whether it has dropout.
        unbounded: what stands in `window_size` for a side without a bound.
    """

    module: str
    install: str
    dropout: bool
    unbounded: int | None


GENERATIONS = {
    "flash_attn": Generation(
        "flash_attn", 'pip install --no-build-isolation "fastbert[flash-attn]"', True, -1
    ),
    "flash_attn_3": Generation(
        "flash_attn_interface",
        "clone github.com/Dao-AILab/flash-attention and pip install --no-build-isolation ./hopper",
        False,
        -1,
    ),
    "flash_attn_4": Generation("flash_attn.cute", "pip install flash-attn-4", False, None),
}


def attention(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: list[int] | None,
    dropout_p: float,
    site: int,
) -> torch.Tensor:
    """`attention` of `fastbert.ops.attention` by generation `name`, differentiable.

    Args:
        q: `(Tq, N, D)`; k, v: `(Tk, N, D)`; bf16 or fp16, last dim contiguous.
        The others as the op's. `site` has no meaning in their random stream.

    Returns:
        `(Tq, N, D)`, 0 in idle rows, as are the gradients: flash-attn leaves both unwritten there.

    Raises:
        NotImplementedError: naming everything that stands against it, and the remedy.
    """
    options = (max_seqlen_q, max_seqlen_k, softmax_scale, window, dropout_p)
    reasons = not_supported(name, q, k, cu_seqlens_q, cu_seqlens_k, window, dropout_p)
    if reasons:
        raise NotImplementedError(
            f"attention: backend {name!r} cannot take {q.dtype} q {tuple(q.shape)} and k "
            f"{tuple(k.shape)} on {q.device}: {'; '.join(reasons)}"
        )
    dispatch.count("attention_fwd", name)
    idle_q, idle_k = _idle_rows(q, cu_seqlens_q), _idle_rows(k, cu_seqlens_k)
    q, k, v = _ClearIdleGradients.apply(q, k, v, idle_q, idle_k)
    return varlen_attention(name, q, k, v, cu_seqlens_q, cu_seqlens_k, *options).masked_fill(
        idle_q, 0
    )


flash_attn = functools.partial(attention, "flash_attn")
flash_attn_3 = functools.partial(attention, "flash_attn_3")
flash_attn_4 = functools.partial(attention, "flash_attn_4")


def not_supported(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window: list[int] | None,
    dropout_p: float,
) -> list[str]:
    """Why generation `name` cannot serve these arguments; empty if it can. Reads nothing back."""
    generation, reasons = GENERATIONS[name], []
    missing = why_not_importable(name)
    if missing is not None:
        reasons.append(missing)
    if q.device.type not in DEVICES:
        reasons.append("it takes CUDA tensors")
    if q.dtype not in DTYPES:
        reasons.append("it takes bf16 and fp16 (autocast gives them)")
    if q.shape[-1] > MAX_HEAD_DIM:
        reasons.append(f"the head dim is {q.shape[-1]}, it takes at most {MAX_HEAD_DIM}")
    if q.numel() == 0 or k.numel() == 0 or cu_seqlens_q.shape[0] < 2:
        reasons.append("it takes at least one row, and one sequence")
    if dropout_p > 0 and not generation.dropout:
        reasons.append(f"it has no dropout and dropout_p is {dropout_p}; flash_attn has")
    if dropout_p >= 1:
        reasons.append(f"it takes dropout_p below 1, got {dropout_p}")
    if window is not None and cu_seqlens_q.data_ptr() != cu_seqlens_k.data_ptr():
        reasons.append(
            "it aligns a window with the last rows where queries and keys differ in number, "
            "fastbert with the first (give both the same cu_seqlens)"
        )
    return reasons


def why_not_importable(name: str) -> str | None:
    """The reason and the step that mends it; None where generation `name` is there."""
    try:
        _function(name)
    except (ImportError, AttributeError) as error:
        generation = GENERATIONS[name]
        return f"{generation.module} is not importable ({error}); {generation.install}"
    return None


def _function(name: str) -> Callable:
    return importlib.import_module(GENERATIONS[name].module).flash_attn_varlen_func


def varlen_attention(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: list[int] | None,
    dropout_p: float,
) -> torch.Tensor:
    """The call itself, without checks and for rows none of which is idle: what benchmarks time.

    Backward is asked for in its deterministic form, as fastbert's own always is.
    """
    generation, head_dim = GENERATIONS[name], q.shape[-1]
    rest = -head_dim % HEAD_DIM_STEP
    if rest:
        q, k, v = (F.pad(t, (0, rest)) for t in (q, k, v))
    longest = max(max_seqlen_q, max_seqlen_k)
    options = {"dropout_p": dropout_p} if generation.dropout else {}
    out = _function(name)(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=False,
        window_size=tuple(
            side if 0 <= side < longest else generation.unbounded for side in window or (-1, -1)
        ),
        deterministic=True,
        **options,
    )
    # Some versions of 3 and 4 return softmax_lse too, unasked.
    out = out[0] if isinstance(out, tuple) else out
    return out[..., :head_dim]


def _idle_rows(rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """bool `(rows, 1, 1)`: those behind the last sequence."""
    return (torch.arange(rows.shape[0], device=rows.device) >= cu_seqlens[-1])[:, None, None]


class _ClearIdleGradients(torch.autograd.Function):
    """q, k and v unchanged; their gradients 0 in idle rows, whatever was left there."""

    @staticmethod
    def forward(ctx, q, k, v, idle_q, idle_k):
        ctx.save_for_backward(idle_q, idle_k)
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dq, dk, dv):
        dispatch.refuse_second_order("attention")
        idle_q, idle_k = ctx.saved_tensors
        return (
            dq.masked_fill(idle_q, 0),
            dk.masked_fill(idle_k, 0),
            dv.masked_fill(idle_k, 0),
            None,
            None,
        )
