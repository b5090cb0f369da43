"""Words, their tokens, their tags and the entities they make."""

import json

import numpy as np
import pytest
import transformers

from fastbert.data.tokenizer_training import train_tokenizer
from fastbert.tasks.models import load_tokenizer
from fastbert.tasks.tables import TaskError
from fastbert.tasks.token_classification import TokenClassification, TokenClassificationSettings

TAGS = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
ROW = {
    "tokens": ["Josephine", "Schwarzenegger", "left", "New", "York", "."],
    "tags": ["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "O"],
}


def _task(labels=TAGS, **settings):
    settings = {"max_length": 64, **settings}
    return TokenClassification(TokenClassificationSettings(**settings), labels)


def _sure_logits(task, rows, encoded):
    """Logits of a model that knows every tag it can see, padded as Trainer does."""
    width = max(len(f["input_ids"]) for f in encoded.features)
    logits = np.full((len(encoded.features), width, len(task.labels)), -100.0)
    for index, feature in enumerate(encoded.features):
        logits[index, : len(feature["input_ids"])] = 0
        for position, label in enumerate(feature["labels"]):
            if label >= 0:
                logits[index, position, label] = 5
    return logits


def test_tags_that_are_all_the_same_teach_nothing():
    row = {"tokens": ["It", "rained"], "tags": ["O", "O"]}
    with pytest.raises(TaskError, match=r"all training rows have the tag 'O', .* by --tags COLUMN"):
        _task([]).check_varied([row, row])
    _task([]).check_varied([row, ROW])


def test_the_first_token_of_a_word_has_its_tag(tokenizer):
    task = _task()
    assert _task([]).labels_of([ROW]) == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    encoded = task.encode([ROW], tokenizer, labelled=True)
    (feature,) = encoded.features
    tokens = tokenizer.convert_ids_to_tokens(feature["input_ids"])
    tagged = [
        (token, TAGS[label])
        for token, label in zip(tokens, feature["labels"], strict=True)
        if label != -100
    ]
    assert len(tokens) > len(tagged) + 2
    assert [tag for _, tag in tagged] == ROW["tags"]
    assert not any(token.startswith("##") for token, _ in tagged)


def test_entities(tokenizer):
    task = _task()
    encoded = task.encode([ROW], tokenizer, labelled=True)
    (answer,) = task.answers([ROW], encoded, _sure_logits(task, [ROW], encoded))
    assert answer["tags"] == ROW["tags"]
    found = [(e["type"], e["start"], e["end"], e["text"]) for e in answer["entities"]]
    assert found == [("PER", 0, 2, "Josephine Schwarzenegger"), ("LOC", 3, 5, "New York")]
    assert answer["entities"][0]["score"] == pytest.approx(np.exp(5) / (np.exp(5) + 4))


@pytest.mark.parametrize("stride", [0, 1, 4])
@pytest.mark.parametrize("max_length", [9, 10, 11, 12])
def test_striding_finds_every_tag(tokenizer, stride, max_length):
    """Whether a feature ends between words or within one."""
    rows = [
        {key: value * 5 for key, value in ROW.items()},
        {"tokens": ["Paris"], "tags": ["B-LOC"]},
    ]
    task = _task(max_length=max_length, overlong="stride", stride=stride)
    encoded = task.encode(rows, tokenizer, labelled=True)
    assert len(encoded.features) >= 5
    assert all(len(f["input_ids"]) <= max_length for f in encoded.features)
    encoded = encoded.by_length()
    answers = task.answers(rows, encoded, _sure_logits(task, rows, encoded))
    assert [a["tags"] for a in answers] == [row["tags"] for row in rows]
    assert task.metrics(rows, answers)["f1"] == 1


def test_overlapping_features_are_judged_by_context(tokenizer):
    """A word near the edge of one feature and in the midst of another has the latter's tag."""
    row = {"tokens": list("abcdefghijklmnop"), "tags": ["O"] * 16}
    task = _task(max_length=10, overlong="stride", stride=4)
    encoded = task.encode([row], tokenizer, labelled=True)
    # Features hold words 0-7, 4-11, 8-15; each says its own number.
    logits = np.zeros((len(encoded.features), 10, len(TAGS)))
    for index in range(len(encoded.features)):
        logits[index, :, index] = 1
    assert len(encoded.features) == 3
    (answer,) = task.answers([row], encoded, logits)
    assert [TAGS.index(t) for t in answer["tags"]] == [0] * 6 + [1] * 4 + [2] * 6


def test_words_that_no_token_shows(tokenizer):
    """Behind a truncated end, and of characters that the tokenizer drops."""
    row = {"tokens": ["a", "\u200b", *"bcdefghij"], "tags": ["B-LOC"] * 11}
    task = _task(max_length=8)
    encoded = task.encode([row], tokenizer, labelled=True)
    (answer,) = task.answers([row], encoded, _sure_logits(task, [row], encoded))
    assert answer["tags"] == ["B-LOC", "O", *["B-LOC"] * 5, *["O"] * 4]


def test_byte_level_tokenizers_see_words_apart(tmp_path):
    """Without a space in front "York" behind "New" would be the tokens of "NewYork"."""
    texts = ["Josephine Schwarzenegger left New York ."] * 20
    trained = train_tokenizer(texts, kind="bpe", vocab_size=400, lowercase=False, min_frequency=1)
    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    roberta = transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges)
    roberta.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(_task(), str(tmp_path))
    (feature,) = _task().encode([ROW], tokenizer, labelled=True).features
    tokens = tokenizer.convert_ids_to_tokens(feature["input_ids"])
    firsts = [t for t, label in zip(tokens, feature["labels"], strict=True) if label != -100]
    assert len(firsts) == len(ROW["tokens"])
    assert all(token.startswith("\u0120") for token in firsts)


def test_parts_of_speech_have_accuracy_only(tokenizer):
    row = {"tokens": "a dog barks", "tags": ["DET", "NOUN", "VERB"]}
    task = _task(["DET", "NOUN", "VERB"])
    task.check([row], "train", labelled=True)
    assert task.best == "accuracy"
    encoded = task.encode([row], tokenizer, labelled=True)
    (answer,) = task.answers([row], encoded, _sure_logits(task, [row], encoded))
    assert answer["tags"] == row["tags"]
    assert len(answer["scores"]) == 3
    assert "entities" not in answer
    assert task.metrics([row], [{"tags": ["DET", "NOUN", "NOUN"]}]) == {"accuracy": 2 / 3}


def test_entity_scores_are_seqeval():
    """The second entity ends too early: one of two is right."""
    seqeval = pytest.importorskip("seqeval.metrics")
    task = _task()
    given = [["B-PER", "I-PER", "O", "B-LOC", "O", "O"]]
    metrics = task.metrics([ROW], [{"tags": given[0]}])
    assert metrics["f1"] == metrics["precision"] == metrics["recall"] == 0.5
    assert metrics["f1"] == seqeval.f1_score([ROW["tags"]], given)
    assert metrics["accuracy"] == pytest.approx(5 / 6)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": ["a"]}, "no column 'tokens'"),
        ({"tokens": [1], "tags": ["O"]}, "must be a list of words"),
        ({"tokens": "  ", "tags": []}, "holds no word"),
        ({"tokens": ["a"]}, "no column 'tags'"),
        ({"tokens": ["a", "b"], "tags": ["O"]}, "a tag for each of the 2 words"),
        ({"tokens": ["a"], "tags": ["B-X"]}, "unknown tag 'B-X'; the model knows B-LOC"),
    ],
)
def test_rows_that_do_not_fit(row, message):
    with pytest.raises(TaskError, match=message):
        _task().check([row], "train", labelled=True)
