"""Features, answers and metrics of classes; fine-tuning itself is in test_finetuning.py."""

import warnings

import numpy as np
import pytest

from fastbert.tasks.classification import Classification, ClassificationSettings
from fastbert.tasks.tables import TaskError

LONG = "word " * 40


def _task(labels=(), **settings):
    return Classification(ClassificationSettings(max_length=16, **settings), labels)


def test_labels_become_numbers_in_sorted_order(tokenizer):
    rows = [{"text": "a b", "label": "z"}, {"text": "c", "label": "a"}]
    task = _task(_task().labels_of(rows))
    assert task.labels == ["a", "z"]
    encoded = task.encode(rows, tokenizer, labelled=True)
    assert [f["labels"] for f in encoded.features] == [1, 0]
    assert tokenizer.decode(encoded.features[0]["input_ids"]) == "[CLS] a b [SEP]"
    assert "labels" not in task.encode(rows, tokenizer, labelled=False).features[0]
    assert task.model_options()["id2label"] == {0: "a", 1: "z"}


@pytest.mark.parametrize(
    ("problem", "same", "other", "told"),
    [
        ("single", "a", "b", "the label 'a'"),
        ("multi", ["b", "a"], ["a"], "the label 'a and b'"),
        ("regression", 3, 4, "the number 3.0"),
    ],
)
def test_labels_that_are_all_the_same_teach_nothing(problem, same, other, told):
    rows = [{"text": "x", "label": same}, {"text": "y", "label": same}]
    task = _task(problem=problem)
    with pytest.raises(TaskError, match=f"all training rows have {told}, so there is nothing"):
        task.check_varied(rows)
    task.check_varied([*rows, {"text": "z", "label": other}])


def test_pairs_have_their_token_types(tokenizer):
    rows = [{"text": "a", "other": "b c"}]
    (feature,) = _task(pair="other").encode(rows, tokenizer, labelled=False).features
    assert tokenizer.decode(feature["input_ids"]) == "[CLS] a [SEP] b c [SEP]"
    assert feature["token_type_ids"] == [0, 0, 0, 1, 1, 1]


def test_truncating_is_said(tokenizer, caplog):
    rows = [{"text": "a"}, {"text": LONG}]
    encoded = _task().encode(rows, tokenizer, labelled=False)
    assert [len(f["input_ids"]) for f in encoded.features] == [3, 16]
    assert "1 of 2 rows have more than 16 tokens (up to 42) and are truncated" in caplog.text


def test_refusing_names_the_row(tokenizer):
    rows = [{"text": "a"}, {"text": LONG}]
    with pytest.raises(TaskError, match="row 2 has 42 tokens, at most 16 are taken"):
        _task(overlong="refuse").encode(rows, tokenizer, labelled=False)


@pytest.mark.parametrize("pair", [None, "other"])
def test_striding_keeps_every_token_and_joins_by_the_mean(tokenizer, pair):
    words = [f"word{i}" for i in range(12)]
    rows = [{"text": "a", "other": "b", "label": "x"}, {"text": "", "label": "y"}]
    rows[1]["other" if pair else "text"] = " ".join(words)
    rows[1]["text"] = rows[1]["text"] or "first"
    task = _task(["x", "y"], overlong="stride", stride=3, pair=pair)
    encoded = task.encode(rows, tokenizer, labelled=True)
    assert encoded.rows[0] == 0
    assert set(encoded.rows[1:]) == {1}
    assert len(encoded.rows) >= 3
    assert [f["labels"] for f in encoded.features] == [0, *[1] * (len(encoded.rows) - 1)]
    seen = " ".join(tokenizer.decode(f["input_ids"]) for f in encoded.features[1:])
    assert all(word in seen.replace(" ", "") for word in words)
    logits = np.zeros((len(encoded.rows), 2))
    logits[0] = 0, 4
    logits[1:, 0] = np.arange(len(encoded.rows) - 1)
    shuffled = encoded.by_length()
    order = [encoded.features.index(f) for f in shuffled.features]
    first, second = task.answers(rows, shuffled, logits[order])
    assert first["label"] == "y"
    assert second["label"] == "x"
    mean = logits[1:, 0].mean()
    assert second["scores"]["x"] == pytest.approx(1 / (1 + np.exp(-mean)))


def test_several_labels(tokenizer):
    rows = [
        {"text": "a", "label": "b; c"},
        {"text": "d", "label": ["a"]},
        {"text": "", "label": ""},
    ]
    task = _task(_task(problem="multi").labels_of(rows), problem="multi")
    task.check(rows, "train", labelled=True)
    encoded = task.encode(rows, tokenizer, labelled=True)
    assert [f["labels"] for f in encoded.features] == [[0, 1, 1], [1, 0, 0], [0, 0, 0]]
    answers = task.answers(rows, encoded, np.array([[-9, 9, 9], [9, 9, -9], [-9.0, -9, -9]]))
    assert [a["label"] for a in answers] == [["b", "c"], ["a", "b"], []]
    metrics = task.metrics(rows, answers)
    # Three right, one too many.
    assert metrics["f1_micro"] == pytest.approx(2 * 3 / (2 * 3 + 1))
    assert metrics["exact"] == pytest.approx(2 / 3)


def test_numbers(tokenizer):
    rows = [{"text": "a", "label": value} for value in ("1.5", 2, "4")]
    task = _task(["value"], problem="regression")
    task.check(rows, "train", labelled=True)
    encoded = task.encode(rows, tokenizer, labelled=True)
    assert [f["labels"] for f in encoded.features] == [1.5, 2.0, 4.0]
    answers = task.answers(rows, encoded, np.array([[0.1], [0.2], [0.4]]))
    assert [a["value"] for a in answers] == [0.1, 0.2, 0.4]
    metrics = task.metrics(rows, answers)
    assert metrics["spearman"] == pytest.approx(1)
    assert metrics["mse"] == pytest.approx((1.4**2 + 1.8**2 + 3.6**2) / 3)
    constant = task.metrics(rows, [{"value": 1.0}] * 3)
    assert constant["spearman"] == constant["pearson"] == 0


def test_metrics_of_one_label():
    task = _task(["a", "b"])
    rows = [{"label": name} for name in "aabb"]
    metrics = task.metrics(rows, [{"label": name} for name in "abbb"])
    assert metrics["accuracy"] == 0.75
    assert metrics["f1_macro"] == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert metrics["matthews"] == pytest.approx(2 / np.sqrt(1 * 3 * 2 * 2))
    # Of few rows that were held out all may have one label.
    with warnings.catch_warnings(action="error"):
        same = task.metrics(rows[:2], [{"label": "a"}] * 2)
    assert same == {"accuracy": 1.0, "f1_macro": 1.0, "matthews": 0.0}


@pytest.mark.parametrize(
    ("settings", "row", "message"),
    [
        ({}, {"text": "a"}, "row 1: no column 'label'; it has text. Name .* by --label"),
        ({}, {"sentence": "a"}, "no column 'text'"),
        ({}, {"text": 1, "label": "a"}, "must be text, got 1"),
        ({}, {"text": "a", "label": "c"}, "unknown label 'c'; the model knows a, b"),
        ({"problem": "regression"}, {"text": "a", "label": "x"}, "must be a number, got 'x'"),
        ({"problem": "regression"}, {"text": "a", "label": "nan"}, "must be finite"),
    ],
)
def test_rows_that_do_not_fit(settings, row, message):
    with pytest.raises(TaskError, match=message):
        _task(["a", "b"], **settings).check([row], "train", labelled=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong": "cut"}, "overlong must be one of"),
        ({"problem": "many"}, "problem must be one of"),
        ({"stride": -1}, "stride must be 0 or more"),
        ({"max_length": 2}, "max_length must be at least 8"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(TaskError, match=message):
        ClassificationSettings(**settings)
