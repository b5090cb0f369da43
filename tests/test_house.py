"""The house holds: every op has its files in every room, and imports follow the arrows."""

import ast
from pathlib import Path

import pytest

import fastbert.ops  # noqa: F401  registers the ops
from fastbert.dispatch import OPS

ROOT = Path(__file__).resolve().parents[1]
FILE = True

# Each place holds FILE or the reason why it is empty.
ROOMS = {
    "reference": "fastbert/reference/{}.py",
    "ops": "fastbert/ops/{}.py",
    "triton": "kernels/{}.py",
    "cpu": "csrc/cpu/{}.cpp",
    "cuda": "csrc/cuda/{}.cu",
    "test": "tests/ops/test_{}.py",
    "benchmark": "benchmarks/ops/bench_{}.py",
}
VENDOR = "cuBLAS serves the matmul"
CUBLAS = "cuBLAS serves the matmul; bias_gelu is its epilogue"
FORWARD = "benchmarks/models times it in whole forwards"
LAYERS = "a GPU runs the layers' own ops"
TABLE = {
    # op: reference, ops, triton, cpu, cuda, test, benchmark
    "add_layer_norm": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "attention": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "bias_gelu": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "disentangled_attention": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "embed_layer_norm": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "encoder": (FILE, FILE, LAYERS, FILE, LAYERS, FILE, FORWARD),
    "geglu": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "linear": (FILE, FILE, VENDOR, FILE, VENDOR, FILE, FILE),
    "linear_gelu": (FILE, FILE, FILE, FILE, CUBLAS, FILE, FILE),
    "mlm_cross_entropy": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "mlm_distillation": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "philox": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "rotary": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
    "unpad": (FILE, FILE, FILE, FILE, FILE, FILE, FILE),
}

# Package of fastbert to the packages it may import at module level.
ARROWS = {
    "fastbert": {"fastbert.lazy"},
    "fastbert.differences": set(),
    "fastbert.dispatch": set(),
    "fastbert.extension": set(),
    "fastbert.folders": set(),
    "fastbert.lazy": set(),
    "fastbert.cache": {"fastbert.extension"},
    "fastbert.watch": {"fastbert.extension"},
    "fastbert.reference": {"fastbert.reference"},
    "fastbert.ops": {"fastbert.dispatch", "fastbert.reference", "fastbert.ops"},
    "fastbert.padding": {"fastbert.dispatch", "fastbert.ops"},
    "fastbert.encoder": {
        "fastbert.cache",
        "fastbert.dispatch",
        "fastbert.ops",
        "fastbert.padding",
        "fastbert.reference",
    },
    "fastbert.encoder_inference": {
        "fastbert.cache",
        "fastbert.dispatch",
        "fastbert.encoder",
        "fastbert.ops",
        "fastbert.padding",
    },
    "fastbert.encoder_disentangled": {
        "fastbert.cache",
        "fastbert.encoder",
        "fastbert.ops",
        "fastbert.padding",
        "fastbert.reference",
    },
    "fastbert.encoder_prenorm": {
        "fastbert.cache",
        "fastbert.encoder",
        "fastbert.ops",
        "fastbert.padding",
        "fastbert.reference",
    },
    "fastbert.models": {
        "fastbert.cache",
        "fastbert.dispatch",
        "fastbert.encoder",
        "fastbert.encoder_disentangled",
        "fastbert.encoder_inference",
        "fastbert.encoder_prenorm",
        "fastbert.folders",
        "fastbert.models",
        "fastbert.ops",
        "fastbert.padding",
        "fastbert.reference",
        "fastbert.watch",
    },
    "fastbert.capture": set(),
    "fastbert.graphed_forward": {"fastbert.capture", "fastbert.padding"},
    "fastbert.embedder": {
        "fastbert.embedding_workers",
        "fastbert.models",
        "fastbert.padding",
        "fastbert.sentence_modules",
    },
    "fastbert.embedding_workers": set(),
    "fastbert.sentence_modules": {"fastbert.folders", "fastbert.ops"},
    "fastbert.encoding": {"fastbert.data", "fastbert.embedder", "fastbert.tasks"},
    "fastbert.optim": {"fastbert.dispatch", "fastbert.optim", "fastbert.peers"},
    "fastbert.train": {
        "fastbert",
        "fastbert.capture",
        "fastbert.data",
        "fastbert.differences",
        "fastbert.folders",
        "fastbert.lazy",
        "fastbert.models",
        "fastbert.ops",
        "fastbert.optim",
        "fastbert.padding",
        "fastbert.train",
    },
    "fastbert.tasks": {
        "fastbert.differences",
        "fastbert.dispatch",
        "fastbert.embedder",
        "fastbert.folders",
        "fastbert.lazy",
        "fastbert.models",
        "fastbert.optim",
        "fastbert.padding",
        "fastbert.tasks",
    },
    "fastbert.peers": {"fastbert.dispatch"},
    "fastbert.tune": {"fastbert.kernels", "fastbert.ops"},
    "fastbert.env": {"fastbert", "fastbert.dispatch", "fastbert.extension", "fastbert.peers"},
    "fastbert.data": {"fastbert.data", "fastbert.folders", "fastbert.lazy", "fastbert.padding"},
    "fastbert.cli": {"fastbert.cli"},
    "fastbert.__main__": {"fastbert.cli"},
}
# What a room may import from outside.
OUTSIDE = {
    "fastbert.reference": {"torch"},
    "fastbert.ops": {"torch"},
    "fastbert.kernels": {"torch", "triton"},
    "fastbert.peers": {"torch"},
}
STANDARD = {
    "collections",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
    "itertools",
    "json",
    "logging",
    "math",
    "os",
    "pathlib",
    "tempfile",
    "typing",
}


def _sources():
    for path in sorted((ROOT / "fastbert").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, path
    for path in sorted((ROOT / "kernels").glob("*.py")):
        yield f"fastbert.kernels.{path.stem}".removesuffix(".__init__"), path


def _room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 else module


def _imports(path: Path) -> set[str]:
    """Modules imported at the top level of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*inner.split("."))).with_suffix(".py").is_file()
                found.add(inner if is_module else node.module)
    return found


@pytest.mark.parametrize("op", TABLE)
def test_every_op_is_in_every_room(op):
    for (room, pattern), place in zip(ROOMS.items(), TABLE[op], strict=True):
        path = ROOT / pattern.format(op)
        if place is FILE:
            assert path.is_file(), f"{op} has no {path.relative_to(ROOT)}"
        else:
            assert not path.exists(), f"{path.relative_to(ROOT)} exists; the table says: {place}"
        if room in ("triton", "cpu", "cuda"):
            members = [o for o in OPS.values() if o.room == op]
            assert members
            assert all(o.has(room) == (place is FILE) for o in members)


def test_page_says_which_kernel_serves_which_op():
    """docs/kernels.md against the table above."""
    page = (ROOT / "docs" / "kernels.md").read_text()
    rows = [line.split("|")[1:5] for line in page.splitlines() if line.startswith("| `")]
    for op, *served in ([cell.strip() for cell in row] for row in rows):
        _, _, triton, cpu, cuda, *_ = (place is FILE for place in TABLE[op.strip("`")])
        languages = ("C++" if cpu else "PyTorch", "Triton" if triton else "PyTorch")
        assert tuple(served) == (*languages, "CUDA C++" if cuda else "PyTorch"), op
    assert len(rows) == len(TABLE)


def test_table_names_every_op():
    assert TABLE.keys() == {op.room for op in OPS.values()}


@pytest.mark.parametrize(
    ("module", "path"), list(_sources()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_imports_follow_the_arrows(module, path):
    room = _room_of(module)
    imports = _imports(path)
    ours = {_room_of(name) for name in imports if name.split(".")[0] == "fastbert"}
    if room == "fastbert.testing":
        return
    allowed = ARROWS.get(room, set())
    assert ours <= allowed, f"{module} imports {sorted(ours - allowed)}"
    if room in OUTSIDE:
        outside = {n.split(".")[0] for n in imports} - {"fastbert"} - STANDARD
        assert outside <= OUTSIDE[room], f"{module} imports {sorted(outside)}"


def test_no_file_is_named_for_nothing():
    for _, path in _sources():
        assert path.stem not in ("utils", "misc", "helpers", "common_utils")


def test_text_names_no_machine():
    """No paths of a developer's machine, no host of a package registry."""
    words = ("/" + "work/", "/" + "root/", "/" + "tmp/", "pypi." + "org", "pythonhosted." + "org")
    suffixes = {".py", ".md", ".toml", ".h", ".cpp", ".cu", ".cuh", ".txt", ""}
    skipped = {".git", ".venv", "build", "dist", ".hypothesis", ".pytest_cache", ".ruff_cache"}
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT).parts
        if not path.is_file() or path.suffix not in suffixes or skipped & set(inside):
            continue
        if any(part.endswith((".egg-info", "__pycache__")) for part in inside):
            continue
        text = path.read_text(errors="ignore")
        for word in words:
            assert word not in text, f"{path.relative_to(ROOT)} names {word}"
