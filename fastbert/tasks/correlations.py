"""Agreement of numbers with numbers."""

import math
from collections.abc import Sequence

import numpy as np

from fastbert.tasks.tables import TaskError


def correlations(truth: Sequence[float], given: Sequence[float]) -> dict[str, float]:
    """Spearman's and Pearson's."""
    from scipy.stats import pearsonr, spearmanr

    # A correlation with a constant is not defined; 0 keeps a run going that has learnt nothing.
    constant = np.ptp(truth) == 0 or np.ptp(given) == 0
    return {
        "spearman": 0.0 if constant else float(spearmanr(truth, given).statistic),
        "pearson": 0.0 if constant else float(pearsonr(truth, given).statistic),
    }


UNBOUNDED = (-math.inf, math.inf)


def number_in(value, where: str, bounds: tuple[float, float] = UNBOUNDED) -> float:
    """
    Raises:
        TaskError: the value is no finite number within the bounds; where says of which row and
            column.
    """
    low, high = bounds
    wanted = "a number" if bounds == UNBOUNDED else f"a number in [{low:g}, {high:g}]"
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where} must be {wanted}, got {value!r}") from error
    if not math.isfinite(number):
        raise TaskError(f"{where} must be finite, got {value!r}")
    if not low <= number <= high:
        raise TaskError(f"{where} must be {wanted}, got {value!r}")
    return number
