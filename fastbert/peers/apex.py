"""NVIDIA apex: its FusedLayerNorm as the norm of `add_layer_norm`.

The package index has another project under the name apex. NVIDIA's is told by `amp_C`, the
extension that its build with CUDA brings, and without which it has no fused kernels.

Letters: T rows, C features.
"""

import importlib
import importlib.util

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
