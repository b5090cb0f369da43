"""Checks of what a caller hands a model, in the caller's terms: the ops below see packed rows."""

import torch

from fastbert import dispatch
from fastbert.padding import IGNORE_INDEX, PackedBatch


def check_tensors(**named) -> None:
    """Raises TypeError unless every argument is a tensor or None."""
    for name, value in named.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got a {type(value).__name__}; ask the tokenizer "
                "for return_tensors='pt', or use torch.as_tensor"
            )


def check_dtype(name: str, states: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Raises TypeError unless `states` may meet a layer's weight, by autocast or as they are."""
    if weight is None or not weight.is_floating_point() or states.dtype == weight.dtype:
        return
    if not torch.is_autocast_enabled(states.device.type):
        raise TypeError(
            f"{name} must be {weight.dtype} like the model's weights, got {states.dtype}; use "
            f"{name}.to(model.dtype), or torch.autocast"
        )


def check_labels(labels: torch.Tensor, num_classes: int, name: str = "labels") -> None:
    """Raises unless `labels`, of any shape, are classes or -100, which counts for nothing.

    Raises:
        TypeError: labels that are no integers.
        ValueError: one outside [0, num_classes), on a CPU.
    """
    check_label_dtype(name, labels)
    if not dispatch.is_checkable(labels):
        return
    for label in labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= num_classes))][:1]:
        raise ValueError(
            f"{name} hold {int(label)}, but there are {num_classes} classes (0 to "
            f"{num_classes - 1}, and {IGNORE_INDEX} for none); correct them or set num_labels"
        )


def check_label_dtype(name: str, labels: torch.Tensor) -> None:
    """Raises TypeError unless torch's cross-entropy takes `labels` for numbers of classes."""
    if labels.dtype not in (torch.int64, torch.uint8):
        raise TypeError(
            f"{name} must be int64, the numbers of classes, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}; use {name}.long()"
        )


def check_ids(name: str, ids: torch.Tensor, num_ids: int, batch: PackedBatch) -> None:
    """Raises unless `ids` `(B, S)` or `(1, S)` are integers, on a CPU within their table.

    Args:
        name: the argument.
        ids: what was passed.
        num_ids: rows of the table.
        batch: whose rows will be read; ids at padding are not looked at.

    Raises:
        TypeError: ids that are no integers.
        ValueError: an id outside the table, with its place in the batch.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{name} must be int64 or int32, got {ids.dtype} of shape {tuple(ids.shape)}"
        )
    if not dispatch.is_checkable(ids):
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low >= 0 and high < num_ids:
        return
    wrong = (ids < 0) | (ids >= num_ids)
    if batch.real is not None:
        wrong = wrong & batch.real.view(batch.batch_size, batch.seqlen)
    for row, position in wrong.nonzero()[:1].tolist():
        raise ValueError(
            f"{name} holds {int(ids.expand_as(wrong)[row, position])} at ({row}, {position}), but "
            f"its table has {num_ids} rows (0 to {num_ids - 1}); check the tokenizer against the "
            "model's config"
        )
