"""GLUE's nine tasks by name: where their texts and labels stand, and their metrics.

Source: Wang et al. 2019, "GLUE", table 1 and section 3; columns are named as in the dataset
`nyu-mll/glue`.
"""

import csv
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fastbert.tasks.classification import Classification, ClassificationSettings
from fastbert.tasks.tables import ENDINGS, TaskError, read_rows
from fastbert.tasks.task import TaskSettings

logger = logging.getLogger("fastbert")

SET = "set"
"""Column that says which of several evaluation sets a row is of."""


@dataclass(frozen=True)
class Layout:
    """One of the nine.

    Attributes:
        folder: its name in GLUE's archive.
        columns: of the texts and the label, as the dataset names them, each with the column of the
            archive's files.
        labels: names of the classes in the dataset's order, which the archive may write as
            numbers; none where the label is a number.
        metrics: GLUE's, whose mean is the score.
        bare: the columns of files that have no header.
        sets: evaluation sets, where there are several.
    """

    folder: str
    columns: dict[str, str]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    bare: tuple[str, ...] = ()
    sets: tuple[str, ...] = field(default=())

    @property
    def texts(self) -> list[str]:
        """Names of the columns of the one text or the two."""
        return [name for name in self.columns if name != "label"]

    def files(self, split: str) -> dict[str, str | None]:
        """Files of a split, each with its set."""
        stem = {"train": "train", "validation": "dev", "test": "test"}.get(split)
        if stem is None:
            raise TaskError(f"split must be train, validation or test, got {split!r}")
        if stem == "train" or not self.sets:
            return {f"{stem}.tsv": None}
        return {f"{stem}_{name}.tsv": name for name in self.sets}


ENTAILMENT = ("entailment", "not_entailment")
SENTENCES = {"sentence1": "sentence1", "sentence2": "sentence2"}
LAYOUTS = {
    "cola": Layout(
        "CoLA",
        {"sentence": "sentence", "label": "label"},
        ("unacceptable", "acceptable"),
        ("matthews",),
        bare=("source", "label", "note", "sentence"),
    ),
    "sst2": Layout("SST-2", {"sentence": "sentence", "label": "label"}, ("negative", "positive")),
    "mrpc": Layout(
        "MRPC",
        {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        ("not_equivalent", "equivalent"),
        ("accuracy", "f1"),
    ),
    "stsb": Layout("STS-B", {**SENTENCES, "label": "score"}, (), ("pearson", "spearman")),
    "qqp": Layout(
        "QQP",
        {"question1": "question1", "question2": "question2", "label": "is_duplicate"},
        ("not_duplicate", "duplicate"),
        ("accuracy", "f1"),
    ),
    "mnli": Layout(
        "MNLI",
        {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
        ("entailment", "neutral", "contradiction"),
        sets=("matched", "mismatched"),
    ),
    "qnli": Layout(
        "QNLI", {"question": "question", "sentence": "sentence", "label": "label"}, ENTAILMENT
    ),
    "rte": Layout("RTE", {**SENTENCES, "label": "label"}, ENTAILMENT),
    "wnli": Layout("WNLI", {**SENTENCES, "label": "label"}, ENTAILMENT[::-1]),
}


class GlueTask(Classification):
    """Classification with the columns, labels and metrics of one of the nine.

    Labels may be names or their numbers. `score` is the mean of GLUE's metrics for the task; of
    MNLI, of the accuracies on the matched and the mismatched set.
    """

    layout: ClassVar[Layout]
    best = "score"

    def __init__(self, settings: TaskSettings, labels=()):
        super().__init__(settings, labels or self.layout.labels)
        problem = "single" if self.layout.labels else "regression"
        if settings.problem != problem:
            raise TaskError(f"problem of {self.name} is {problem}, got {settings.problem!r}")

    def labels_of(self, rows):
        return list(self.layout.labels) or super().labels_of(rows)

    def read(self, source, *, split=None):
        """Rows of a split of GLUE's folder of the task, or of the archive, or of the dataset; or of
        one file, a .tsv being GLUE's.

        Args:
            source: a path, or the name of the dataset.
            split: train (the default), validation or test; of a dataset also its own names.

        Raises:
            TaskError: as `read_rows`; a file without the task's columns.
        """
        path = Path(source)
        if path.suffix.lower() in ENDINGS:
            if path.suffix.lower() != ".tsv" or split is not None:
                return read_rows(path, split=split)
            return list(self._tsv(path))
        folder = self._folder(path)
        split = split or "train"
        if folder is not None:
            parts = [
                self._tsv(folder / name, part) for name, part in self.layout.files(split).items()
            ]
            return [row for rows in parts for row in rows]
        return self._dataset(str(source), split)

    def evaluation_beside(self, source):
        if not isinstance(source, (str, Path)) or Path(source).suffix.lower() in ENDINGS:
            return None
        return source, "validation"

    def _folder(self, path: Path) -> Path | None:
        for folder in (path, path / self.layout.folder):
            if (folder / "train.tsv").is_file():
                return folder
        return None

    def _dataset(self, name: str, split: str) -> list[dict]:
        name = name if ":" in name else f"{name}:{self.name}"
        if not self.layout.sets or split not in ("validation", "test"):
            return read_rows(name, split=split)
        return [
            {**row, SET: part}
            for part in self.layout.sets
            for row in read_rows(name, split=f"{split}_{part}")
        ]

    def _tsv(self, path: Path, part: str | None = None) -> Iterator[dict]:
        """Rows of one of GLUE's files under the dataset's names."""
        if not path.is_file():
            raise TaskError(f"there is no file {path}")
        csv.field_size_limit(1 << 30)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            lines = list(reader)
        head = self.layout.bare
        if not head or "sentence" in lines[0]:
            head, lines = lines[0], lines[1:]
        renamed = {theirs: ours for ours, theirs in self.layout.columns.items()}
        names = [renamed.get(name, name) for name in head]
        whole = [line for line in lines if len(line) == len(names)]
        if len(whole) < len(lines):
            # QQP has lines that are broken in the archive itself.
            logger.warning(
                "%s: %d of %d lines do not have the %d fields of the header and are left out",
                *(path, len(lines) - len(whole), len(lines), len(names)),
            )
        if not whole:
            raise TaskError(f"{path} has no rows with the fields {', '.join(head)}")
        for line in whole:
            row = dict(zip(names, line, strict=True))
            yield row if part is None else {**row, SET: part}

    def _names(self, row):
        (name,) = super()._names(row)
        numbers = {str(number): label for number, label in enumerate(self.layout.labels)}
        return [numbers.get(name, name)]

    def metrics(self, rows, answers):
        found = super().metrics(rows, answers)
        if "f1" in self.layout.metrics:
            found["f1"] = self._f1(rows, answers)
        chosen = list(self.layout.metrics)
        sets = {row.get(SET) for row in rows} & set(self.layout.sets)
        if sets:
            chosen = [f"accuracy_{name}" for name in sorted(sets)]
            for name in sorted(sets):
                of_set = [i for i, row in enumerate(rows) if row.get(SET) == name]
                part = super().metrics([rows[i] for i in of_set], [answers[i] for i in of_set])
                found[f"accuracy_{name}"] = part["accuracy"]
        return {"score": float(np.mean([found[name] for name in chosen])), **found}

    def _f1(self, rows, answers) -> float:
        """F1 of the second label, which is GLUE's positive one."""
        from sklearn.metrics import f1_score

        truth = [self._names(row)[0] for row in rows]
        given = [answer["label"] for answer in answers]
        return float(f1_score(truth, given, pos_label=self.layout.labels[1], zero_division=0))


def _task(name: str, layout: Layout) -> type[GlueTask]:
    texts = layout.texts
    defaults = {
        "text": texts[0],
        "pair": texts[1] if len(texts) == 2 else None,
        "problem": "single" if layout.labels else "regression",
    }
    title = layout.folder.replace("-", "")
    settings = make_dataclass(
        f"{title}Settings",
        [(n, str | None if n == "pair" else str, value) for n, value in defaults.items()],
        bases=(ClassificationSettings,),
        frozen=True,
        kw_only=True,
    )
    settings.__doc__ = ClassificationSettings.__doc__
    options = {"name": name, "layout": layout, "settings_class": settings}
    return type(title, (GlueTask,), {"__doc__": f"{layout.folder} of GLUE.", **options})


GLUE_TASKS = {name: _task(name, layout) for name, layout in LAYOUTS.items()}
