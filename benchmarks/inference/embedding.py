"""Texts in, vectors out: fastbert.Embedder beside sentence-transformers on a real checkpoint."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import fastbert

from ..texts import paragraphs

COUNT = 2000


def sentences(paths: Sequence[Path], count: int = COUNT) -> list[str]:
    """Real sentences, spread evenly over the files named or the installed packages' prose.

    Raises:
        ValueError: there are fewer.
    """
    found = {}
    for paragraph in paragraphs(paths, at_most=3 << 20):
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph.replace("\n", " ")):
            if len(sentence.split()) >= 4:
                found[sentence] = None
    if len(found) < count:
        raise ValueError(f"the texts have {len(found)} sentences, {count} are needed; name more")
    return list(found)[:: len(found) // count][:count]


def their_embedder(folder: Path, settings: dict, *, dtype: str, precision: str) -> Callable:
    """`SentenceTransformer.encode` with its own defaults."""
    import sentence_transformers

    torch.set_float32_matmul_precision(precision)
    model = sentence_transformers.SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
    )
    return lambda inputs: (
        lambda: _as_numpy(
            model.encode(inputs["texts"], convert_to_tensor=True, show_progress_bar=False)
        )
    )


def our_embedder(folder: Path, settings: dict, *, dtype: str, precision: str) -> Callable:
    """`fastbert.Embedder.encode` with its own defaults."""
    torch.set_float32_matmul_precision(precision)
    embedder = fastbert.Embedder(folder, dtype=getattr(torch, dtype))
    return lambda inputs: lambda: embedder.encode(inputs["texts"])


def _as_numpy(vectors: torch.Tensor) -> np.ndarray:
    # numpy has no bf16.
    return vectors.float().numpy()


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """1 - the smallest cosine of a pair of vectors."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return float(1 - cosines.min())
