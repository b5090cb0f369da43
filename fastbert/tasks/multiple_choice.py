"""Multiple choice: which of several continuations or answers fits a text.

Source: Devlin et al. 2019, section 4.4.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from fastbert.tasks.tables import TaskError, check_columns, check_texts
from fastbert.tasks.task import (
    Encoded,
    Outcomes,
    Task,
    TaskSettings,
    features_of,
    padding_collator,
    softmax,
    tokenize,
)


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings(TaskSettings):
    """
    Attributes:
        text: column of the text.
        choices: column of the choices, a list of texts.
        label: column of the right one, its index from 0.
    """

    text: str = "text"
    choices: str = "choices"
    label: str = "label"

    def __post_init__(self):
        super().__post_init__()
        if self.overlong == "stride":
            raise TaskError(
                "overlong='stride' has no meaning in multiple choice; truncate or refuse"
            )


class MultipleChoice(Task):
    """All rows have equally many choices, since a batch is one tensor."""

    name = "multiple-choice"
    auto_class = "AutoModelForMultipleChoice"
    best = "accuracy"
    settings_class = MultipleChoiceSettings

    def model_options(self):
        return {}

    def check(self, rows, name, *, labelled):
        settings = self.settings
        check_columns(rows, {"text": settings.text, "choices": settings.choices}, name)
        check_texts(rows, [settings.text], name)
        count = len(rows[0][settings.choices])
        for number, row in enumerate(rows, 1):
            choices = row[settings.choices]
            if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
                raise TaskError(
                    f"{name}, row {number}: {settings.choices!r} must be a list of texts, got "
                    f"{choices!r:.60}"
                )
            if len(choices) != count or count < 2:
                raise TaskError(
                    f"{name}, row {number}: {len(choices)} choices, the first row has {count}; all "
                    "must have equally many, two at least"
                )
        if not labelled:
            return
        check_columns(rows, {"label": settings.label}, name)
        for number, row in enumerate(rows, 1):
            if str(row[settings.label]) not in map(str, range(count)):
                raise TaskError(
                    f"{name}, row {number}: {settings.label!r} must be the index of a choice, 0 to "
                    f"{count - 1}, got {row[settings.label]!r}"
                )

    def encode(self, rows, tokenizer, *, labelled, name="rows"):
        settings = self.settings
        choices = [row[settings.choices] for row in rows]
        count = len(choices[0])
        encoding, _ = tokenize(
            tokenizer,
            [row[settings.text] for row, given in zip(rows, choices, strict=True) for _ in given],
            [choice for given in choices for choice in given],
            max_length=settings.max_length,
            settings=settings,
            name=name,
            texts_of_row=count,
        )
        flat = features_of(encoding)
        features = [
            {field: [one[field] for one in flat[i : i + count]] for field in flat[0]}
            for i in range(0, len(flat), count)
        ]
        if labelled:
            for feature, row in zip(features, rows, strict=True):
                feature["labels"] = int(row[settings.label])
        return Encoded(features, list(range(len(rows))))

    def collator(self, tokenizer):
        # transformers' own collator for this insists on labels.
        return partial(_collated, padding_collator(tokenizer))

    def answers(self, rows, encoded, logits):
        answers: list[dict] = [{} for _ in rows]
        for row, scores in zip(encoded.rows, softmax(logits), strict=True):
            best = int(scores.argmax())
            answers[row] = {
                "choice": best,
                "text": rows[row][self.settings.choices][best],
                "scores": [float(s) for s in scores],
            }
        return answers

    def metrics(self, rows, answers):
        return {"accuracy": float(np.mean(self.outcomes(rows, answers).right))}

    def outcomes(self, rows, answers):
        right = [
            int(row[self.settings.label]) == answer["choice"]
            for row, answer in zip(rows, answers, strict=True)
        ]
        return Outcomes(confidence=[max(a["scores"]) for a in answers], right=right)


def _collated(pad, features: list[dict]) -> dict:
    """Choices padded together: `(B, choices, S)`."""
    import torch

    flat = [
        {name: feature[name][i] for name in feature if name != "labels"}
        for feature in features
        for i in range(len(feature["input_ids"]))
    ]
    batch = {n: v.view(len(features), -1, v.shape[-1]) for n, v in pad(flat).items()}
    if "labels" in features[0]:
        batch["labels"] = torch.tensor([feature["labels"] for feature in features])
    return batch
