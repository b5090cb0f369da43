"""Files of texts to files of vectors: formats, going on after a kill, bad input."""

import json
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

import fastbert
from fastbert import encoding, extension
from fastbert.cli.main import app
from fastbert.encoding import encode_file

TEXTS = ["Yes.", "", "The cat sat on the mat.", "Gr\u00fc\u00dfe und \u4f60\u597d.", "A fifth one."]


@pytest.fixture(scope="module")
def embedder(real_checkpoint):
    return fastbert.Embedder(real_checkpoint)


def _source(folder, ending: str):
    path = folder / f"texts{ending}"
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    if ending == ".txt":
        path.write_text("".join(text + "\n" for text in TEXTS), encoding="utf-8")
    elif ending == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _read(path) -> list[dict]:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("target", [".jsonl", ".parquet"])
@pytest.mark.parametrize("source", [".txt", ".jsonl", ".parquet"])
def test_the_vectors_are_the_embedders(embedder, tmp_path, source, target):
    out = tmp_path / f"vectors{target}"
    assert encode_file(embedder, _source(tmp_path, source), out) == len(TEXTS)
    rows = _read(out)
    assert [row["text"] for row in rows] == TEXTS
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert np.array_equal(vectors, embedder.encode(TEXTS))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([out.name, f"texts{source}"])


@pytest.mark.parametrize("torn", [0, 5])
def test_goes_on_after_a_kill(embedder, tmp_path, torn):
    """Vectors that were written are not computed again, and half of one is dropped."""
    source = _source(tmp_path, ".jsonl")
    whole, again = tmp_path / "whole.jsonl", tmp_path / "again.jsonl"
    encode_file(embedder, source, whole, keep=["id"])
    stream = embedder.stream

    def killed(texts, **options):
        for count, vector in enumerate(stream(texts, **options)):
            if count == 3:
                raise KeyboardInterrupt
            yield vector

    with mock.patch.object(embedder, "stream", killed), pytest.raises(KeyboardInterrupt):
        encode_file(embedder, source, again, keep=["id"])
    part = tmp_path / "again.jsonl.part"
    assert not again.exists() and part.stat().st_size == 3 * 4 * 384
    with part.open("ab") as file:
        file.write(bytes(torn))
    with mock.patch.object(embedder, "stream", wraps=stream) as resumed:
        assert encode_file(embedder, source, again, keep=["id"]) == len(TEXTS)
    assert resumed.call_args.kwargs["first"] == 4
    assert again.read_bytes() == whole.read_bytes()


def test_other_settings_do_not_go_on(embedder, tmp_path):
    source, out = _source(tmp_path, ".jsonl"), tmp_path / "out.jsonl"
    killed = mock.patch.object(encoding, "_append", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        encode_file(embedder, source, out, prompt="query: ")
    with pytest.raises(ValueError, match=r"other settings .*remove both"):
        encode_file(embedder, source, out)
    assert encode_file(embedder, source, out, prompt="query: ") == len(TEXTS)


def test_an_empty_file_gives_an_empty_file(embedder, tmp_path):
    source = tmp_path / "none.jsonl"
    source.write_text("")
    assert encode_file(embedder, source, tmp_path / "out.parquet") == 0
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").num_rows == 0


def test_bad_input_is_refused(embedder, tmp_path):
    source = _source(tmp_path, ".jsonl")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        encode_file(embedder, tmp_path / "missing.txt", tmp_path / "out.jsonl")
    with pytest.raises(FileExistsError, match="is there already"):
        encode_file(embedder, source, source)
    with pytest.raises(ValueError, match="must end in one of"):
        encode_file(embedder, source, tmp_path / "out.csv")
    with pytest.raises(ValueError, match="row 1 has no column 'body'; it has id, text"):
        encode_file(embedder, source, tmp_path / "out.jsonl", column="body")
    with pytest.raises(ValueError, match=r"no column 'title'.* Name the right one by --keep"):
        encode_file(embedder, source, tmp_path / "out.jsonl", keep=["title"])
    # With the right column it begins anew.
    assert list(tmp_path.iterdir()) == [source]
    broken = tmp_path / "broken.parquet"
    broken.write_text("no table")
    with pytest.raises(ValueError, match=r"broken.parquet is not a readable Parquet file"):
        encode_file(embedder, broken, tmp_path / "tables.jsonl")
    with pytest.raises(TypeError, match="row 1: id must be a string, got int"):
        encode_file(embedder, source, tmp_path / "ids.jsonl", column="id")
    source.write_text('{"text": "a"}\nnot JSON\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        encode_file(embedder, source, tmp_path / "lines.jsonl")


def test_command(real_checkpoint, tmp_path):
    source, out = _source(tmp_path, ".txt"), tmp_path / "out.jsonl"
    arguments = ["encode", str(source), str(out), "--model", real_checkpoint]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"5 vectors in {out}" in result.output.replace("\n", "") and len(_read(out)) == 5
    if extension.cpu_isas():
        before = _read(out)
        out.unlink()
        with mock.patch("fastbert.embedder.drop_weights", wraps=fastbert.freeze) as freeze:
            assert CliRunner().invoke(app, [*arguments, "--freeze"]).exit_code == 0
        assert freeze.call_count == 1 and _read(out) == before
        out.unlink()
        result = CliRunner().invoke(app, [*arguments, "--quantize", "weight_only"])
        assert result.exit_code == 0 and len(_read(out)) == 5 and _read(out) != before
    result = CliRunner().invoke(app, [*arguments, "--dtype", "int8"])
    assert result.exit_code == 2 and "dtype must be float32 or bfloat16" in result.output
