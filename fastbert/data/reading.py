"""Texts from files: which pieces they are read in, and the documents of a piece.

A piece is what one worker reads and what becomes one shard: a stretch of a text or JSONL file that
ends with a document, some row groups of a Parquet file.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DOCUMENTS = ("blank-line", "line", "file")
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_BOM = b"\xef\xbb\xbf"
# An escape such as \\ud83d alone is JSON, but no character that a tokenizer takes.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CorpusError(ValueError):
    """A file that cannot be read. `path` and `offset` say where.

    Attributes:
        path: the file.
        offset: the byte, or the row of a Parquet file, that is at fault.
    """

    def __init__(self, path: str, offset: int, reason: str, unit: str = "byte"):
        super().__init__(path, offset, reason, unit)
        self.path, self.offset, self.reason, self.unit = path, offset, reason, unit

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.offset}: {self.reason}"


@dataclass(frozen=True)
class Piece:
    """A part of a file.

    Attributes:
        path: the file. format: "text", "jsonl" or "parquet".
        start, end: bytes, or row groups of a Parquet file.
        size: bytes of it, for the progress bar.
    """

    path: str
    format: str
    start: int
    end: int
    size: int


def format_of(path: Path) -> str:
    """By the name's ending; text where it is none of the known ones."""
    return FORMATS.get(path.suffix.lower(), "text")


def pieces_of(path: Path, piece_bytes: int, documents: str = "blank-line") -> list[Piece]:
    """Cuts a file into pieces of about `piece_bytes` at ends of documents.

    Args:
        path: an existing file.
        piece_bytes: at least 1.
        documents: what a document of a text file is: lines up to a blank one (as BERT's own input),
            a line, or the file.

    Raises:
        CorpusError: a Parquet file whose footer cannot be read.
        ValueError: unknown `documents`, piece_bytes below 1.
    """
    if documents not in DOCUMENTS:
        raise ValueError(f"documents must be one of {DOCUMENTS}, got {documents!r}")
    if piece_bytes < 1:
        raise ValueError(f"piece_bytes must be at least 1, got {piece_bytes}")
    kind = format_of(path)
    if kind == "parquet":
        return _parquet_pieces(path, piece_bytes)
    size = path.stat().st_size
    if kind == "text" and documents == "file":
        return [Piece(str(path), kind, 0, size, size)]
    pieces, start = [], 0
    with path.open("rb") as file:
        while start < size:
            blank = kind == "text" and documents == "blank-line"
            end = min(_document_end(file, start + piece_bytes, blank), size)
            pieces.append(Piece(str(path), kind, start, end, end - start))
            start = end
    return pieces


def _document_end(file, offset: int, blank: bool) -> int:
    """The next end of a line from byte `offset` on, or of a blank line."""
    file.seek(offset - 1)
    line = file.readline()
    while line and blank:
        line = file.readline()
        blank = bool(line.strip())
    return file.tell()


def _parquet_pieces(path: Path, piece_bytes: int) -> list[Piece]:
    metadata = _open_parquet(path).metadata
    pieces, start, size = [], 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= piece_bytes or group + 1 == metadata.num_row_groups:
            pieces.append(Piece(str(path), "parquet", start, group + 1, size))
            start, size = group + 1, 0
    return pieces


def _open_parquet(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow: pip install 'fastbert[data]'") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(str(path), 0, f"not a readable Parquet file ({error})") from error


def read_piece(
    piece: Piece, *, documents: str = "blank-line", column: str = "text"
) -> Iterator[str]:
    """The documents of a piece.

    Args:
        piece: from `pieces_of`, with the same `documents`.
        column: the field of a JSONL or Parquet row that holds the text.

    Raises:
        CorpusError: text that is not UTF-8, a line that is not a JSON object, a row without the
            field, a damaged row group.
    """
    if piece.format == "parquet":
        yield from _parquet_documents(piece, column)
    elif piece.format == "jsonl":
        for offset, line in _lines(piece):
            if line.strip():
                yield _json_text(piece.path, offset, line, column)
    else:
        yield from _text_documents(piece, documents)


def _lines(piece: Piece) -> Iterator[tuple[int, str]]:
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        offset = piece.start
        while offset < piece.end:
            line = file.readline()
            if not line:
                raise CorpusError(
                    piece.path, offset, f"the file ends here, {piece.end} bytes were expected"
                )
            text = line[len(_BOM) :] if offset == 0 and line.startswith(_BOM) else line
            try:
                yield offset, text.decode("utf-8")
            except UnicodeDecodeError as error:
                at = offset + len(line) - len(text) + error.start
                raise CorpusError(piece.path, at, f"not UTF-8 ({error.reason})") from error
            offset += len(line)


def _json_text(path: str, offset: int, line: str, column: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        at = offset + len(line[: error.pos].encode())
        raise CorpusError(path, at, f"not JSON ({error.msg})") from error
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise CorpusError(path, offset, f"no text in the field {column!r}; the line holds {found}")
    if _LONE_SURROGATE.search(row[column]):
        raise CorpusError(path, offset, f"half of a surrogate pair in the field {column!r}")
    return row[column]


def _text_documents(piece: Piece, documents: str) -> Iterator[str]:
    ends: Callable[[str], bool] = {
        "blank-line": lambda line: not line.strip(),
        "line": lambda line: True,
        "file": lambda line: False,
    }[documents]
    lines: list[str] = []
    for _, line in _lines(piece):
        lines.append(line)
        if ends(line):
            yield "".join(lines)
            lines = []
    if lines:
        yield "".join(lines)


def _parquet_documents(piece: Piece, column: str) -> Iterator[str]:
    import pyarrow

    file = _open_parquet(piece.path)
    row = sum(file.metadata.row_group(g).num_rows for g in range(piece.start))
    if column not in file.schema_arrow.names:
        raise CorpusError(
            piece.path, row, f"no column {column!r}; there are {file.schema_arrow.names}", "row"
        )
    for group in range(piece.start, piece.end):
        try:
            texts = file.read_row_group(group, columns=[column])[column].to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise CorpusError(
                piece.path, row, f"row group {group} is damaged ({error})", "row"
            ) from error
        for text in texts:
            if not isinstance(text, str):
                raise CorpusError(piece.path, row, f"no text in the column {column!r}", "row")
            yield text
            row += 1
