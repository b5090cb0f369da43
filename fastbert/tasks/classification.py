"""Classes of texts and of pairs of texts: one of several, several at once, or a number."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastbert.tasks.correlations import correlations, number_in
from fastbert.tasks.tables import TaskError, check_columns, check_texts, check_varied
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

PROBLEMS = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


@dataclass(frozen=True, kw_only=True)
class ClassificationSettings(TaskSettings):
    """
    Attributes:
        text: column of the text.
        pair: column of the second text; None: there are no pairs.
        label: column of the label: a name; for `multi` a list of names, or one text with `;`
            between them; for `regression` a number.
        problem: single, multi or regression.
        threshold: probability from which a label of `multi` is given.
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"
    problem: str = "single"
    threshold: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.problem not in PROBLEMS:
            raise TaskError(f"problem must be one of {tuple(PROBLEMS)}, got {self.problem!r}")


class Classification(Task):
    """An overlong text under `stride` has the mean of its features' logits."""

    name = "classification"
    auto_class = "AutoModelForSequenceClassification"
    settings_class = ClassificationSettings

    @property
    def best(self) -> str:
        return {"single": "accuracy", "multi": "f1_micro", "regression": "spearman"}[
            self.settings.problem
        ]

    def labels_of(self, rows):
        if self.settings.problem == "regression":
            return ["value"]
        found = {label for row in rows for label in self._names(row)}
        if not found:
            raise TaskError(f"no row has a label in the column {self.settings.label!r}")
        return sorted(found)

    def check_varied(self, rows):
        if self.settings.problem == "regression":
            check_varied((float(row[self.settings.label]) for row in rows), "number")
        else:
            check_varied((" and ".join(sorted(self._names(row))) for row in rows), "label")

    def check(self, rows, name, *, labelled):
        settings = self.settings
        columns = {"text": settings.text, "pair": settings.pair}
        check_columns(rows, columns, name)
        check_texts(rows, list(columns.values()), name)
        if not labelled:
            return
        check_columns(rows, {"label": settings.label}, name)
        for number, row in enumerate(rows, 1):
            if settings.problem == "regression":
                number_in(row[settings.label], f"{name}, row {number}: {settings.label!r}")
                continue
            unknown = set(self._names(row)) - set(self.labels or self._names(row))
            if unknown:
                raise TaskError(
                    f"{name}, row {number}: unknown label {sorted(unknown)[0]!r}; the model knows "
                    f"{', '.join(self.labels)}"
                )

    def _names(self, row: dict) -> list[str]:
        value = row[self.settings.label]
        if self.settings.problem == "single":
            return [str(value)]
        parts = value.split(";") if isinstance(value, str) else value
        return [str(part).strip() for part in parts if str(part).strip()]

    def encode(self, rows, tokenizer, *, labelled, name="rows"):
        settings = self.settings
        second = None if settings.pair is None else [row[settings.pair] for row in rows]
        encoding, origins = tokenize(
            tokenizer,
            [row[settings.text] for row in rows],
            second,
            max_length=settings.max_length,
            settings=settings,
            name=name,
        )
        features = features_of(encoding)
        if labelled:
            for feature, row in zip(features, origins, strict=True):
                feature["labels"] = self._target(rows[row])
        return Encoded(features, origins)

    def _target(self, row: dict):
        if self.settings.problem == "regression":
            return float(row[self.settings.label])
        names = self._names(row)
        if self.settings.problem == "single":
            return self.labels.index(names[0])
        return [float(label in names) for label in self.labels]

    def collator(self, tokenizer):
        return padding_collator(tokenizer)

    def model_options(self):
        return {
            **super().model_options(),
            "problem_type": PROBLEMS[self.settings.problem],
        }

    def answers(self, rows, encoded, logits):
        sums = np.zeros((len(rows), len(self.labels)))
        np.add.at(sums, encoded.rows, np.asarray(logits, np.float64))
        counts = np.bincount(encoded.rows, minlength=len(rows))
        means = sums / counts[:, None]
        return [self._answer(row) for row in means]

    def _answer(self, logits: np.ndarray) -> dict:
        from scipy.special import expit

        if self.settings.problem == "regression":
            return {"value": float(logits[0])}
        if self.settings.problem == "single":
            scores = softmax(logits)
            chosen: str | list[str] = self.labels[int(scores.argmax())]
        else:
            scores = expit(logits)
            pairs = zip(self.labels, scores, strict=True)
            chosen = [name for name, score in pairs if score >= self.settings.threshold]
        named = {n: float(s) for n, s in zip(self.labels, scores, strict=True)}
        return {"label": chosen, "scores": named}

    def metrics(self, rows, answers):
        if self.settings.problem == "regression":
            return _regression_metrics(
                [float(row[self.settings.label]) for row in rows], [a["value"] for a in answers]
            )
        if self.settings.problem == "multi":
            return self._multi_metrics(rows, answers)
        return _single_metrics([self._names(r)[0] for r in rows], [a["label"] for a in answers])

    def outcomes(self, rows, answers):
        problem = self.settings.problem
        if problem == "regression":
            return Outcomes()
        truths = [self._names(row) for row in rows]
        if problem == "multi":
            pairs = [
                (score, label in truth)
                for truth, answer in zip(truths, answers, strict=True)
                for label, score in answer["scores"].items()
            ]
            return Outcomes(confidence=[p[0] for p in pairs], right=[p[1] for p in pairs])
        truth, given = [names[0] for names in truths], [answer["label"] for answer in answers]
        return Outcomes(
            truth,
            given,
            [max(answer["scores"].values()) for answer in answers],
            [a == b for a, b in zip(truth, given, strict=True)],
        )

    def _multi_metrics(self, rows, answers):
        from sklearn.metrics import f1_score
        from sklearn.preprocessing import MultiLabelBinarizer

        binary = MultiLabelBinarizer(classes=self.labels).fit([])
        truth = binary.transform([self._names(row) for row in rows])
        given = binary.transform([a["label"] for a in answers])
        return {
            "f1_micro": float(f1_score(truth, given, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(truth, given, average="macro", zero_division=0)),
            "exact": float((truth == given).all(1).mean()),
        }


def _single_metrics(truth: Sequence[str], given: Sequence[str]) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    # scikit-learn warns of a single label, of which it takes 0 for the correlation.
    varied = len({*truth, *given}) > 1
    return {
        "accuracy": float(accuracy_score(truth, given)),
        "f1_macro": float(f1_score(truth, given, average="macro", zero_division=0)),
        "matthews": float(matthews_corrcoef(truth, given)) if varied else 0.0,
    }


def _regression_metrics(truth: Sequence[float], given: Sequence[float]) -> dict[str, float]:
    error = np.asarray(truth) - np.asarray(given)
    return {**correlations(truth, given), "mse": float((error**2).mean())}
