"""What int8 costs in quality: a checkpoint's sentence embeddings in int8 beside those in fp32.

    python -m benchmarks.quantization --data FOLDER --model CHECKPOINT

FOLDER has queries.jsonl and corpus.jsonl (`_id`, `text`) and qrels.tsv (`query-id`, `corpus-id`,
one relevant text a query). Printed are the cosines with the fp32 vectors of the same text, and how
often the relevant text is the nearest (R@1) and its mean reciprocal rank (MRR) over all texts.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import fastbert
from fastbert.tasks.tables import read_rows

KINDS = [
    (dtype, quantize)
    for quantize in (None, "weight_only", "dynamic")
    for dtype in (torch.float32, torch.bfloat16)
]


def read(folder: Path) -> tuple[list[str], list[str], np.ndarray]:
    """Texts of the queries and of the corpus, and the place of each query's relevant text."""
    relevant = {str(r["query-id"]): str(r["corpus-id"]) for r in read_rows(folder / "qrels.tsv")}
    corpus = list(read_rows(folder / "corpus.jsonl"))
    place = {str(row["_id"]): i for i, row in enumerate(corpus)}
    queries = [r for r in read_rows(folder / "queries.jsonl") if str(r["_id"]) in relevant]
    wanted = np.array([place[relevant[str(row["_id"])]] for row in queries])
    return [r["text"] for r in queries], [r["text"] for r in corpus], wanted


def ranks(queries: np.ndarray, corpus: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How many texts are nearer to each query than its own."""
    scores = queries @ corpus.T
    return (scores > np.take_along_axis(scores, wanted[:, None], 1)).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    queries, corpus, wanted = read(arguments.data)
    exact = None
    print("| | mean cosine | least | R@1 | MRR |\n|---|---:|---:|---:|---:|")
    for dtype, quantize in KINDS:
        embedder = fastbert.Embedder(arguments.model, dtype=dtype, quantize=quantize)
        vectors = embedder.encode([*queries, *corpus])
        exact = vectors if exact is None else exact
        cosines = (vectors * exact).sum(1)
        rank = ranks(vectors[: len(queries)], vectors[len(queries) :], wanted)
        name = f"{quantize or 'not quantised'}, {str(dtype).removeprefix('torch.')}"
        print(
            f"| {name} | {cosines.mean():.5f} | {cosines.min():.5f} | {(rank == 0).mean():.4f} | "
            f"{(1 / (1 + rank)).mean():.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
