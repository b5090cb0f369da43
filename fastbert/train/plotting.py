"""Loss and speed of runs as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastbert.train.config import ConfigError
from fastbert.train.journal import METRICS, read_records

SMOOTHED = 50
"""Curves of training are means over so many parts of the run at most."""


def plot(runs: Sequence[str | Path], output: str | Path) -> None:
    """Draws the training and held-out loss, and the speed, of all runs into one PNG.

    Args:
        runs: folders of runs.
        output: file to write, ending in .png.

    Raises:
        ConfigError: a run without a step, another ending, matplotlib missing.
    """
    if Path(output).suffix != ".png":
        raise ConfigError(f"output must end in .png, got {output}")
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("plotting needs `pip install matplotlib`") from error
    curves = {Path(run).name: curves_of(Path(run)) for run in runs}
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    for number, (name, curve) in enumerate(curves.items()):
        color = f"C{number}"
        losses.plot(*curve["loss"], color=color, alpha=0.6, label=name)
        if "heldout_loss" in curve:
            losses.plot(*curve["heldout_loss"], "o-", color=color, label=f"{name}, held out")
        speeds.plot(*curve["tokens_per_second"], color=color, label=name)
    losses.set(xlabel="step", ylabel="loss")
    speeds.set(xlabel="step", ylabel="real tokens per second", ylim=(0, None))
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(output, dpi=120)


def curves_of(run: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values of a run's loss, speed (averaged over parts) and held-out loss.

    Raises:
        ConfigError: the run has no step.
    """
    path = run / METRICS
    records = read_records(path) if path.is_file() else []
    curves = {}
    for name in ("loss", "tokens_per_second", "heldout_loss"):
        points = [(r["step"], r[name]) for r in records if name in r]
        if points:
            curves[name] = np.array(points, np.float64).T
    if "loss" not in curves:
        raise ConfigError(f"{run} has no step in {METRICS} yet")
    return {
        name: tuple(points) if name == "heldout_loss" else _averaged(*points)
        for name, points in curves.items()
    }


def _averaged(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts = min(SMOOTHED, len(steps))
    return tuple(
        np.array([part.mean() for part in np.array_split(column, parts)])
        for column in (steps, values)
    )
