"""Rows from every kind of file, and what is said of broken ones."""

import json

import pytest

from fastbert.tasks.tables import TaskError, check_columns, check_texts, read_rows

ROWS = [{"text": 'a "quoted" one', "label": "yes"}, {"text": "b, with a comma", "label": "no"}]


def _write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


def test_csv_has_quotes_and_tsv_has_none(tmp_path):
    text = 'text,label\n"a ""quoted"" one",yes\n"b, with a comma",no\n'
    assert read_rows(_write(tmp_path / "a.csv", text)) == ROWS
    text = 'text\tlabel\na "quoted" one\tyes\nb, with a comma\tno\n'
    assert read_rows(_write(tmp_path / "a.tsv", "\ufeff" + text)) == ROWS


def test_jsonl_and_parquet(tmp_path):
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    assert read_rows(_write(tmp_path / "a.jsonl", lines)) == ROWS
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == ROWS


def test_conll(tmp_path):
    text = "-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\n\nPeter NNP I-NP B-PER\n"
    assert read_rows(_write(tmp_path / "a.conll", text)) == [
        {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]},
        {"tokens": ["Peter"], "tags": ["B-PER"]},
    ]
    tabs = "New York\tB-LOC\n.\tO\n"
    assert read_rows(_write(tmp_path / "b.conll", tabs)) == [
        {"tokens": ["New York", "."], "tags": ["B-LOC", "O"]}
    ]


def test_squad(tmp_path):
    questions = [
        {"id": "1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]},
        {"id": "2", "question": "When?", "is_impossible": True, "answers": []},
    ]
    data = {"data": [{"paragraphs": [{"context": "Ann sang.", "qas": questions}]}]}
    rows = read_rows(_write(tmp_path / "a.json", json.dumps(data)))
    assert [row["answers"] for row in rows] == [
        {"text": ["Ann"], "answer_start": [0]},
        {"text": [], "answer_start": []},
    ]
    assert rows[1]["context"] == "Ann sang."


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\none\n", "line 2: 2 fields were expected"),
        ("a.csv", "text,label\none,b,c\n", "line 2: 2 fields were expected"),
        ("a.csv", 'text\n"open\n', "a.csv, line 1: unexpected end of data"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.jsonl", '{"a": 1}\n{"a"\n', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected an object"),
        ("a.json", '{"text": "a"}', "is not SQuAD's JSON"),
        ("a.conll", "word\n", "line 1: a word and its tag"),
        ("a.parquet", "text", "not a readable Parquet file"),
        ("a.txt", "text", "no ending that says what is in it"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    with pytest.raises(TaskError, match=message):
        read_rows(_write(tmp_path / name, content))


def test_missing_files_and_wrong_bytes(tmp_path):
    with pytest.raises(TaskError, match="there is no file"):
        read_rows(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"text\n\xff\n")
    with pytest.raises(TaskError, match="not UTF-8"):
        read_rows(tmp_path / "a.csv")
    with pytest.raises(TaskError, match="is a file"):
        read_rows(tmp_path / "a.csv", split="train")


def test_names_of_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(TaskError, match="the split has to be named"):
        read_rows("nobody/nothing")
    with pytest.raises(TaskError, match="neither a file"):
        read_rows("nobody/nothing", split="train")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=features)
    folder = tmp_path / "data"
    rows.to_parquet(folder / "train.parquet")
    assert read_rows(str(folder), split="train") == [
        {"text": "a", "label": "yes"},
        {"text": "b", "label": None},
    ]


def test_columns_are_named_by_their_option():
    message = r"train, row 1: no column 'sentence'; it has text, label\. Name .* by --text COLUMN"
    with pytest.raises(TaskError, match=message):
        check_columns(ROWS, {"text": "sentence", "pair": None}, "train")
    with pytest.raises(TaskError, match="row 2: nothing in the column 'label'; it has text, label"):
        check_columns([ROWS[0], {"text": "a", "label": None}], {"label": "label"}, "train")
    with pytest.raises(TaskError, match="row 1: 'text' must be text, got 3"):
        check_texts([{"text": 3}], ["text"], "train")
