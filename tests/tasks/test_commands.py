"""`fastbert finetune`, `evaluate` and `predict` from files to what they print."""

import csv
import json

import pytest
from typer.testing import CliRunner

from fastbert.cli.main import app

pytest.importorskip("tyro")


def _run(*arguments, text=None, ok=True):
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    assert (result.exit_code == 0) is ok, result.output
    return result


def _table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def trained(checkpoint, reviews, tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    train = _table(folder / "train.csv", reviews[:64])
    judged = _table(folder / "judged.csv", reviews[64:])
    told = _run(
        *("finetune", "classification", checkpoint, "--train", train, "--evaluation", judged),
        *("--output", folder / "model", "--epochs", 5, "--batch-size", 8),
        *("--learning-rate", 3e-3, "--layer-decay", 1, "--no-progress"),
    )
    assert "accuracy 1.0000" in told.stdout
    assert f"in {folder / 'model'}" in told.stdout
    return folder


def test_evaluate(trained):
    told = _run("evaluate", trained / "model", trained / "judged.csv")
    assert "accuracy 1.0000" in told.stdout
    told = _run("evaluate", trained / "model", trained / "judged.csv", "--json")
    assert json.loads(told.stdout)["accuracy"] == 1


def test_predict_from_a_file_and_from_standard_input(trained):
    told = _run("predict", trained / "model", trained / "judged.csv")
    answers = [json.loads(line) for line in told.stdout.splitlines()]
    assert len(answers) == 32
    assert {a["label"] for a in answers} == {"negative", "positive"}
    lines = '{"body": "the film was awful"}\n\n{"body": "fine"}\n'
    told = _run("predict", trained / "model", "-", "--text", "body", text=lines)
    labels = [json.loads(line)["label"] for line in told.stdout.splitlines()]
    assert labels == ["negative", "positive"]
    told = _run("predict", trained / "model", "-", "--text", "body", "--table", text=lines)
    assert told.stdout.splitlines() == ["label", "negative", "positive"]


@pytest.mark.parametrize("task", ["bi-encoder", "cross-encoder"])
def test_encoders_are_trained(checkpoint, task, tmp_path):
    pytest.importorskip("sentence_transformers")
    rows = [
        {"query": f"{number} ?", "positive": f"it is {word}", "score": number % 2}
        for number, word in enumerate(["one", "two", "six", "ten"] * 4)
    ]
    told = _run(
        *("finetune", task, checkpoint, "--train", _table(tmp_path / "train.csv", rows)),
        *("--output", tmp_path / "model", "--epochs", 1, "--no-progress", "--max-length", 16),
        *(("--second", "positive") if task == "cross-encoder" else ("--chunk", 2)),
    )
    assert ("spearman" if task == "cross-encoder" else "ndcg@10") in told.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
    judge = ("evaluate", tmp_path / "model", tmp_path / "train.csv")
    metrics = json.loads(_run(*judge, "--json").stdout)
    assert ("spearman" if task == "cross-encoder" else "recall@10") in metrics
    again = _run(
        "evaluate", tmp_path / "model", tmp_path / "train.csv", "--no-accelerated", "--json"
    )
    assert json.loads(again.stdout) == pytest.approx(metrics, abs=1e-4)
    told = _run("evaluate", tmp_path / "model", tmp_path / "train.csv", "--first", "q", ok=False)
    assert "no column 'q'" in told.stderr
    told = _run("predict", tmp_path / "model", tmp_path / "train.csv", ok=False)
    assert "no answers of its own: use `fastbert" in told.stderr


def test_help_without_a_model():
    """Of options that a model's task decides only the usage."""
    told = _run("--help").stdout
    assert "MODEL DATA [--json] ...`" in " ".join(told.replace("│", " ").split())
    assert " `." not in told
    for command in ("evaluate", "predict"):
        assert f"Usage: fastbert {command} MODEL DATA" in _run(command, "--help").stdout
    for command, option in (("fill-mask", "--top"), ("rerank", "--passages")):
        told = _run(command, "--help").stdout
        assert option in told and "--batch-size" in told
    assert "--overlong" in _run("similarity", "--help").stdout


@pytest.mark.parametrize("command", ["finetune", "evaluate", "predict"])
def test_a_command_without_arguments_fails_with_its_usage(command):
    told = CliRunner().invoke(app, [command])
    assert told.exit_code == 2 and f"Usage: fastbert {command}" in told.stdout


def test_help_lists_the_options_of_a_task():
    told = _run("finetune", "--help").stdout
    assert "TASK is one of classification" in told
    assert "cola" in told and "cross-encoder" in told
    assert "--loss" in _run("finetune", "cross-encoder", "--help").stdout
    told = _run("finetune", "question-answering", "--help").stdout
    assert "--max-answer-length" in told
    assert "--layer-decay" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("finetune", "poetry", "x"), "there is no task 'poetry'; there are classification"),
        (("evaluate", "MODEL", "rows.csv"), "there is no file rows.csv"),
        (("evaluate", "MODEL", "FILE", "--label", "stars"), "no column 'stars'"),
        (("evaluate", "nowhere", "rows.csv"), "has no fastbert_task.json"),
        (("evaluate", "./nowhere", "rows.csv"), "folder: there is no folder './nowhere'"),
        (("predict", "tests/nowhere", "rows.csv"), "there is no folder 'tests/nowhere'"),
        (("fill-mask", "a/b/c", "FILE"), "folder: there is no folder 'a/b/c'; name the folder"),
        (("rerank", "~/model", "FILE"), "folder: there is no folder '~/model'"),
        (("similarity", "nowhere/", "FILE"), "there is no folder"),
        (("fill-mask", "nowhere", "FILE"), "folder: there is no folder 'nowhere', it is not in"),
        (
            ("finetune", "sst2", "nowhere", "--train", "FILE", "--output", "out"),
            "model: there is no folder 'nowhere', it is not in the hub's cache",
        ),
        (
            ("finetune", "bi-encoder", "EMPTY", "--train", "FILE", "--output", "out"),
            "holds no configuration (config.json) and no weights",
        ),
        (("rerank", "EMPTY", "FILE"), "holds no configuration (config.json) and no weights"),
        (("similarity", "EMPTY", "FILE"), "holds no configuration (config.json) and no weights"),
        (
            ("finetune", "cola", "nowhere/", "--train", "FILE", "--output", "out"),
            "model: there is no folder 'nowhere/'",
        ),
        (("predict", "MODEL", "FILE", "--overlong", "cut"), "overlong must be one of"),
        (("predict", "MODEL", "-"), "standard input has no rows"),
        (
            ("predict", "MODEL", "FILE", "--overlong", "refuse", "--max-length", "8"),
            "tokens, at most 8 are taken",
        ),
    ],
)
def test_what_a_caller_can_mend_is_one_line(trained, arguments, message):
    (trained / "empty").mkdir(exist_ok=True)
    places = {"MODEL": "model", "FILE": "judged.csv", "EMPTY": "empty"}
    arguments = (trained / places[a] if a in places else a for a in arguments)
    told = _run(*arguments, text="", ok=False)
    assert message in told.stderr
    assert "Traceback" not in told.stderr
