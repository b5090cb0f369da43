"""Choices of a text."""

import numpy as np
import pytest

from fastbert.tasks.multiple_choice import MultipleChoice, MultipleChoiceSettings
from fastbert.tasks.tables import TaskError

ROWS = [
    {"text": "The dog", "choices": ["barks at night", "is a prime number"], "label": 0},
    {"text": "Seven", "choices": ["barks", "is a prime number"], "label": "1"},
]


def _task(**settings):
    return MultipleChoice(MultipleChoiceSettings(**{"max_length": 16, **settings}))


def test_features_and_answers(tokenizer):
    task = _task()
    task.check(ROWS, "train", labelled=True)
    encoded = task.encode(ROWS, tokenizer, labelled=True)
    assert [f["labels"] for f in encoded.features] == [0, 1]
    shown = [tokenizer.decode(ids) for ids in encoded.features[1]["input_ids"]]
    assert shown == ["[CLS] seven [SEP] barks [SEP]", "[CLS] seven [SEP] is a prime number [SEP]"]
    batch = task.collator(tokenizer)(encoded.features)
    assert batch["input_ids"].shape[:2] == (2, 2)
    assert batch["labels"].tolist() == [0, 1]
    turned = encoded.by_length()
    assert turned.rows == [0, 1]
    answers = task.answers(ROWS, turned, np.array([[2.0, 0], [1, 0]]))
    assert [a["choice"] for a in answers] == [0, 0]
    assert answers[0]["text"] == "barks at night"
    assert answers[0]["scores"][0] == pytest.approx(1 / (1 + np.exp(-2)))
    assert task.metrics(ROWS, answers) == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "choices": "b"}, "must be a list of texts"),
        ({"text": "a", "choices": ["b"]}, "1 choices"),
        ({"text": "a", "choices": ["b", "c"]}, "no column 'label'"),
        ({"text": "a", "choices": ["b", "c"], "label": 2}, "index of a choice, 0 to 1, got 2"),
    ],
)
def test_rows_that_do_not_fit(row, message):
    with pytest.raises(TaskError, match=message):
        _task().check([row], "train", labelled=True)


def test_refusing_names_the_row_and_not_the_choice(tokenizer):
    rows = [*ROWS, {"text": "The dog", "choices": ["runs", "barks " * 20], "label": 0}]
    with pytest.raises(TaskError, match=r"train, row 3 has \d+ tokens, .* \(1 of 3 rows are too"):
        _task(overlong="refuse").encode(rows, tokenizer, labelled=True, name="train")


def test_rows_differ_in_choices():
    three = {"text": "a", "choices": ["b", "c", "d"], "label": 0}
    with pytest.raises(TaskError, match="row 2: 3 choices, the first row has 2"):
        _task().check([ROWS[0], three], "train", labelled=True)


def test_striding_has_no_meaning():
    with pytest.raises(TaskError, match="truncate or refuse"):
        _task(overlong="stride")
