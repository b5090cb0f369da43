"""Real text for benchmarks: files that are named, or what the installed packages say in prose."""

import ast
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

PROSE = {".txt", ".md", ".rst"}
HELD_OUT = 25
"""One paragraph in so many is kept for evaluation."""


def paragraphs(paths: Sequence[Path] = (), *, at_most: int = 40 << 20) -> list[str]:
    """Stretches of text between blank lines, each once.

    Args:
        paths: text files, or folders of them; without any, licences, documentation and docstrings
            of the packages that are installed.
        at_most: bytes after which no other file is read.
    """
    texts = _of_files(paths) if paths else _of_packages(Path(sysconfig.get_paths()["purelib"]))
    found, size = {}, 0
    for text in texts:
        for paragraph in text.replace("\r\n", "\n").split("\n\n"):
            paragraph = "\n".join(line.strip() for line in paragraph.splitlines() if line.strip())
            if paragraph and paragraph not in found:
                found[paragraph] = None
                size += len(paragraph.encode())
        if size > at_most:
            break
    return list(found)


def written(found: list[str], folder: Path) -> tuple[Path, Path]:
    """Writes paragraphs into a file to train on and one to evaluate on, and names them."""
    train, heldout = folder / "train.txt", folder / "heldout.txt"
    folder.mkdir(parents=True, exist_ok=True)
    train.write_text("\n\n".join(p for i, p in enumerate(found) if i % HELD_OUT), "utf-8")
    heldout.write_text("\n\n".join(found[::HELD_OUT]), "utf-8")
    return train, heldout


def _of_files(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        for file in sorted(path.rglob("*.txt")) if path.is_dir() else [path]:
            yield file.read_text("utf-8")


def _of_packages(folder: Path) -> Iterator[str]:
    """In the order of their names, so that a machine gathers the same again."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in PROSE:
            yield file.read_text("utf-8", errors="replace")
        elif file.suffix == ".py":
            yield from _docstrings(file)


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        # Templates and tests of parsers are no Python.
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield ast.get_docstring(node) or ""
