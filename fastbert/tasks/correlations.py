"""Agreement of numbers with numbers."""

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


def number_in(value, where: str) -> float:
    """
    Raises:
        TaskError: the value is no finite number; where says of which row and column.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(f"{where} must be a number, got {value!r}") from error
    if not np.isfinite(number):
        raise TaskError(f"{where} must be finite, got {value!r}")
    return number
