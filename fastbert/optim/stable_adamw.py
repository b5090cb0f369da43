"""StableAdamW: AdamW whose steps shrink where the second moment lags behind the gradients.

Source: Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language
models", algorithm 2, after AdaFactor's update clipping (Shazeer and Stern 2018, section 6).
"""

import torch

from fastbert.optim.device_skipping import DeviceSkippingOptimizer, moved_average_


class StableAdamW(DeviceSkippingOptimizer):
    """For every tensor x with gradient g at step t (algorithm 2):

        b1 = β1 (1 - β1^(t-1)) / (1 - β1^t)   b2 = β2 (1 - β2^(t-1)) / (1 - β2^t)
        m = b1 m + (1 - b1) g                 v = b2 v + (1 - b2) g²
        η = lr / max(1, sqrt(mean(g² / max(v, ε²))))
        x = x - η λ x - η m / (sqrt(v) + ε)

    Args:
        params: tensors or groups, fp32 (`fastbert.optim.decay_groups`).
        lr, betas, eps, weight_decay: lr, (β1, β2), ε, λ.

    Raises:
        ValueError: settings out of range, parameters in half precision.
    """

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _update(self, group, params, grads, states, skip):
        beta1, beta2 = group["betas"]
        eps = group["eps"]
        times = torch._foreach_clamp_min([state["step"] for state in states], 1.0)
        moments = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        moved_average_(moments, grads, [_debiased(beta1, t) for t in times], skip)
        squared = torch._foreach_mul(grads, grads)
        moved_average_(squares, squared, [_debiased(beta2, t) for t in times], skip)

        torch._foreach_div_(squared, torch._foreach_clamp_min(squares, eps**2))
        rates = [
            torch.where(skip, 0.0, -group["lr"] / share.mean().sqrt().clamp(min=1))
            for share in squared
        ]
        scales = torch._foreach_sqrt(squares)
        torch._foreach_add_(scales, eps)
        updates = torch._foreach_div(moments, scales)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        torch._foreach_mul_(updates, rates)
        torch._foreach_add_(params, updates)


def _debiased(beta: float, t: torch.Tensor) -> torch.Tensor:
    return beta * (1 - beta ** (t - 1)) / (1 - beta**t)
