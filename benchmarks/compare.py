"""Whether two training steps may be timed side by side: same loss, same gradients, no padding."""

import torch

from fastbert.testing.compare import relative_l2
from fastbert.testing.models import assert_packed, gradients


def check_training(
    models: dict, inputs: dict, tolerance: float, counter: str = "bert_model"
) -> None:
    """Refuses to time models whose loss or gradients differ, or of which ours ran on padded rows.

    In fp32 and without dropout, the state in which both must agree; leaves the models in train.

    Args:
        models: `{"fastbert": model, "transformers": model}` with equal fp32 weights.
        inputs: a batch with labels.
        tolerance: largest relative L2 distance of the loss, and of all gradients taken together.
        counter: what our forwards are counted under.

    Raises:
        AssertionError: naming what differs and by how much.
    """
    with assert_packed(counter):
        loss, gradient = _loss_and_gradient(models["fastbert"], inputs)
    expected_loss, expected_gradient = _loss_and_gradient(models["transformers"], inputs)
    for name, actual, expected in (
        ("loss", loss, expected_loss),
        ("gradient", gradient, expected_gradient),
    ):
        error = relative_l2(actual, expected)
        # Written so that NaN is refused too.
        if not error <= tolerance:
            raise AssertionError(f"{name}: relative error {error:.2e}, allowed {tolerance:.0e}")


def _loss_and_gradient(model, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and every parameter's gradient by name in one vector (0 where there is none)."""
    loss = model.eval()(**inputs).loss
    loss.backward()
    by_name = gradients(model)
    parameters = dict(model.named_parameters())
    parts = [
        (torch.zeros_like(parameters[n]) if by_name[n] is None else by_name[n]).flatten()
        for n in sorted(by_name)
    ]
    model.zero_grad(set_to_none=True)
    model.train()
    return loss.detach(), torch.cat(parts)
