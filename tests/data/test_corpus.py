"""Corpora: what is read is what is stored, errors name their place, kills lose nothing."""

import json
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fastbert.data import Corpus, CorpusError, prepare, train_tokenizer
from fastbert.data import corpus as storage
from fastbert.data.reading import pieces_of, read_piece

TEXTS = [
    "the cat sat on the mat\nit was a grey cat\n",
    "a dog came in\nthe cat ran off\nnobody saw it again\n",
    "rain fell all day\n",
    "\u00fcber the hills and far away\nthe end of the road\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, vocab_size=200, min_frequency=1)


def _ids(tokenizer, texts=TEXTS):
    """Documents of sentences of ids, one call each."""
    return [
        [tokenizer(line, add_special_tokens=False)["input_ids"] for line in text.splitlines()]
        for text in texts
    ]


def _stored(corpus):
    documents = []
    for number in range(len(corpus)):
        shard = corpus.shard(number)
        sentences = np.split(shard.ids, shard.sentences[1:-1])
        sentences = [sentence.tolist() for sentence in sentences]
        bounds = shard.documents.tolist()
        documents += [sentences[a:b] for a, b in pairwise(bounds)]
    return documents


def _write(folder, kind, texts=TEXTS):
    path = folder / f"texts.{kind}"
    if kind == "txt":
        path.write_text("\n".join(texts), "utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": t, "n": 1}) for t in texts), "utf-8")
    else:
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"text": texts}), path, row_group_size=2)
    return path


def _prepare(inputs, tokenizer, folder, **options):
    return prepare(inputs, tokenizer, folder, **{"workers": 1, "progress": False, **options})


@pytest.mark.parametrize("piece_bytes", [1, 50, 1 << 20])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_files(tokenizer, tmp_path, kind, piece_bytes):
    path = _write(tmp_path, kind)
    corpus = _prepare([path], tokenizer, tmp_path / "corpus", piece_bytes=piece_bytes)
    assert _stored(corpus) == _ids(tokenizer)
    assert corpus.num_documents == 4 and corpus.num_sentences == 8
    assert corpus.num_tokens == sum(len(s) for d in _ids(tokenizer) for s in d)
    assert corpus.dtype == np.uint16
    assert isinstance(corpus.shard(0).ids, np.memmap)
    assert (len(corpus) > 1) == (piece_bytes < 1 << 20)


@pytest.mark.parametrize("documents", ["blank-line", "line", "file"])
@pytest.mark.parametrize("size", [1, 7, 20, 64, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_pieces_are_the_file(tmp_path, documents, size, end):
    lines = ["one two", "three", "", "four \u00e9", "", "", "five", "six seven eight", ""]
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
    pieces = pieces_of(path, size, documents)
    assert [p.start for p in pieces[1:]] == [p.end for p in pieces[:-1]]
    assert pieces[-1].end == path.stat().st_size
    whole = pieces_of(path, 1 << 30, documents)
    assert len(whole) == 1
    texts, expected = (
        [t for piece in cut for t in read_piece(piece, documents=documents) if t.strip()]
        for cut in (pieces, whole)
    )
    assert texts == expected
    assert len(texts) == {"blank-line": 3, "line": 5, "file": 1}[documents]
    assert texts[0].startswith("one")


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets(tokenizer, tmp_path, streaming):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    if streaming:
        rows = rows.to_iterable_dataset()
    corpus = _prepare(rows, tokenizer, tmp_path / "corpus", rows_per_shard=3)
    assert _stored(corpus) == _ids(tokenizer)
    assert len(corpus) == 2


def test_processes_make_the_same(tokenizer, tmp_path):
    path = _write(tmp_path, "jsonl")
    one = _prepare(path, tokenizer, tmp_path / "one", piece_bytes=50)
    two = _prepare(path, tokenizer, tmp_path / "two", piece_bytes=50, workers=2)
    assert one.shards == two.shards
    assert _stored(one) == _stored(two)


def test_large_vocabularies_are_stored_wider():
    assert storage.token_dtype(1 << 16) == np.uint16
    assert storage.token_dtype((1 << 16) + 1) == np.uint32


def _broken(kind, tmp_path):
    """A file with one fault, and where it is."""
    if kind == "utf-8":
        path, content = tmp_path / "a.txt", b"good line\nbad \xff line\n"
        path.write_bytes(content)
        return path, content.index(b"\xff"), "not UTF-8"
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        path.write_bytes(b"PAR1 this is no table")
        return path, 0, "not a readable Parquet file"
    lines = {
        "json": (b'{"text": "a"}\n', b'{"text": "\xc3\xa9", "b" 1}\n', "not JSON"),
        "field": (b'{"text": "a"}\n', b'{"body": "b"}\n', "no text in the field 'text'"),
        "surrogate": (b'{"text": "a"}\n', b'{"text": "b \\ud83d"}\n', "half of a surrogate pair"),
        "array": (b'{"text": "a"}\n', b"[1, 2]\n", "no text in the field 'text'"),
    }[kind]
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines[0] + lines[1])
    inside = lines[1].index(b" 1}") + 1 if kind == "json" else 0
    return path, len(lines[0]) + inside, lines[2]


# One fault with two workers shows that errors pass between processes.
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("utf-8", 1),
        ("json", 1),
        ("field", 1),
        ("array", 1),
        ("surrogate", 1),
        ("parquet", 1),
        ("json", 2),
    ],
)
def test_a_broken_file_is_named_with_the_place(tokenizer, tmp_path, kind, workers):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path, offset, reason = _broken(kind, tmp_path)
    with pytest.raises(CorpusError, match=reason) as caught:
        _prepare(path, tokenizer, tmp_path / "corpus", workers=workers)
    assert caught.value.path == str(path) and caught.value.offset == offset
    assert str(caught.value).startswith(f"{path}, byte {offset}: ")
    with pytest.raises(FileNotFoundError, match="writes it when all is done"):
        Corpus.open(tmp_path / "corpus")


def test_a_column_that_is_not_there(tokenizer, tmp_path):
    path = _write(tmp_path, "parquet")
    with pytest.raises(CorpusError, match=r"row 0: no column 'body'; there are \['text'\]"):
        _prepare(path, tokenizer, tmp_path / "corpus", column="body")
    with pytest.raises(ValueError, match="row 1 of the data set has no text"):
        _prepare([{"text": "a"}, {"body": "b"}], tokenizer, tmp_path / "rows")


def _killed(inputs, tokenizer, folder, fatal):
    """Prepares in a forked process that kills itself at the n-th durable write or rename."""
    child = os.fork()
    if child == 0:
        count = iter(range(1 << 30))

        def counted(function):
            def call(*arguments):
                if next(count) == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return call

        storage._write_durably = counted(storage._write_durably)
        storage.sync_folder = counted(storage.sync_folder)
        os.fsync = counted(os.fsync)
        _prepare(inputs, tokenizer, folder, piece_bytes=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_kill_at_any_write_loses_nothing(tokenizer, tmp_path):
    path = _write(tmp_path, "jsonl")
    whole = _prepare(path, tokenizer, tmp_path / "whole", piece_bytes=1)
    kills = 0
    for at in range(0, 1000, 3):
        folder = tmp_path / f"killed {at}"
        code = _killed(path, tokenizer, folder, at)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        complete = {p: p.stat().st_mtime_ns for p in folder.glob("0*/tokens.bin")}
        complete = {p: t for p, t in complete.items() if p.parent.suffix != ".part"}
        resumed = _prepare(path, tokenizer, folder, piece_bytes=1)
        assert _stored(resumed) == _stored(whole)
        assert all(p.stat().st_mtime_ns == t for p, t in complete.items())
    assert kills > 10


def _alive(pid):
    """Whether a process runs; one that waits for its parent to read its exit does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_workers_end_with_a_killed_parent(tokenizer, tmp_path):
    """Else they would write beside the run that takes over."""
    path = _write(tmp_path, "jsonl", TEXTS * 4000)
    options = {"piece_bytes": 20_000, "workers": 2}
    folder = tmp_path / "corpus"
    parent = os.fork()
    if parent == 0:
        _prepare(path, tokenizer, folder, **options)
        os._exit(0)
    while not (folder / "00000").exists() and _alive(parent):
        time.sleep(0.01)
    threads = Path(f"/proc/{parent}/task").glob("*/children")
    workers = [int(pid) for children in threads for pid in children.read_text().split()]
    os.kill(parent, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    assert len(workers) >= 2
    # A bound only so that a worker that stays fails the test instead of stopping the suite.
    for _ in range(3000):
        if not any(map(_alive, workers)):
            break
        time.sleep(0.01)
    assert not any(map(_alive, workers))
    assert not (folder / "corpus.json").exists()
    resumed = _prepare(path, tokenizer, folder, **{**options, "workers": 1})
    assert _stored(resumed) == _ids(tokenizer) * 4000
    assert not list(folder.glob("*.part"))


def test_rows_go_on_where_they_were(tokenizer, tmp_path):
    """Shards that are there are neither read nor written again."""
    rows = [{"text": text} for text in TEXTS]
    folder = tmp_path / "corpus"
    _prepare(rows, tokenizer, folder, rows_per_shard=1)
    (folder / "corpus.json").unlink()
    for file in (folder / "00002").iterdir():
        file.unlink()
    (folder / "00002").rmdir()
    before = (folder / "00001" / "tokens.bin").stat().st_mtime_ns
    assert _stored(_prepare(rows, tokenizer, folder, rows_per_shard=1)) == _ids(tokenizer)
    assert (folder / "00001" / "tokens.bin").stat().st_mtime_ns == before


def test_a_folder_of_something_else(tokenizer, tmp_path):
    path = _write(tmp_path, "txt")
    folder = tmp_path / "corpus"
    _prepare(path, tokenizer, folder)
    with pytest.raises(ValueError, match="was begun with other documents"):
        _prepare(path, tokenizer, folder, documents="line")
    path.write_text("changed")
    with pytest.raises(ValueError, match="was begun with other files, pieces"):
        _prepare(path, tokenizer, folder)
    with pytest.raises(ValueError, match="holds something else"):
        _prepare(path, tokenizer, tmp_path)


def test_a_damaged_shard(tokenizer, tmp_path):
    corpus = _prepare(_write(tmp_path, "txt"), tokenizer, tmp_path / "corpus")
    tokens = tmp_path / "corpus" / "00000" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match="do not fit each other"):
        corpus.shard(0)


def test_arguments_that_are_none(tokenizer, tmp_path):
    path = _write(tmp_path, "txt")
    for setting, message in (
        ({"documents": "page"}, "documents must be one of"),
        ({"sentences": "word"}, "sentences must be one of"),
        ({"segmenter": "scissors"}, "segmenter must be one of"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"piece_bytes": 0}, "piece_bytes must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            _prepare(path, tokenizer, tmp_path / "corpus", **setting)
    with pytest.raises(FileNotFoundError, match="is no file"):
        _prepare(tmp_path / "nothing.txt", tokenizer, tmp_path / "corpus")
    with pytest.raises(ValueError, match="inputs is empty"):
        _prepare([], tokenizer, tmp_path / "corpus")
