"""Importing fastbert needs neither triton nor the compiled part, and `kernels/` hides nobody."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _run(code, cwd, *args):
    return subprocess.run(
        [sys.executable, *args, "-c", code], cwd=cwd, capture_output=True, text=True
    )


def test_import_needs_no_triton_and_no_compiled_part(tmp_path):
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton" or name in ("fastbert._C", "fastbert.kernels"):
            raise ImportError(name + " was imported")
sys.meta_path.insert(0, Block())
import fastbert
from fastbert import BertModel, accelerate, use_backend
print(fastbert.__version__, BertModel.__name__)
"""
    run = _run(code, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["0.1.0", "BertModel"]


def test_import_names_what_is_missing():
    run = _run("import fastbert; fastbert.BertMoedl", ROOT)
    assert "module 'fastbert' has no attribute 'BertMoedl'" in run.stderr


def test_kernels_folder_steps_aside_for_the_real_package(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("who = 'the real one'\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.who)"
    assert _run(code, ROOT).stdout.strip() == "the real one"


def test_kernels_folder_alone_says_what_it_is():
    """transformers imports any package of that name, so importing it must not raise."""
    run = _run("import kernels; print(kernels.__version__); kernels.get_kernel", ROOT, "-S")
    assert run.stdout.strip() == "0.0.0"
    assert "import fastbert.kernels" in run.stderr


def test_transformers_imports_from_the_repository_root():
    run = _run(
        "from transformers.utils.import_utils import is_kernels_available as k; print(k())", ROOT
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("package", ["", ".data", ".tasks", ".train"])
def test_public_names_are_loaded_when_asked_for(package):
    module = importlib.import_module(f"fastbert{package}")
    for name in module.__all__:
        value = getattr(module, name)
        assert name in dir(module)
        if callable(value):
            assert pickle.loads(pickle.dumps(value)) is value
    with pytest.raises(AttributeError, match=f"module 'fastbert{package}' has no .* 'poetry'"):
        _ = module.poetry


COMMANDS = (
    *("finetune", "finetune classification", "finetune cola", "finetune bi-encoder"),
    *("finetune cross-encoder", "fill-mask", "rerank", "similarity", "evaluate", "predict"),
    *("encode", "pretrain", "distill", "data prepare", "tokenizer train", "env"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_loads_nothing_heavy(command, tmp_path):
    """Libraries of seconds, for a text that needs none of them."""
    code = """
import sys
from fastbert.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "transformers", "sentence_transformers", "datasets", "pandas", "matplotlib"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    arguments = [sys.executable, "-c", code, *command.split(), "--help"]
    run = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "sage: " in run.stdout
