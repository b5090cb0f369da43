"""From texts to a `Corpus`: in parallel, shard by shard, and again from where it was killed."""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from fastbert.data.corpus import (
    FORMAT,
    INDEX,
    Corpus,
    remove_parts,
    token_dtype,
    write_atomically,
    write_shard,
)
from fastbert.data.documents import Documents
from fastbert.data.reading import DOCUMENTS, Piece, pieces_of, read_piece
from fastbert.data.segmentation import SENTENCES, Segmenter, jieba_segmenter, segmented_starts
from fastbert.data.sequences import cu_seqlens_of
from fastbert.folders import check_folder

PLAN = "plan.json"
SEGMENTERS: dict[str, Callable[[], Segmenter]] = {"jieba": jieba_segmenter}
# Sentences handed to the tokenizer at once.
_AT_ONCE = 4096


@dataclass(frozen=True)
class _Recipe:
    """What a worker needs to know; pickled once for each."""

    folder: str
    dtype: str
    documents: str
    column: str
    sentences: str
    segmenter: str | Segmenter | None


@dataclass(frozen=True)
class _Task:
    """One shard to be: a piece of a file, or texts that were read already."""

    number: int
    source: Piece | list[str]
    size: int


def prepare(
    inputs: Sequence[str | os.PathLike] | object,
    tokenizer,
    folder: str | os.PathLike,
    *,
    documents: str = "blank-line",
    sentences: str = "line",
    column: str = "text",
    segmenter: str | Segmenter | None = None,
    workers: int | None = None,
    piece_bytes: int = 64 << 20,
    rows_per_shard: int = 100_000,
    progress: bool = True,
) -> Corpus:
    """Tokenizes texts into a folder and opens it.

    Called again after a kill it keeps the shards that are complete; called on a complete corpus it
    only opens it.

    Args:
        inputs: paths of text, `.jsonl` and `.parquet` files; or a `datasets` dataset, map-style or
            streaming, or another iterable of rows with `column`.
        tokenizer: a fast transformers tokenizer, or the folder of one.
        folder: where the corpus goes.
        documents: what a document of a text file is: "blank-line", "line" or "file".
        sentences: how a document is cut: "line" or "punctuation".
        column: the field of the text in rows.
        segmenter: "jieba", or a function from a text to its words (it must pickle for more than
            one worker): words are stored for whole-word masking.
        workers: processes; default: one a core. 1: in this process. More are spawned, so a script
            that calls this needs the usual `if __name__ == "__main__":`.
        piece_bytes: of input for a shard.
        rows_per_shard: the same for a dataset.
        progress: show a bar on stderr.

    Raises:
        FileNotFoundError: an input, or the tokenizer's folder, that is not there.
        CorpusError: an input that cannot be read, by name and offset.
        ValueError: unknown settings, a slow tokenizer, a folder begun with other settings or
            inputs.
    """
    _check(documents, sentences, segmenter, workers, rows_per_shard)
    folder = Path(folder)
    tokenizer = _fast_tokenizer(tokenizer)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    recipe = _Recipe(
        str(folder), token_dtype(vocab_size).str, documents, column, sentences, segmenter
    )
    paths = _paths(inputs)
    pieces = None
    if paths is not None:
        pieces = [piece for path in paths for piece in pieces_of(path, piece_bytes, documents)]
    plan = _plan(recipe, tokenizer, paths, pieces, inputs, rows_per_shard)
    _begin(folder, plan, tokenizer)
    if not (folder / INDEX).exists():
        remove_parts(folder)
        done = _complete_shards(folder)
        if pieces is not None:
            tasks = [_Task(i, p, p.size) for i, p in enumerate(pieces) if i not in done]
            total = sum(task.size for task in tasks)
        else:
            tasks, total = _row_tasks(inputs, column, rows_per_shard, done), None
        _run(tasks, recipe, workers or os.cpu_count() or 1, total, progress)
        _finish(folder, recipe, vocab_size)
    return Corpus.open(folder)


def _check(documents, sentences, segmenter, workers, rows_per_shard) -> None:
    if documents not in DOCUMENTS:
        raise ValueError(f"documents must be one of {DOCUMENTS}, got {documents!r}")
    if sentences not in SENTENCES:
        raise ValueError(f"sentences must be one of {tuple(SENTENCES)}, got {sentences!r}")
    if isinstance(segmenter, str) and segmenter not in SEGMENTERS:
        raise ValueError(
            f"segmenter must be one of {tuple(SEGMENTERS)} or a function, got {segmenter!r}"
        )
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if rows_per_shard < 1:
        raise ValueError(f"rows_per_shard must be at least 1, got {rows_per_shard}")


def _fast_tokenizer(tokenizer):
    if isinstance(tokenizer, (str, os.PathLike)):
        from transformers import AutoTokenizer

        check_folder("tokenizer", tokenizer)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer must be a fast one (with a tokenizer.json), got {type(tokenizer).__name__}"
        )
    return tokenizer


def _paths(inputs) -> list[Path] | None:
    """The inputs as files; None if they are rows.

    Raises:
        FileNotFoundError: one is missing. ValueError: there are none.
    """
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    if not isinstance(inputs, (list, tuple)):
        return None
    if not inputs:
        raise ValueError("inputs is empty; give files or a dataset")
    if not all(isinstance(i, (str, os.PathLike)) for i in inputs):
        return None
    paths = [Path(i) for i in inputs]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file")
    return paths


def _plan(recipe, tokenizer, paths, pieces, inputs, rows_per_shard: int) -> str:
    """All that decides what the shards hold, as JSON: a corpus is resumed only with the same."""
    settings = {k: v for k, v in dataclasses.asdict(recipe).items() if k != "folder"}
    if callable(recipe.segmenter):
        settings["segmenter"] = getattr(recipe.segmenter, "__qualname__", "function")
    settings["tokenizer"] = hashlib.sha256(
        tokenizer.backend_tokenizer.to_str().encode()
    ).hexdigest()
    if pieces is None:
        rows = getattr(inputs, "_fingerprint", type(inputs).__name__)
        settings |= {"rows": rows, "rows_per_shard": rows_per_shard}
    else:
        settings["files"] = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
        settings["pieces"] = [[p.path, p.start, p.end] for p in pieces]
    return json.dumps(settings, indent=1)


def _begin(folder: Path, plan: str, tokenizer) -> None:
    """Writes the plan, or checks that the one there is the same."""
    path = folder / PLAN
    if path.exists():
        old, new = json.loads(path.read_text()), json.loads(plan)
        changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
        if changed:
            raise ValueError(
                f"{folder} was begun with other {', '.join(changed)}; remove it or choose another "
                f"folder"
            )
        return
    # A kill before the plan was written leaves these.
    begun = {"tokenizer", f"{PLAN}.part"}
    if folder.exists() and any(path.name not in begun for path in folder.iterdir()):
        raise ValueError(f"{folder} holds something else; choose an empty or a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_atomically(path, plan)


def _complete_shards(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()}


def _row_tasks(rows, column: str, count: int, done: set[int]) -> Iterator[_Task]:
    """Cuts rows into tasks; shards that are there are skipped, the first ones unread."""
    first = 0
    while first in done:
        first += 1
    skipped = first * count
    if hasattr(rows, "skip"):
        texts = _texts(rows.skip(skipped), column, skipped)
    else:
        texts = islice(_texts(rows, column, 0), skipped, None)
    number = first
    while batch := list(islice(texts, count)):
        if number not in done:
            yield _Task(number, batch, len(batch))
        number += 1


def _texts(rows: Iterable, column: str, first: int) -> Iterator[str]:
    for number, row in enumerate(rows, first):
        text = row.get(column) if hasattr(row, "get") else None
        if not isinstance(text, str):
            raise ValueError(f"row {number} of the data set has no text in its field {column!r}")
        yield text


def _run(tasks: Iterable[_Task], recipe: _Recipe, workers: int, total, progress: bool) -> None:
    from tqdm import tqdm

    unit = "rows" if total is None else "B"
    with tqdm(total=total, unit=unit, unit_scale=True, disable=not progress) as bar:
        if workers == 1:
            make = _ShardMaker(recipe)
            for task in tasks:
                bar.update(make(task))
            return
        # A forked copy of a process with threads (torch's, the tokenizer's) may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, _start_worker, (recipe,)) as pool:
            try:
                _feed(pool, iter(tasks), 2 * workers, bar)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def _feed(pool, tasks: Iterator[_Task], in_flight: int, bar) -> None:
    """Keeps a bounded number of tasks under way, so that rows are not all read at once."""
    running = {pool.submit(_work, task) for task in islice(tasks, in_flight)}
    while running:
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            bar.update(future.result())
        running |= {pool.submit(_work, task) for task in islice(tasks, len(finished))}


_worker: "_ShardMaker"


def _start_worker(recipe: _Recipe) -> None:
    global _worker
    # Processes are the parallel part; threads of the tokenizer on top would only contend.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = _ShardMaker(recipe)


def _end_with_parent() -> None:
    """A pool's processes outlive a parent that is killed, and would write beside its successor."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(task: _Task) -> int:
    return _worker(task)


class _ShardMaker:
    """Tokenizes a task and writes its shard."""

    def __init__(self, recipe: _Recipe):
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.folder = Path(recipe.folder)
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer" / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.split = SENTENCES[recipe.sentences]
        segmenter = recipe.segmenter
        self.segmenter = SEGMENTERS[segmenter]() if isinstance(segmenter, str) else segmenter
        # Where a written-out space marks words, a sentence inside a document begins with one.
        marks = any(token.startswith("\u0120") for token in self.tokenizer.get_vocab())
        self.joint = " " if marks else ""

    def __call__(self, task: _Task) -> int:
        texts = task.source
        if isinstance(texts, Piece):
            texts = read_piece(texts, documents=self.recipe.documents, column=self.recipe.column)
        write_shard(self.folder / f"{task.number:05d}", self._tokenize(texts))
        return task.size

    def _tokenize(self, texts: Iterable[str]) -> Documents:
        ids, words, lengths, of_document = [], [], [], []
        sentences = self._sentences(texts)
        while batch := list(islice(sentences, _AT_ONCE)):
            plain = [sentence for _, sentence in batch]
            encode = self.tokenizer.encode_batch_fast
            if self.segmenter is not None:
                encode = self.tokenizer.encode_batch
            encodings = encode(plain, add_special_tokens=False)
            for (document, sentence), encoding in zip(batch, encodings, strict=True):
                if not encoding.ids:
                    continue
                ids.append(np.array(encoding.ids, self.recipe.dtype))
                lengths.append(len(encoding.ids))
                of_document.append(document)
                if self.segmenter is not None:
                    words.append(segmented_starts(sentence, encoding.offsets, self.segmenter))
        # Documents without a token have no sentence and so do not appear.
        first = np.diff(np.array(of_document, np.int64), prepend=-1) != 0
        return Documents(
            np.concatenate(ids) if ids else np.empty(0, self.recipe.dtype),
            cu_seqlens_of(np.array(lengths, np.int64)),
            np.append(np.flatnonzero(first), len(lengths)).astype(np.int64),
            (np.concatenate(words) if words else np.empty(0, bool)) if self.segmenter else None,
        )

    def _sentences(self, texts: Iterable[str]) -> Iterator[tuple[int, str]]:
        for document, text in enumerate(texts):
            joint = ""
            for sentence in self.split(text):
                if stripped := sentence.strip():
                    yield document, joint + stripped
                    joint = self.joint


def _finish(folder: Path, recipe: _Recipe, vocab_size: int) -> None:
    shards = []
    for number in sorted(_complete_shards(folder)):
        name = f"{number:05d}"
        counts = json.loads((folder / name / "counts.json").read_text())
        # A piece of blank lines makes an empty shard, which readers need not see.
        if counts["documents"]:
            shards.append({"name": name, **counts})
    index = {
        "format": FORMAT,
        "dtype": recipe.dtype,
        "vocab_size": vocab_size,
        "shards": shards,
    }
    write_atomically(folder / INDEX, json.dumps(index, indent=1))
