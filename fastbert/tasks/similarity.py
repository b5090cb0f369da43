"""How alike two texts are: the cosine of their vectors, and its agreement with scores (STS)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastbert.tasks.correlations import correlations, number_in
from fastbert.tasks.tables import check_columns, check_texts

if TYPE_CHECKING:
    from fastbert.embedder import Embedder


@dataclass(frozen=True, kw_only=True)
class SimilaritySettings:
    """
    Attributes:
        first: column of the first text.
        second: column of the second text.
        score: column of the score that people gave; only for metrics.
    """

    first: str = "sentence1"
    second: str = "sentence2"
    score: str | None = None


def similarities(
    embedder: "Embedder",
    rows: Sequence[dict],
    settings: SimilaritySettings | None = None,
    *,
    progress: bool = False,
    name: str = "rows",
) -> list[dict]:
    """One answer a row: `similarity`, a cosine.

    Args:
        embedder: makes the vectors, and says what becomes of overlong texts.
        rows: with two texts.
        settings: columns. progress: show a bar. name: of the rows, for messages.

    Raises:
        TaskError: a column is missing or holds something else.
        ValueError: a text that the embedder refuses.
    """
    settings = SimilaritySettings() if settings is None else settings
    rows = list(rows)
    if not rows:
        return []
    check_columns(rows, {"first": settings.first, "second": settings.second}, name)
    check_texts(rows, [settings.first, settings.second], name)
    # A text that stands in many rows is encoded once.
    texts = list(dict.fromkeys(row[c] for c in (settings.first, settings.second) for row in rows))
    vectors = embedder.encode(texts, progress=progress).astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    places = {text: index for index, text in enumerate(texts)}
    firsts, seconds = (
        vectors[[places[row[c]] for row in rows]] for c in (settings.first, settings.second)
    )
    return [{"similarity": float(cosine)} for cosine in (firsts * seconds).sum(1)]


def similarity_metrics(
    rows: Sequence[dict], answers: Sequence[dict], settings: SimilaritySettings, name: str = "rows"
) -> dict[str, float]:
    """Spearman's and Pearson's correlation of the cosines with the column of scores.

    Raises:
        TaskError: a score is missing or no number.
    """
    check_columns(rows, {"score": settings.score}, name)
    truth = [
        number_in(row[settings.score], f"{name}, row {number}: {settings.score!r}")
        for number, row in enumerate(rows, 1)
    ]
    return correlations(truth, [answer["similarity"] for answer in answers])
