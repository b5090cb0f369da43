"""What LAMB and StableAdamW share: state, lists of tensors, and skipping without asking the host.

torch's fused optimizers leave weights and state alone where the attribute `found_inf` is 1, so that
a step whose gradients overflowed needs no answer from the device. Here the gradients are replaced
by 0 and the coefficients of the update by those of no update, all on the device.
"""

import torch


class DeviceSkippingOptimizer(torch.optim.Optimizer):
    """Runs `_update` on the parameters of each group that have gradients.

    `_step_supports_amp_scaling` tells `torch.amp.GradScaler` and `GraphedStep` that `grad_scale`
    and `found_inf`, attributes they set for the step, are heeded.
    """

    _step_supports_amp_scaling = True

    def __init__(self, params, *, lr, betas: tuple[float, float], eps: float, weight_decay, **more):
        if not isinstance(lr, torch.Tensor) and lr < 0:
            raise ValueError(f"lr must be 0 or more, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas}")
        if eps <= 0:
            raise ValueError(f"eps must be above 0, got {eps}")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **more}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype not in (torch.float32, torch.float64):
                    raise ValueError(
                        f"{type(self).__name__} keeps weights in fp32, got a parameter of "
                        f"{parameter.dtype}; train in half precision by torch.autocast"
                    )

    @torch.no_grad()
    def step(self, closure=None):
        """One update; the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            skip = self._skip(params[0].device)
            grads = [self._gradient(p.grad, skip) for p in params]
            states = [self._state(p) for p in params]
            # One tensor for each: a single one for all would be read by the host.
            counted = [(~skip).float()] * len(states)
            torch._foreach_add_([state["step"] for state in states], counted)
            self._update(group, params, grads, states, skip)
        return loss

    def _update(self, group: dict, params, grads, states, skip: torch.Tensor) -> None:
        """Changes params and states in place; where `skip` is True, by nothing."""
        raise NotImplementedError

    def _skip(self, device: torch.device) -> torch.Tensor:
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return torch.zeros((), dtype=torch.bool, device=device)
        return found_inf.reshape(()).to(device) != 0

    def _gradient(self, grad: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            grad = grad / scale.to(grad.device)
        return grad.masked_fill(skip, 0)

    def _state(self, parameter: torch.Tensor) -> dict:
        state = self.state[parameter]
        if not state:
            # On the device, as torch's capturable optimizers keep it.
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def moved_average_(averages, values, betas, skip: torch.Tensor) -> None:
    """average = beta · average + (1 - beta) · value, tensor by tensor; unchanged where skipped.

    Args:
        averages, values: lists of tensors of equal shapes; values finite.
        betas: one scalar tensor for each.
        skip: scalar bool tensor.
    """
    kept = [torch.where(skip, 1.0, beta) for beta in betas]
    torch._foreach_mul_(averages, kept)
    torch._foreach_add_(averages, torch._foreach_mul(values, [1 - k for k in kept]))
