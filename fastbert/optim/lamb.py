"""LAMB: Adam's direction, rescaled for each tensor to the size of its weights.

Source: You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes",
algorithm 2, with the scaling function of the weights' norm being the norm itself.
"""

from typing import Literal

import torch

from fastbert import dispatch
from fastbert.optim.device_skipping import DeviceSkippingOptimizer, moved_average_
from fastbert.peers import apex


class LAMB(DeviceSkippingOptimizer):
    """For every tensor x with gradient g at step t (algorithm 2):

        m = β1 m + (1 - β1) g                 v = β2 v + (1 - β2) g²
        r = m / (1 - β1^t) / (sqrt(v / (1 - β2^t)) + ε) + λ x
        x = x - lr · |x| / |r| · r

    The ratio |x| / |r| is 1 where either norm is 0, and in groups without decay, as the authors
    leave biases and norms out of both.

    Args:
        params: tensors or groups, fp32 (`fastbert.optim.decay_groups`).
        lr, betas, eps, weight_decay: lr, (β1, β2), ε, λ.
        adapt_without_decay: use the ratio in groups without decay, too.
        implementation: "fastbert", lists of tensors through torch; "apex", NVIDIA apex' kernel,
            which reads and writes each tensor once and takes the parameters of a group to have been
            updated equally often; "auto", apex where it can.

    Raises:
        ValueError: settings out of range, parameters in half precision, an unknown implementation.
        NotImplementedError: "apex" where it cannot, with the reasons.
    """

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adapt_without_decay: bool = False,
        implementation: Literal["auto", "fastbert", "apex"] = "auto",
    ):
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adapt_without_decay=adapt_without_decay,
        )
        self._uses_apex = self._chosen(implementation)

    def _chosen(self, implementation: str) -> bool:
        """Whether apex' kernel is used."""
        if implementation not in ("auto", "fastbert", "apex"):
            raise ValueError(
                f"implementation must be auto, fastbert or apex, got {implementation!r}"
            )
        if implementation == "fastbert":
            return False
        reasons = apex.why_no_lamb([p for group in self.param_groups for p in group["params"]])
        if reasons and implementation == "apex":
            raise NotImplementedError(f"LAMB: apex cannot: {'; '.join(reasons)}")
        return not reasons

    def _update(self, group, params, grads, states, skip):
        if self._uses_apex:
            apex.lamb_(
                params,
                grads,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=states[0]["step"],
                skip=skip,
                adapt_without_decay=group["adapt_without_decay"],
            )
            return
        dispatch.count("lamb", "fastbert")
        beta1, beta2 = group["betas"]
        weight_decay = group["weight_decay"]
        steps = [state["step"] for state in states]
        moments = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        moved_average_(moments, grads, [torch.full_like(t, beta1) for t in steps], skip)
        squared = torch._foreach_mul(grads, grads)
        moved_average_(squares, squared, [torch.full_like(t, beta2) for t in steps], skip)

        # A first step that is skipped has t = 0; its update is multiplied by 0 below.
        times = torch._foreach_clamp_min(steps, 1.0)
        scales = torch._foreach_div(squares, [1 - beta2**t for t in times])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(moments, [1 - beta1**t for t in times])
        torch._foreach_div_(updates, scales)
        if weight_decay:
            torch._foreach_add_(updates, params, alpha=weight_decay)

        # Chosen behind the ratios: that of weights whose norm overflows is not finite.
        if weight_decay or group["adapt_without_decay"]:
            ratios = _trust_ratios(params, updates)
            factors = [torch.where(skip, 0.0, -group["lr"] * ratio) for ratio in ratios]
        else:
            factors = [torch.where(skip, 0.0, -group["lr"])] * len(params)
        torch._foreach_mul_(updates, factors)
        torch._foreach_add_(params, updates)


def _trust_ratios(params, updates) -> list[torch.Tensor]:
    norms = zip(torch._foreach_norm(params), torch._foreach_norm(updates), strict=True)
    return [torch.where((x > 0) & (r > 0), x / r, 1.0) for x, r in norms]
