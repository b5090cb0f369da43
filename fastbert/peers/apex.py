"""NVIDIA apex: its FusedLayerNorm as the norm of `add_layer_norm`, its LAMB kernel as ours.

The package index has another project under the name apex. NVIDIA's is told by `amp_C`, the
extension that its build with CUDA brings, and without which it has no fused kernels.

Letters: T rows, C features.
"""

import importlib
import importlib.util
from collections.abc import Sequence

import torch

from fastbert import dispatch

DEVICES = ("cuda",)
INSTALL = (
    "clone github.com/NVIDIA/apex and, in it, "
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation ."
)


def why_not_importable() -> str | None:
    """The reason and the step that mends it; None where NVIDIA's apex is there with its kernels."""
    try:
        importlib.import_module("amp_C")
    except ImportError as error:
        if importlib.util.find_spec("apex") is None:
            return f"NVIDIA apex is not installed; {INSTALL}"
        return (
            "the apex that is installed is not NVIDIA's, or was built without its CUDA extensions "
            f"({error}); uninstall it, {INSTALL}"
        )
    return None


def layer_norm(
    h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm(h)·weight + bias by apex's fused kernel, differentiable.

    Args:
        h: `(T, C)`. weight, bias: `(C,)` in h's dtype.
        eps: added to the variance.

    Raises:
        NotImplementedError: naming everything that stands against it, and the remedy.
    """
    reasons = not_supported(h, weight, bias)
    if reasons:
        raise NotImplementedError(
            f"add_layer_norm: backend 'apex' cannot take {h.dtype} rows {tuple(h.shape)} on "
            f"{h.device}: {'; '.join(reasons)}"
        )
    dispatch.count("add_layer_norm_fwd", "apex")
    function = importlib.import_module("apex.normalization.fused_layer_norm")
    # Inside autocast apex would round fp32 rows to half precision first.
    with torch.autocast(h.device.type, enabled=False):
        return function.fused_layer_norm_affine(
            input=h, weight=weight, bias=bias, normalized_shape=(h.shape[-1],), eps=eps
        )


def not_supported(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[str]:
    """Why apex cannot serve these arguments; empty if it can."""
    reasons = []
    missing = why_not_importable()
    if missing is not None:
        reasons.append(missing)
    if h.device.type not in DEVICES:
        reasons.append("it takes CUDA tensors")
    if bias is None:
        reasons.append("it needs a bias")
    elif not h.dtype == weight.dtype == bias.dtype:
        reasons.append(
            f"it takes rows, weight and bias of one dtype, got {h.dtype}, {weight.dtype} and "
            f"{bias.dtype}"
        )
    if h.numel() == 0:
        reasons.append("it takes at least one row")
    return reasons


def why_no_lamb(params: Sequence[torch.Tensor]) -> list[str]:
    """Why apex cannot update these parameters by LAMB; empty if it can."""
    missing = why_not_importable()
    if missing is not None:
        return [missing]
    reasons = []
    if not hasattr(importlib.import_module("amp_C"), "multi_tensor_lamb_mp"):
        reasons.append(f"this apex has no amp_C.multi_tensor_lamb_mp; {INSTALL}")
    if any(p.device.type not in DEVICES for p in params):
        reasons.append("it takes CUDA tensors")
    if any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in params):
        reasons.append("it takes whole tensors, no shards")
    if any(p.dtype != torch.float32 for p in params):
        reasons.append("it keeps weights in fp32")
    return reasons


def lamb_(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    moments: Sequence[torch.Tensor],
    squares: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: torch.Tensor,
    skip: torch.Tensor,
    adapt_without_decay: bool,
) -> None:
    """`fastbert.optim.LAMB`'s update in place, by the kernel of apex' FusedMixedPrecisionLamb: the
    one that reads rate, step and whether to skip from the device.

    Args:
        params, grads, moments, squares: lists of fp32 tensors of equal shapes, changed but for
            grads.
        lr, betas, eps, weight_decay, adapt_without_decay: as LAMB has them.
        step: scalar, this update's number from 1, of all params.
        skip: scalar bool, where True nothing changes.
    """
    dispatch.count("lamb", "apex")
    device = params[0].device
    one, none = torch.ones(1, device=device), torch.zeros(1, device=device)
    apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    apply(
        importlib.import_module("amp_C").multi_tensor_lamb_mp,
        skip.to(torch.int32).reshape(1),
        [list(grads), list(params), list(moments), list(squares)],
        torch.as_tensor(lr, dtype=torch.float32, device=device).reshape(1),
        *betas,
        eps,
        step.to(torch.int32).reshape(1),
        1,  # corrects the moments' bias
        weight_decay,
        1,  # averages gradients: m gets (1 - beta1) of them
        1,  # decoupled decay
        # Gradients are clipped before: of norm 0 they are below any bound.
        none,
        one,
        adapt_without_decay,
        skip.float().reshape(1),
        # What gradients are multiplied by; they were unscaled before.
        one,
    )
