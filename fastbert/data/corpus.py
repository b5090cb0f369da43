"""A corpus on disk: token ids of documents, written once and memory-mapped.

    corpus.json            what it is: format, dtype, vocabulary size, counts of every shard
    tokenizer/             the tokenizer that made it
    00000/tokens.bin       ids, uint16 if the vocabulary has at most 65,536, else uint32
    00000/sentences.bin    int64, first token of each sentence and the number of tokens
    00000/documents.bin    int64, first sentence of each document and the number of sentences
    00000/words.bin        bool, with a user's segmentation: whether the token begins a word

Numbers are little-endian. A shard folder appears by one rename, with all its files complete.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastbert.data.documents import Documents

FORMAT = 1
INDEX = "corpus.json"
COUNTS = ("documents", "sentences", "tokens")
_INT64 = np.dtype("<i8")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        folder: where it lies.
        dtype: of the ids.
        vocab_size: of the tokenizer.
        shards: the folders' names, in the order of the input.
        num_documents, num_sentences, num_tokens: of all shards.
    """

    folder: Path
    dtype: np.dtype
    vocab_size: int
    shards: tuple[str, ...]
    num_documents: int
    num_sentences: int
    num_tokens: int

    @classmethod
    def open(cls, folder: str | os.PathLike) -> "Corpus":
        """Reads the index; tokens stay on disk.

        Raises:
            FileNotFoundError: no index, because preparing it has not ended.
            ValueError: an index of another format.
        """
        folder = Path(folder)
        path = folder / INDEX
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; `fastbert data prepare` writes it when all is done"
            )
        index = json.loads(path.read_text())
        if index.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {index.get('format')!r}, this version reads {FORMAT}; prepare "
                f"the corpus again"
            )
        return cls(
            folder,
            np.dtype(index["dtype"]),
            index["vocab_size"],
            tuple(shard["name"] for shard in index["shards"]),
            *(
                sum(s[name] for s in index["shards"])
                for name in ("documents", "sentences", "tokens")
            ),
        )

    def __len__(self) -> int:
        return len(self.shards)

    def shard(self, number: int) -> Documents:
        """One shard, memory-mapped.

        Raises:
            ValueError: a file whose size does not fit the others.
        """
        return read_shard(self.folder / self.shards[number], self.dtype)


def read_shard(folder: Path, dtype: np.dtype) -> Documents:
    """Maps the files of a shard.

    Raises:
        ValueError: a file whose size does not fit the others.
    """
    documents = Documents(
        _map(folder / "tokens.bin", dtype),
        _map(folder / "sentences.bin", _INT64),
        _map(folder / "documents.bin", _INT64),
        _map(folder / "words.bin", np.dtype(bool)) if (folder / "words.bin").exists() else None,
    )
    words = documents.word_starts
    if (
        documents.sentences[-1] != len(documents.ids)
        or documents.documents[-1] != len(documents.sentences) - 1
        or (words is not None and len(words) != len(documents.ids))
    ):
        raise ValueError(f"the files of shard {folder} do not fit each other; prepare it again")
    return documents


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size % dtype.itemsize:
        raise ValueError(f"{path} is no array of {dtype}: {path.stat().st_size} bytes")
    if not path.stat().st_size:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")


def write_shard(folder: Path, documents: Documents) -> dict[str, int]:
    """Writes a shard beside its place, makes it durable, and renames it there.

    Returns:
        Its counts for the index.
    """
    part = folder.with_suffix(f".{os.getpid()}.part")
    part.mkdir()
    columns = {
        "tokens": documents.ids,
        "sentences": documents.sentences.astype(_INT64),
        "documents": documents.documents.astype(_INT64),
    }
    if documents.word_starts is not None:
        columns["words"] = documents.word_starts
    for name, column in columns.items():
        _write_durably(part / f"{name}.bin", np.ascontiguousarray(column).tobytes())
    counts = {
        "documents": len(documents),
        "sentences": len(documents.sentences) - 1,
        "tokens": len(documents.ids),
    }
    _write_durably(part / "counts.json", json.dumps(counts).encode())
    sync_folder(part)
    part.rename(folder)
    sync_folder(folder.parent)
    return counts


def remove_parts(folder: Path) -> None:
    """Removes shards that a kill left unfinished."""
    for part in folder.glob("*.part"):
        if part.is_dir():
            shutil.rmtree(part)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file: readers see the old one or the new one, whole."""
    part = path.with_name(path.name + ".part")
    _write_durably(part, text.encode())
    part.replace(path)
    sync_folder(path.parent)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes names durable; systems without folders that open (Windows) have no need of it."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
