"""Spans by characters, long contexts, no answers, and SQuAD's metrics."""

import numpy as np
import pytest

from fastbert.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringSettings,
    normalized,
    squad_f1,
)
from fastbert.tasks.tables import TaskError

FILLER = "It rained for days on end and nobody minded . " * 6
CONTEXT = f"{FILLER}Émile  Zola-Müller paid $1,234.50 (in  gold) to John's sister. {FILLER}"
NAME, PRICE = "Émile  Zola-Müller", "$1,234.50 (in  gold)"


def _row(answer, question="Who paid?"):
    found = [answer] if answer else []
    starts = [CONTEXT.index(a) for a in found]
    return {
        "question": question,
        "context": CONTEXT,
        "answers": {"text": found, "answer_start": starts},
    }


def _task(**settings):
    settings = {"max_length": 64, "stride": 24, **settings}
    return QuestionAnswering(QuestionAnsweringSettings(**settings))


def _sure_logits(encoded, width=70):
    """A model that knows the spans of labelled features; padded as Trainer does."""
    logits = np.full((2, len(encoded.features), width), -100.0)
    for index, feature in enumerate(encoded.features):
        logits[:, index, : len(feature["input_ids"])] = 0
        logits[0, index, feature["start_positions"]] = 9
        logits[1, index, feature["end_positions"]] = 9
    return tuple(logits)


@pytest.mark.parametrize("answer", [NAME, PRICE, "John's", FILLER[:9]])
def test_answers_are_exactly_what_stands_there(tokenizer, answer):
    row = _row(answer)
    task = _task()
    task.check([row], "train", labelled=True)
    encoded = task.encode([row], tokenizer, labelled=True)
    assert len(encoded.features) > 3
    assert all(len(f["input_ids"]) <= 64 for f in encoded.features)
    assert {f["start_positions"] for f in encoded.features} - {0}
    encoded = encoded.by_length()
    (found,) = task.answers([row], encoded, _sure_logits(encoded))
    assert found["answer"] == answer
    assert CONTEXT[found["start"] : found["end"]] == answer
    assert task.metrics([row], [found]) == {"exact_match": 100, "f1": 100}


def test_n_best_has_no_double_and_falls(tokenizer):
    """Two features show the answer; it is listed once."""
    row = _row(NAME)
    task = _task(n_best=4, stride=40)
    encoded = task.encode([row], tokenizer, labelled=True)
    assert sum(f["start_positions"] > 0 for f in encoded.features) > 1
    generator = np.random.default_rng(0)
    noise = generator.random((2, len(encoded.features), 70))
    logits = tuple(a + b for a, b in zip(_sure_logits(encoded), noise, strict=True))
    (found,) = task.answers([row], encoded, logits)
    spans = [(c["start"], c["end"]) for c in found["n_best"]]
    scores = [c["score"] for c in found["n_best"]]
    assert len(set(spans)) == len(spans) == 4
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1)
    assert found["answer"] == NAME


def test_long_spans_are_passed_over(tokenizer):
    row = _row(NAME)
    task = _task(max_answer_length=3)
    encoded = task.encode([row], tokenizer, labelled=True)
    (found,) = task.answers([row], encoded, _sure_logits(encoded))
    assert all(len(tokenizer.tokenize(c["text"])) <= 3 for c in found["n_best"])


def test_no_answer_has_to_be_allowed(tokenizer):
    row = _row(None)
    with pytest.raises(TaskError, match="there is no answer; set no_answer"):
        _task().check([row], "train", labelled=True)
    task = _task(no_answer=True)
    task.check([row], "train", labelled=True)
    encoded = task.encode([row], tokenizer, labelled=True)
    assert {(f["start_positions"], f["end_positions"]) for f in encoded.features} == {(0, 0)}
    (found,) = task.answers([row], encoded, _sure_logits(encoded))
    assert found["answer"] == ""
    assert found["n_best"][1]["text"]
    assert task.metrics([row], [found]) == {"exact_match": 100, "f1": 100}
    (forced,) = _task().answers([row], encoded, _sure_logits(encoded))
    assert forced["answer"]


def test_a_feature_that_shows_an_answer_outweighs_those_that_do_not(tokenizer):
    """The least null score of all features counts."""
    row = _row(NAME)
    task = _task(no_answer=True)
    encoded = task.encode([row], tokenizer, labelled=True)
    (found,) = task.answers([row], encoded, _sure_logits(encoded))
    assert found["answer"] == NAME
    cautious = _task(no_answer=True, null_threshold=-20)
    (found,) = cautious.answers([row], encoded, _sure_logits(encoded))
    assert found["answer"] == ""


def test_an_answer_behind_a_truncated_end_is_not_shown(tokenizer, caplog):
    row = _row(NAME)
    task = _task(overlong="truncate")
    (feature,) = task.encode([row], tokenizer, labelled=True).features
    assert feature["start_positions"] == feature["end_positions"] == 0
    assert "are truncated" in caplog.text
    with pytest.raises(TaskError, match="at most 64 are taken"):
        _task(overlong="refuse").encode([row], tokenizer, labelled=True)


def test_a_question_that_leaves_no_room(tokenizer):
    row = _row(NAME, question="why " * 100)
    with pytest.raises(TaskError, match="leaves no room for the second within 64 tokens"):
        _task().encode([row], tokenizer, labelled=True)


def test_a_context_without_tokens(tokenizer):
    row = {"question": "Who?", "context": "\u200b"}
    task = _task(no_answer=True)
    encoded = task.encode([row], tokenizer, labelled=False)
    length = len(encoded.features[0]["input_ids"])
    (found,) = task.answers([row], encoded, (np.zeros((1, length)),) * 2)
    assert found["answer"] == ""


@pytest.mark.parametrize(
    ("given", "truth", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("a cat sat", "cat sat down", 0.8),
        ("dog dog", "dog", 2 / 3),
        ("north", "south", 0.0),
        ("", "south", 0.0),
        ("", "", 1.0),
        ("the", "", 1.0),
    ],
)
def test_f1_of_words(given, truth, f1):
    """By hand from the definition of SQuAD's script."""
    assert squad_f1(given, truth) == pytest.approx(f1)


def test_normalizing():
    assert normalized("  The U.S.A., an  Area of a-b ") == "usa area of ab"


def test_the_best_of_several_truths_counts():
    row = {"answers": {"text": ["in the year 1912", "1912", "the"], "answer_start": [0, 0, 0]}}
    task = _task()
    assert task.metrics([row], [{"answer": "1912"}]) == {"exact_match": 100, "f1": 100}
    # "the" is empty once normalized and is no truth beside others.
    assert task.metrics([row], [{"answer": ""}]) == {"exact_match": 0, "f1": 0}
    other = {"answers": {"text": ["a dog"], "answer_start": [0]}}
    metrics = task.metrics([row, other], [{"answer": "year 1912"}, {"answer": "cat"}])
    assert metrics["exact_match"] == 0
    assert metrics["f1"] == pytest.approx(100 * 0.8 / 2)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("Zola", "must map text and answer_start"),
        ({"text": ["a"], "answer_start": []}, "differ in number"),
        ({"text": ["Zola"], "answer_start": [0]}, "'Zola' does not stand at 0, where"),
    ],
)
def test_answers_that_do_not_fit(answers, message):
    row = {"question": "Who?", "context": CONTEXT, "answers": answers}
    with pytest.raises(TaskError, match=message):
        _task().check([row], "train", labelled=True)
