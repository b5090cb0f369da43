"""Every block of docs/fine-tuning.md runs."""

import re
import shlex
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from fastbert.cli.main import app
from fastbert.models.auto_classes import _auto_classes
from fastbert.testing.inputs import small_bert_config

pytest.importorskip("tyro")
pytest.importorskip("sentence_transformers")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def restored():
    """The page registers fastbert's classes, which other tests shall not see."""
    before = [(auto, dict(auto._model_mapping._extra_content)) for auto in _auto_classes()]
    yield
    for auto, content in before:
        auto._model_mapping._extra_content = content


def test_blocks(checkpoint, tokenizer, restored, tmp_path, monkeypatch, capsys):
    config = transformers.ElectraConfig(**small_bert_config().to_diff_dict(), embedding_size=48)
    transformers.ElectraModel(config).save_pretrained(tmp_path / "electra")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text())
    assert {language for language, _ in blocks} == {"python", "sh"}
    names: dict = {}
    for language, block in blocks:
        block = block.replace("path/to/checkpoint", checkpoint).replace("path/to/", "")
        if language == "python":
            exec(block, names)
            continue
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "fastbert"
            told = CliRunner().invoke(app, arguments)
            assert told.exit_code == 0, f"{line}\n{told.output}"
    printed = capsys.readouterr().out
    assert "row 1 has 44 tokens, at most 16 are taken" in printed
    assert names["model"].config._attn_implementation == "fastbert"
