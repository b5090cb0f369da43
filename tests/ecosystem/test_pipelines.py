"""transformers' pipelines on our models and on transformers', one by one and in batches.

fill-mask is in tests/models/test_bert_ecosystem.py. transformers 5 has no pipeline for question
answering any more; `fastbert.tasks.question_answering` answers.
"""

import pytest
import torch
import transformers

import fastbert
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed, model_pair

TEXTS = [
    "Angela Merkel was born in Hamburg.",
    "Short.",
    "A third text, a good deal longer than both of the others, so that a batch needs padding.",
]
TASKS = {
    "text-classification": "BertForSequenceClassification",
    "token-classification": "BertForTokenClassification",
    "feature-extraction": "BertModel",
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("task", TASKS)
def test_pipeline_matches_transformers(task, batch_size, real_checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_checkpoint)
    config = small_bert_config(vocab_size=len(tokenizer), num_labels=3)
    ours, theirs = model_pair(TASKS[task], config)
    options = {"aggregation_strategy": "simple"} if task == "token-classification" else {}
    answers = []
    for model in (ours, theirs):
        pipe = transformers.pipeline(
            task, model=model, tokenizer=tokenizer, device="cpu", batch_size=batch_size, **options
        )
        if model is ours:
            with assert_packed():
                answers.append(pipe(TEXTS))
        else:
            answers.append(pipe(TEXTS))
    if task == "feature-extraction":
        # Hidden states at padding are 0 in ours and mean nothing in theirs.
        lengths = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
        answers = [[row[0][:n] for row, n in zip(a, lengths, strict=True)] for a in answers]
    _assert_same(*answers)
    assert len(answers[0]) == len(TEXTS)


def test_pipeline_on_a_real_checkpoint(real_checkpoint):
    """The real weights behind `fastbert.accelerate`; nothing is loaded twice."""
    pipe = transformers.pipeline("feature-extraction", model=real_checkpoint, device="cpu")
    expected = pipe(TEXTS)
    fastbert.accelerate(pipe.model)
    with assert_packed():
        _assert_same(pipe(TEXTS), expected)


def _assert_same(actual, expected):
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            _assert_same(actual[key], expected[key])
    elif isinstance(expected, list) and expected and not isinstance(expected[0], float):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            _assert_same(one, other)
    elif isinstance(expected, (list, float)) or hasattr(expected, "dtype"):
        torch.testing.assert_close(
            torch.as_tensor(actual), torch.as_tensor(expected), rtol=0, atol=2e-5
        )
    else:
        assert actual == expected
