"""Rows of a task from files (CSV, TSV, JSONL, Parquet, CoNLL, SQuAD's JSON) or a dataset's name."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".conll", ".json")


class TaskError(ValueError):
    """Data or settings that a task cannot work with; the message says what to change."""


def read_rows(source: str | Path, *, split: str | None = None) -> list[dict]:
    """The rows of a file by its ending, or of a dataset by its name.

    .csv has a header and quotes; .tsv a header and no quotes, a tab ends a field; .jsonl a JSON
    object a line; .parquet its columns; .conll a word and its tag a line, blank lines between
    sentences, which gives the columns `tokens` and `tags`; .json is SQuAD's, 1.1 or 2.0, which
    gives `id`, `question`, `context` and `answers`.

    Args:
        source: a path, or what `datasets.load_dataset` takes: a folder, `name` or
            `name:configuration`.
        split: of a dataset; a file has none.

    Raises:
        TaskError: a file that is missing, empty or malformed, with the line; an unknown ending.
        ImportError: pyarrow or datasets is needed and missing.
    """
    path = Path(source)
    if path.suffix.lower() not in ENDINGS:
        if path.is_file():
            raise TaskError(
                f"{path} has no ending that says what is in it; known are {', '.join(ENDINGS)}"
            )
        return _dataset_rows(str(source), split)
    if not path.is_file():
        raise TaskError(f"there is no file {path}")
    if split is not None:
        raise TaskError(f"split={split!r} is for names of datasets; {path} is a file")
    readers = {
        ".csv": _csv_rows,
        ".tsv": _tsv_rows,
        ".parquet": _parquet_rows,
        ".conll": _conll_rows,
        ".json": _squad_rows,
    }
    try:
        rows = list(readers.get(path.suffix.lower(), _json_rows)(path))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8: {error}") from error
    if not rows:
        raise TaskError(f"{path} has no rows")
    return rows


def read_json_lines(lines: Iterator[str], name: str) -> Iterator[dict]:
    """One row for each line that is not blank.

    Raises:
        TaskError: a line that is no JSON object.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{name}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise TaskError(f"{name}, line {number}: expected an object, got {line.strip()[:40]}")
        yield row


def check_columns(rows: Sequence[dict], columns: dict[str, str | None], name: str) -> None:
    """Every row has every column, by the option that names it; None is no column.

    Raises:
        TaskError: naming the option, the row and the columns there are.
    """
    for number, row in enumerate(rows, 1):
        for option, column in columns.items():
            if column is None or row.get(column) is not None:
                continue
            found = "nothing in the" if column in row else "no"
            raise TaskError(
                f"{name}, row {number}: {found} column {column!r}; it has "
                f"{', '.join(map(str, row)) or 'none'}. Name the right one by --{option} COLUMN "
                f"({option}= in Python)"
            )


def check_texts(rows: Sequence[dict], columns: Sequence[str | None], name: str) -> None:
    """The columns hold strings.

    Raises:
        TaskError: naming the row.
    """
    for number, row in enumerate(rows, 1):
        for column in columns:
            if column is not None and not isinstance(row[column], str):
                raise TaskError(
                    f"{name}, row {number}: {column!r} must be text, got {row[column]!r}"
                )


def check_varied(labels: Iterable, what: str, option: str = "label") -> None:
    """Training rows have not all the same label, of which a model would learn nothing.

    Args:
        labels: of the training rows. what: they are called.
        option: names their column.

    Raises:
        TaskError: they have.
    """
    found = set(labels)
    if len(found) == 1:
        raise TaskError(
            f"all training rows have the {what} {found.pop()!r}, so there is nothing to learn; add "
            f"rows with another {what}, or name the right column by --{option} COLUMN ({option}= "
            "in Python)"
        )


def _csv_rows(path: Path, **dialect) -> Iterator[dict]:
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True, **dialect)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise TaskError(
                        f"{path}, line {reader.line_num}: {len(reader.fieldnames)} fields were "
                        f"expected ({', '.join(reader.fieldnames)})"
                    )
                yield row
        except csv.Error as error:
            raise TaskError(f"{path}, line {reader.line_num}: {error}") from error


def _tsv_rows(path: Path) -> Iterator[dict]:
    return _csv_rows(path, delimiter="\t", quoting=csv.QUOTE_NONE)


def _json_rows(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8-sig") as file:
        yield from read_json_lines(file, str(path))


def _parquet_rows(path: Path) -> list[dict]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow: pip install 'fastbert[tasks]'") from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{path} is not a readable Parquet file ({error})") from error


def _conll_rows(path: Path) -> Iterator[dict]:
    tokens, tags = [], []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate([*file, ""], 1):
            fields = line.split("\t") if "\t" in line else line.split()
            if not line.strip() or fields[0] == "-DOCSTART-":
                if tokens:
                    yield {"tokens": tokens, "tags": tags}
                tokens, tags = [], []
                continue
            if len(fields) < 2:
                raise TaskError(f"{path}, line {number}: a word and its tag were expected")
            tokens.append(fields[0])
            tags.append(fields[-1].strip())


def _squad_rows(path: Path) -> Iterator[dict]:
    try:
        articles = json.loads(path.read_text(encoding="utf-8-sig"))["data"]
        for paragraph in (p for article in articles for p in article["paragraphs"]):
            for question in paragraph["qas"]:
                answers = question.get("answers", [])
                yield {
                    "id": question["id"],
                    "question": question["question"],
                    "context": paragraph["context"],
                    "answers": {
                        "text": [a["text"] for a in answers],
                        "answer_start": [a["answer_start"] for a in answers],
                    },
                }
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TaskError(
            f"{path} is not SQuAD's JSON ({error!r}); one object a line belongs in a .jsonl"
        ) from error


def _dataset_rows(name: str, split: str | None) -> list[dict]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{name} needs datasets: pip install 'fastbert[tasks]'") from error
    if split is None:
        raise TaskError(f"{name} is no file, and of a dataset the split has to be named")
    try:
        rows = datasets.load_dataset(*name.split(":", 1), split=split)
    except (OSError, ValueError) as error:
        raise TaskError(
            f"{name} is neither a file ({', '.join(ENDINGS)}) nor a dataset that can be loaded: "
            f"{error}"
        ) from error
    return _named_labels(rows)


def _named_labels(rows) -> list[dict]:
    """Rows with names in place of the numbers of a dataset's classes; no label is -1 there."""
    import datasets

    plain = rows.to_list()
    for column, feature in rows.features.items():
        inner = getattr(feature, "feature", feature)
        if not isinstance(inner, datasets.ClassLabel):
            continue
        for row in plain:
            value = row[column]
            if isinstance(value, list):
                row[column] = [inner.int2str(v) for v in value]
            else:
                row[column] = None if value is None or value < 0 else inner.int2str(value)
    return plain
