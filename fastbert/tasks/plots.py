"""Pictures of a fine-tuned model for its card.

Which label is taken for which, what its probabilities are worth, how it learned.
"""

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastbert.tasks.task import Task

logger = logging.getLogger("fastbert")

CONFUSION, CALIBRATION, LEARNING = "confusion.png", "calibration.png", "learning.png"
BINS = 10
# With more classes the numbers would not be legible.
WRITTEN = 20


def draw(task: Task, rows: Sequence[dict], answers: Sequence[dict], result) -> dict[str, str]:
    """Draws what the task has into the result's folder.

    Args:
        task: the task. rows, answers: that it was judged by. result: a `Finetuned`.

    Returns:
        Captions of the files by their names; none where matplotlib is missing, and the log says so.
    """
    if not _can_draw():
        return {}
    found, pictures = task.outcomes(rows, answers), {}
    if found.truth:
        draw_confusion(found.truth, found.given, task.labels, result.output / CONFUSION)
        pictures[CONFUSION] = "True labels and given ones"
    if found.right:
        error = draw_calibration(found.confidence, found.right, result.output / CALIBRATION)
        pictures[CALIBRATION] = f"Probabilities and their worth; calibration error {error:.3f}"
    return pictures | draw_history(result, task.best)


def draw_history(result, best: str) -> dict[str, str]:
    """The learning curve alone; as `draw`."""
    if not result.history or not _can_draw():
        return {}
    draw_learning(result.history, best, result.output / LEARNING)
    return {LEARNING: "Losses and the metric that chose the epoch"}


def _can_draw() -> bool:
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    logger.warning("no pictures are drawn: pip install matplotlib")
    return False


def draw_confusion(truth: Sequence[str], given: Sequence[str], labels, path: Path) -> None:
    """Counts of true by given labels, shaded by the share of the true ones.

    Args:
        truth, given: labels of N rows or words. labels: all, in order.
        path: file to write, ending in .png.
    """
    from sklearn.metrics import confusion_matrix

    counts = confusion_matrix(truth, given, labels=labels)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = min(max(3.5, 1.5 + 0.4 * len(labels)), 20)
    figure = _figure(size, size)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the true label", shrink=0.8)
    places = range(len(labels))
    axes.set(xlabel="given", ylabel="true", xticks=places, yticks=places)
    axes.set_xticklabels(labels, rotation=90)
    axes.set_yticklabels(labels)
    if len(labels) <= WRITTEN:
        for (row, column), count in np.ndenumerate(counts):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, count, ha="center", va="center", color=color)
    figure.savefig(path, dpi=120)


def draw_calibration(confidence: Sequence[float], right: Sequence[bool], path: Path) -> float:
    """The share of right answers by the model's own probability, in ten bins.

    Args:
        confidence: probability of N answers. right: whether they were right.
        path: file to write, ending in .png.

    Returns:
        The expected calibration error (Guo et al. 2017, equation 3).
    """
    means, shares, counts = calibration(confidence, right)
    figure = _figure(4.5, 4.5)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle="--")
    axes.plot(means, shares, "o-")
    for mean, share, count in zip(means, shares, counts, strict=True):
        axes.annotate(str(count), (mean, share), xytext=(4, -10), textcoords="offset points")
    axes.set(xlabel="probability given", ylabel="share right", xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return float((counts * np.abs(means - shares)).sum() / counts.sum())


def calibration(confidence, right) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean probability, share right and number of answers of each bin that has some."""
    confidence, right = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    filled = counts > 0
    sums = [np.bincount(bins, values, BINS)[filled] for values in (confidence, right)]
    counts = counts[filled]
    return sums[0] / counts, sums[1] / counts, counts


def draw_learning(history: Sequence[dict], best: str, path: Path) -> None:
    """Losses and the metric that chose the epoch, epoch by epoch.

    Args:
        history: a `Finetuned`'s. best: name of the metric.
        path: file to write, ending in .png.
    """
    figure = _figure(8, 3.5)
    losses, metric = figure.subplots(1, 2)
    epochs = [entry["epoch"] for entry in history]
    for name, label in (("train_loss", "training"), ("loss", "evaluation")):
        if all(name in entry for entry in history):
            losses.plot(epochs, [entry[name] for entry in history], "o-", label=label)
    losses.set(xlabel="epoch", ylabel="loss")
    losses.legend()
    metric.plot(epochs, [entry[best] for entry in history], "o-", color="C2")
    metric.set(xlabel="epoch", ylabel=best)
    for axes in (losses, metric):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float):
    # Without pyplot, which keeps figures and asks for a display.
    import matplotlib.figure

    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
