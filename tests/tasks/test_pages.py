"""Every block of the pages in docs/ runs, and prints what its comments say.

Blocks of a page share their names. `python` is executed; of `sh` every line is a fastbert command,
run in this process. A comment behind a print is what it prints, up to `...`. A block that cannot
run says why in the comment before it: `<!-- not run: reason -->`.
"""

import glob
import json
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import transformers
import yaml
from typer.testing import CliRunner

from fastbert.cli.main import app
from fastbert.models.auto_classes import _auto_classes
from fastbert.testing.inputs import small_bert_config

pytest.importorskip("tyro")
pytest.importorskip("sentence_transformers")
DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
# In place of the recipe that takes minutes.
QUICK = "quick.yaml"
# Pages that show how something is called and are covered by tests of their own.
ELSEWHERE = {
    "cpu_inference.md": "tests/test_embedder.py",
    "distillation.md": "tests/train/test_distillation.py",
    "graphs.md": "tests/train/test_graphed_step.py",
    "peers.md": "tests/peers",
}


def _texts(folder: Path) -> None:
    generator = random.Random(0)
    words = [a + b + c for a in "bdfgk" for b in "aeiou" for c in "lmnr"]
    for name, documents in (("one", 40), ("two", 40), ("held/out", 10)):
        path = folder / "texts" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = [" ".join(generator.choices(words, k=8)) for _ in range(4 * documents)]
        path.write_text("\n\n".join("\n".join(sentences[i::documents]) for i in range(documents)))


def _for_data(folder, checkpoint):
    """What the page takes for granted: a tokenizer, indices, Trainer's collator."""
    import fastbert

    _texts(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    collator = fastbert.DataCollatorForLanguageModeling(tokenizer, seed=0)
    names = {"tokenizer": tokenizer, "indices": np.arange(4), "transformers": transformers}
    return names | {"collator": collator}


def _for_pretraining(folder, checkpoint):
    """The page's recipe with a model and steps of a second."""
    _texts(folder)
    quick = {
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 48,
        },
        "precision": "fp32",
        "phases": [{"steps": 3, "max_length": 48, "tokens_per_step": 256, "tokens_per_batch": 256}],
        "schedule": {"warmup_steps": 1},
        "log": {"progress": False},
    }
    (folder / QUICK).write_text(yaml.safe_dump(quick))
    return {}


def _for_families(folder, checkpoint):
    """A family without a class of ours."""
    config = small_bert_config().to_diff_dict()
    ernie = transformers.ErnieConfig(**config)
    transformers.ErnieModel(ernie).save_pretrained(folder / "ernie")
    return {}


def _for_search(folder, checkpoint):
    """A cross-encoder."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=1
    )
    model.save_pretrained(folder / "reranker")
    transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder / "reranker")
    return {}


PAGES = {
    "data.md": _for_data,
    "embedding.md": _for_search,
    "faq.md": _for_families,
    "fine-tuning.md": _for_families,
    "pretraining.md": _for_pretraining,
    "replacing-transformers.md": _for_families,
}


@pytest.fixture
def restored():
    """Pages register fastbert's classes, which other tests shall not see."""
    before = [(auto, dict(auto._model_mapping._extra_content)) for auto in _auto_classes()]
    yield
    for auto, content in before:
        auto._model_mapping._extra_content = content


def test_every_page_with_blocks_is_named():
    found = {page.name for page in DOCS.glob("*.md") if BLOCK.search(page.read_text())}
    assert found == PAGES.keys() | ELSEWHERE.keys()
    assert all((DOCS.parent / place).exists() for place in ELSEWHERE.values())


@pytest.mark.parametrize("page", PAGES)
def test_blocks(page, checkpoint, real_checkpoint, restored, tmp_path, monkeypatch, capsys):
    names = PAGES[page](tmp_path, checkpoint)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for reason, language, block in BLOCK.findall((DOCS / page).read_text()):
        block = block.replace("path/to/checkpoint", checkpoint)
        block = block.replace("tiny_cpu", QUICK)
        block = block.replace("path/to/model", real_checkpoint).replace("path/to/", "")
        if reason:
            continue
        if language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                _run(line)
            continue
        assert language == "python", f"a block of {page} says not what it is:\n{block}"
        exec(block, names)
        printed = capsys.readouterr().out
        for expected in PRINTED.findall(block):
            assert expected.removesuffix(" ...") in printed


def _run(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "fastbert"
    arguments = [found for a in arguments for found in (sorted(glob.glob(a)) or [a])]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, f"{line}\n{told.output}"


def test_the_search_page_finds(checkpoint, real_checkpoint, tmp_path, monkeypatch):
    """What its commands print is checked here, since a page shows no output of commands."""
    monkeypatch.chdir(tmp_path)
    rows = [("a dog runs", "a dog is running"), ("a dog runs", "stocks fell")]
    text = "".join(json.dumps({"sentence1": a, "sentence2": b}) + "\n" for a, b in rows)
    told = CliRunner().invoke(app, ["similarity", real_checkpoint, "-"], input=text)
    alike, unlike = (json.loads(line)["similarity"] for line in told.stdout.splitlines())
    assert alike > 0.8 > unlike
