"""Files of texts to files of vectors, gone on with where a run was killed.

    OUT.part        the vectors so far, raw fp32
    OUT.part.json   what they were made of; other settings do not go on with them

A text's vector does not depend on what is encoded with it (fastbert/embedder.py), so a run that was
interrupted ends with the bytes of one that was not.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from fastbert.data.corpus import sync_folder, write_atomically
from fastbert.embedder import Embedder
from fastbert.tasks.tables import read_json_lines

SOURCES = (".txt", ".jsonl", ".ndjson", ".parquet")
TARGETS = (".jsonl", ".ndjson", ".parquet")
EMBEDDING = "embedding"
# Rows made durable, read and written at a time.
_AT_ONCE = 4096


def encode_file(
    embedder: Embedder,
    source: str | Path,
    target: str | Path,
    *,
    column: str = "text",
    keep: Sequence[str] | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    progress: bool = False,
) -> int:
    """Writes the vectors of a file's texts; called again after a kill it goes on.

    Args:
        embedder: makes them.
        source: .txt with a text a line, .jsonl with an object a line, or .parquet.
        target: .jsonl or .parquet, with the column `embedding` of fp32; appears when it is whole.
        column: of the texts; of .txt it is `text`.
        keep: columns that are copied to the target; None: the texts.
        prompt_name, prompt: as `Embedder.encode` takes them.
        progress: show a bar on stderr.

    Returns:
        The number of rows.

    Raises:
        FileNotFoundError, FileExistsError: no source; a target that is there already.
        ValueError: unknown endings, a row without a column, a part made with other settings.
        TypeError: a text that is no string.
    """
    source, target = Path(source), Path(target)
    keep = (column,) if keep is None else tuple(keep)
    _check(source, target, keep)
    # The first row's columns, before a part is written that could not be gone on with.
    next(zip(_texts(source, column), _kept(source, keep), strict=False), None)
    part = target.with_name(target.name + ".part")
    notes = part.with_name(part.name + ".json")
    identity = {
        **embedder.description(),
        "prompt": embedder.prefix(prompt_name, prompt),
        "source": [str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns],
        "column": column,
    }
    width = embedder.dimension
    done = _go_on(part, notes, identity, width)
    texts = islice(_texts(source, column), done, None)
    vectors = embedder.stream(texts, prompt_name=prompt_name, prompt=prompt, first=done + 1)
    count = done + _append(part, vectors, done, progress)
    shape = (count, width)
    whole = np.memmap(part, np.float32, "r", shape=shape) if count else np.empty(shape, np.float32)
    _publish(target, _kept(source, keep), whole)
    notes.unlink()
    part.unlink()
    return count


def _check(source: Path, target: Path, keep: tuple[str, ...]) -> None:
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    if target.exists():
        raise FileExistsError(f"{target} is there already; remove it or name another")
    for path, endings in ((source, SOURCES), (target, TARGETS)):
        if path.suffix.lower() not in endings:
            raise ValueError(f"{path} must end in one of {', '.join(endings)}")
    if EMBEDDING in keep:
        raise ValueError(f"keep must not name {EMBEDDING!r}, which is the column of the vectors")


def _go_on(part: Path, notes: Path, identity: dict, width: int) -> int:
    """How many vectors there are already; half ones are removed."""
    text = json.dumps(identity, indent=1)
    if not (part.is_file() and notes.is_file()):
        part.write_bytes(b"")
        write_atomically(notes, text)
        return 0
    if notes.read_text() != text:
        raise ValueError(
            f"{part} was made of another source or with other settings ({notes} says which); "
            "repeat those, or remove both files"
        )
    done = part.stat().st_size // (4 * width)
    os.truncate(part, done * 4 * width)
    return done


def _append(part: Path, vectors: Iterable[np.ndarray], done: int, progress: bool) -> int:
    from tqdm import tqdm

    count = 0
    with (
        part.open("ab") as file,
        tqdm(unit="text", initial=done, disable=not progress) as bar,
    ):
        for vector in vectors:
            file.write(vector.tobytes())
            count += 1
            bar.update()
            if count % _AT_ONCE == 0:
                _make_durable(file)
        _make_durable(file)
    return count


def _make_durable(file) -> None:
    file.flush()
    os.fsync(file.fileno())


# --- rows -----------------------------------------------------------------------------------------


def _rows(source: Path) -> Iterator[dict]:
    ending = source.suffix.lower()
    if ending == ".parquet":
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(source)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{source} is not a readable Parquet file ({error})") from error
        with file:
            for batch in file.iter_batches(_AT_ONCE):
                yield from batch.to_pylist()
        return
    with source.open(encoding="utf-8") as lines:
        if ending == ".txt":
            yield from ({"text": line.rstrip("\n")} for line in lines)
        else:
            yield from read_json_lines(lines, str(source))


def _field(row: dict, column: str, source: Path, number: int, option: str):
    if column not in row:
        raise ValueError(
            f"{source}, row {number} has no column {column!r}; it has {', '.join(row) or 'none'}. "
            f"Name the right one by --{option} ({option}= in Python)"
        )
    return row[column]


def _texts(source: Path, column: str) -> Iterator[str]:
    for number, row in enumerate(_rows(source), 1):
        text = _field(row, column, source, number, "column")
        if not isinstance(text, str):
            raise TypeError(
                f"{source}, row {number}: {column} must be a string, got {type(text).__name__}"
            )
        yield text


def _kept(source: Path, keep: tuple[str, ...]) -> Iterator[dict]:
    for number, row in enumerate(_rows(source), 1):
        yield {name: _field(row, name, source, number, "keep") for name in keep}


# --- the target -----------------------------------------------------------------------------------


def _publish(target: Path, rows: Iterator[dict], vectors: np.ndarray) -> None:
    """Writes the target beside its place and gives it its name when it is durable."""
    new = target.with_name(target.name + ".new")
    write = _write_parquet if target.suffix.lower() == ".parquet" else _write_json_lines
    write(new, rows, vectors)
    with new.open("rb+") as file:
        _make_durable(file)
    os.rename(new, target)
    sync_folder(target.parent)


def _write_json_lines(path: Path, rows: Iterator[dict], vectors: np.ndarray) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row, vector in zip(rows, vectors, strict=True):
            # The shortest digits that give the same fp32.
            row[EMBEDDING] = [float(digits) for digits in map(str, vector)]
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_parquet(path: Path, rows: Iterator[dict], vectors: np.ndarray) -> None:
    import pyarrow
    import pyarrow.parquet

    fixed = pyarrow.list_(pyarrow.float32(), vectors.shape[1])
    first = list(islice(rows, _AT_ONCE))
    kept = pyarrow.Table.from_pylist(first).schema if first else pyarrow.schema([])
    schema = kept.append(pyarrow.field(EMBEDDING, fixed))
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        done, chunk = 0, first
        while chunk:
            flat = pyarrow.array(np.ascontiguousarray(vectors[done : done + len(chunk)]).ravel())
            column = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
            table = pyarrow.Table.from_pylist(chunk, schema=kept)
            writer.write_table(table.append_column(schema.field(EMBEDDING), column))
            done += len(chunk)
            chunk = list(islice(rows, _AT_ONCE))
