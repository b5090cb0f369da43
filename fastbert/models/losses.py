"""Denominators of the losses: what transformers' Trainer expects of a model.

Under gradient accumulation Trainer hands each micro-batch the number of labels of the whole step
and does not divide the loss itself, because transformers' heads accept keyword arguments; a head
that ignores the number trains with n times the gradient (huggingface/transformers#47688).
"""

import torch

from fastbert.padding import IGNORE_INDEX


def mean_loss(
    losses: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """Sum of per-row losses over the number of labels; 0, with zero gradients, for no label.

    Args:
        losses: `(P,)` fp32, 0 at rows without a label.
        labels: `(P,)` int64.
        num_items_in_batch: denominator given by the caller, or None.
    """
    if num_items_in_batch is None:
        return losses.sum() / (labels != IGNORE_INDEX).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(losses.device)
    return losses.sum() / num_items_in_batch


def rescaled_loss(
    loss: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """A mean over this batch's labels turned into its share of `num_items_in_batch` labels.

    Args:
        loss: scalar, the mean over the labels of this batch (NaN if there are none).
        labels: the labels, IGNORE_INDEX where there is none.
        num_items_in_batch: labels of the whole step, or None to leave the mean.
    """
    count = (labels != IGNORE_INDEX).sum()
    loss = torch.where(count > 0, loss, torch.zeros_like(loss))
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss * (count / num_items_in_batch)
