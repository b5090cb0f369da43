"""The demo with little text and little time: table, checkpoint, plot."""

import importlib.util
from pathlib import Path

import pytest
import torch

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
    assert "fastbert's" in printed and "error" in printed
    assert "transformers loads it" in printed
    assert (tmp_path / "loss_and_speed.png").stat().st_size > 10_000
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize("length", range(0, 80, 13))
def test_demo_says_how_to_get_the_checkpoint(demo, tmp_path, monkeypatch, capsys, length):
    """The command stands on one line, wherever a terminal of 80 columns would fold it."""
    missing = tmp_path / ("n" + "o" * length)
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", "--checkpoint", str(missing)])
    assert demo.main() == 1
    assert demo.INSTALL in capsys.readouterr().out


def test_demo_takes_a_number_of_threads(demo, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    wanted = before + 1
    arguments = ["--threads", str(wanted), "--checkpoint", str(tmp_path / "none")]
    monkeypatch.setattr(demo.sys, "argv", ["demo.py", *arguments])
    try:
        demo.main()
        assert torch.get_num_threads() == wanted
    finally:
        torch.set_num_threads(before)
