"""GLUE's nine tasks by name: the archive's layout, the dataset's, and the metrics."""

import math

import numpy as np
import pytest

from fastbert.tasks import TASKS, Predictor, TaskError, TrainingSettings, finetune
from fastbert.tasks.glue import GLUE_TASKS, LAYOUTS
from fastbert.tasks.registry import task_class

# Heads as they stand in the archive; CoLA has none in train.tsv and dev.tsv.
HEADS = {
    "cola": (),
    "sst2": ("sentence", "label"),
    "mrpc": ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
    "stsb": (
        *("index", "genre", "filename", "year", "old_index", "source1", "source2"),
        *("sentence1", "sentence2", "score"),
    ),
    "qqp": ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
    "mnli": ("index", "promptID", "pairID", "sentence1", "sentence2", "label1", "gold_label"),
    "qnli": ("index", "question", "sentence", "label"),
    "rte": ("index", "sentence1", "sentence2", "label"),
    "wnli": ("index", "sentence1", "sentence2", "label"),
}
BY_NAME = ("mnli", "qnli", "rte")


def _label(name, index):
    if name == "stsb":
        return f"{index / 2:.3f}"
    labels = LAYOUTS[name].labels
    return labels[index % len(labels)] if name in BY_NAME else str(index % 2)


def _lines(name, count):
    layout = LAYOUTS[name]
    if name == "cola":
        return [f'gj04\t{_label(name, i)}\t\tHe said "so {i}' for i in range(count)]
    texts = {layout.columns[column] for column in layout.texts}
    lines = ["\t".join(HEADS[name])]
    for index in range(count):
        fields = [
            f'{column} "number {index}'
            if column in texts
            else (_label(name, index) if column == layout.columns["label"] else "0")
            for column in HEADS[name]
        ]
        lines.append("\t".join(fields))
    return lines


@pytest.fixture
def archive(tmp_path):
    """All nine as the archive holds them, with open quotes and a byte order mark."""
    for name, layout in LAYOUTS.items():
        folder = tmp_path / layout.folder
        folder.mkdir()
        parts = [f"_{part}" for part in layout.sets] or [""]
        for stem, count in (("train", 8), *((f"dev{part}", 4) for part in parts)):
            text = "\n".join(_lines(name, count)) + "\n"
            (folder / f"{stem}.tsv").write_text("\ufeff" * (name == "mrpc") + text)
    return tmp_path


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_archive_is_read(archive, name):
    kind = task_class(name)
    task = kind(kind.settings_class())
    rows = task.read(archive)
    assert rows == task.read(archive / LAYOUTS[name].folder, split="train")
    assert len(rows) == 8
    task.check(rows, "train", labelled=True)
    assert all(f"{index}" in rows[index][task.settings.text] for index in range(8))
    assert (task.settings.pair is None) == (name in ("cola", "sst2"))
    if name == "stsb":
        assert [float(row["label"]) for row in rows] == [i / 2 for i in range(8)]
        assert task.settings.problem == "regression"
    else:
        labels = LAYOUTS[name].labels
        assert [task._names(row) for row in rows] == [[labels[i % len(labels)]] for i in range(8)]
        assert task.labels_of(rows[:1]) == list(labels)
    source, split = task.evaluation_beside(archive)
    judged = task.read(source, split=split)
    assert [row.get("set") for row in judged] == (
        ["matched"] * 4 + ["mismatched"] * 4 if name == "mnli" else [None] * 4
    )


def test_the_names_are_the_nine():
    assert list(LAYOUTS) == ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"]
    assert set(GLUE_TASKS) < set(TASKS)
    assert task_class("SST-2") is TASKS["sst2"]
    counts = {name: len(layout.labels) for name, layout in LAYOUTS.items()}
    assert counts == {**dict.fromkeys(LAYOUTS, 2), "mnli": 3, "stsb": 0}


def test_the_dataset_is_read_by_its_configurations(tmp_path):
    """A local one in the dataset's own layout: classes in the features, -1 where there is none."""
    datasets = pytest.importorskip("datasets")
    head = ["---", "configs:"]
    for name, splits in {
        "mnli": ("train", "validation_matched", "validation_mismatched"),
        "cola": ("train", "validation"),
    }.items():
        layout = LAYOUTS[name]
        (tmp_path / name).mkdir()
        head += [f"- config_name: {name}", "  data_files:"]
        features = {text: datasets.Value("string") for text in layout.texts}
        features["label"] = datasets.ClassLabel(names=list(layout.labels))
        for split in splits:
            head += [f"  - split: {split}", f"    path: {name}/{split}.parquet"]
            columns = {text: ["one", "two"] for text in layout.texts} | {"label": [1, 0]}
            table = datasets.Dataset.from_dict(columns, datasets.Features(features))
            table.to_parquet(tmp_path / name / f"{split}.parquet")
    (tmp_path / "README.md").write_text("\n".join([*head, "---", ""]))
    for name, sets in (("cola", [None] * 2), ("mnli", ["matched"] * 2 + ["mismatched"] * 2)):
        task = task_class(name)(task_class(name).settings_class())
        rows = task.read(tmp_path)
        assert [row["label"] for row in rows] == [LAYOUTS[name].labels[1], LAYOUTS[name].labels[0]]
        assert [row.get("set") for row in task.read(tmp_path, split="validation")] == sets


def _answers(labels):
    return [{"label": label} for label in labels]


def test_metrics_are_glues():
    """Against their formulas, from the counts of a confusion matrix."""
    generator = np.random.default_rng(0)
    truth, given = generator.integers(0, 2, (2, 50))
    tp, fp = int((truth & given).sum()), int(((1 - truth) & given).sum())
    fn, tn = int((truth & (1 - given)).sum()), int(((1 - truth) & (1 - given)).sum())
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    f1 = 2 * tp / (2 * tp + fp + fn)
    accuracy = (tp + tn) / 50
    scores = {"cola": matthews, "mrpc": (accuracy + f1) / 2, "qqp": (accuracy + f1) / 2}
    for name in ("cola", "sst2", "mrpc", "qqp", "qnli", "rte", "wnli"):
        task = task_class(name)(task_class(name).settings_class())
        rows = [{"label": str(label)} for label in truth]
        found = task.metrics(rows, _answers(task.labels[label] for label in given))
        assert found["score"] == pytest.approx(scores.get(name, accuracy))
        assert found["accuracy"] == pytest.approx(accuracy)
        assert ("f1" in found) == (name in ("mrpc", "qqp"))


def test_metrics_of_numbers_and_of_two_sets():
    task = task_class("stsb")(task_class("stsb").settings_class())
    truth, given = np.array([1.0, 2.0, 4.0, 3.5]), np.array([0.5, 3.0, 2.5, 4.0])
    found = task.metrics([{"label": v} for v in truth], [{"value": v} for v in given])
    pearson = np.corrcoef(truth, given)[0, 1]
    spearman = np.corrcoef(truth.argsort().argsort(), given.argsort().argsort())[0, 1]
    assert found["score"] == pytest.approx((pearson + spearman) / 2)
    task = task_class("mnli")(task_class("mnli").settings_class())
    rows = [{"label": "neutral", "set": s} for s in ("matched", "matched", "mismatched")]
    rows.append({"label": 0, "set": "mismatched"})
    found = task.metrics(rows, _answers(["neutral", "entailment", "neutral", "entailment"]))
    assert (found["accuracy_matched"], found["accuracy_mismatched"]) == (0.5, 1.0)
    assert found["score"] == found["accuracy"] == 0.75
    assert task.metrics([{"label": n} for n in (1, 2)], _answers(["neutral"] * 2))["score"] == 0.5


def test_a_task_is_trained_from_the_archive(checkpoint, archive, tmp_path):
    result = finetune(
        "mnli",
        checkpoint,
        archive,
        output=tmp_path / "model",
        training=TrainingSettings(epochs=1, batch_size=8),
    )
    assert {"score", "accuracy_matched", "accuracy_mismatched"} <= result.metrics.keys()
    predictor = Predictor(tmp_path / "model")
    assert type(predictor.task) is TASKS["mnli"]
    judged = predictor.task.read(archive, split="validation")
    assert predictor.evaluate(judged)["score"] == pytest.approx(result.metrics["score"])
    assert "score" in (tmp_path / "model" / "README.md").read_text()


def test_what_does_not_fit(archive, caplog):
    task = task_class("qqp")(task_class("qqp").settings_class())
    path = archive / "QQP" / "train.tsv"
    path.write_text(path.read_text() + "9\t1\tbroken\n")
    assert len(task.read(archive)) == 8
    assert "1 of 9 lines do not have the 6 fields of the header" in caplog.text
    with pytest.raises(TaskError, match="split must be train, validation or test, got 'dev'"):
        task.read(archive, split="dev")
    with pytest.raises(TaskError, match="there is no file"):
        task.read(archive, split="test")
    rows = [{"question1": "a", "question2": "b", "label": "2"}]
    with pytest.raises(TaskError, match="unknown label '2'; the model knows not_duplicate, dupl"):
        task.check(rows, "train", labelled=True)
    (archive / "RTE" / "train.tsv").write_text("sentence\tlabel\none\tentailment\n")
    task = task_class("rte")(task_class("rte").settings_class())
    with pytest.raises(TaskError, match="no column 'sentence1'"):
        task.check(task.read(archive), "train", labelled=True)
