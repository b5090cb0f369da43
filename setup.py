"""Builds fastbert, with the compiled part `fastbert._C` where that is possible.

FASTBERT_BUILD=auto|none|cpu|cuda: `auto` (the default) builds what this machine has compilers for
and records why it left the rest out; `cpu` and `cuda` fail where they cannot be built. The choice
looks for compilers, never for a GPU. C++ is compiled against the torch that is installed, so the
build must see it: `pip install --no-build-isolation`. FASTBERT_SANITIZE=1 builds it with address
and undefined-behaviour checks (`make sanitize`).
"""

import importlib.util
import json
import os
import platform
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUILD = os.environ.get("FASTBERT_BUILD", "auto")
PACKAGES = [
    "fastbert",
    *(f"fastbert.{p.parent.name}" for p in sorted((ROOT / "fastbert").glob("*/__init__.py"))),
    "fastbert.kernels",
]
# Pointers in the kernels are aligned to their elements, not to their vectors.
SANITIZERS = [
    "-O1",  # the checks make the optimiser take minutes a file
    "-fsanitize=address,undefined",
    "-fno-sanitize=alignment",
    "-fno-omit-frame-pointer",
]
PACKAGE_DIR = {"fastbert": "fastbert", "fastbert.kernels": "kernels"}


def why_no_extension() -> str | None:
    """Why the compiled part cannot be built here; None if it can be tried."""
    if BUILD not in ("auto", "none", "cpu", "cuda"):
        sys.exit(f"FASTBERT_BUILD must be auto, none, cpu or cuda, got {BUILD!r}")
    if BUILD == "none":
        return "FASTBERT_BUILD=none"
    if importlib.util.find_spec("torch") is None:
        return "torch is not visible to the build; install torch, then --no-build-isolation"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler (c++) on PATH"
    if BUILD == "cuda" and not list((ROOT / "csrc" / "cuda").glob("*.cu")):
        return "there are no CUDA C++ kernels yet"
    return None


def extension():
    """`fastbert._C`: every file of csrc/cpu, and the registrations."""
    from torch.utils.cpp_extension import CppExtension

    sources = [*sorted((ROOT / "csrc" / "cpu").glob("*.cpp")), ROOT / "csrc" / "register_cpu.cpp"]
    # Compilers default to half of AVX-512 where a loop is theirs to vectorise.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    checks = SANITIZERS if os.environ.get("FASTBERT_SANITIZE") == "1" else []
    return CppExtension(
        "fastbert._C",
        [str(s.relative_to(ROOT)) for s in sources],
        include_dirs=[str(ROOT / "csrc")],
        # No trapping or errno arithmetic: without them selections and roundings vectorise. No
        # contraction: what is to be one rounding says so, for the same bits from every compiler.
        extra_compile_args=[
            "-O3",
            "-g0",
            "-fopenmp",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-ffp-contract=off",
            *wide,
            *checks,
        ],
        extra_link_args=["-fopenmp", *checks],
    )


def write_record(folder: Path, reason: str | None) -> None:
    """Leaves beside the package what was built, for `fastbert.extension`."""
    record = {"built": reason is None, "torch": None, "reason": reason}
    if reason is None:
        import torch

        record["torch"] = torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_C.json").write_text(json.dumps(record) + "\n")
    print("fastbert._C:", reason or f"built with torch {record['torch']}")


def refuse_or_record(reason: str) -> None:
    """An explicit request that cannot be met is an error."""
    if BUILD in ("cpu", "cuda"):
        sys.exit(f"FASTBERT_BUILD={BUILD} cannot be built: {reason}")


class BuildPython(build_py):
    """Writes the record of a pure-Python build, which has no build_ext step."""

    def run(self):
        super().run()
        if REASON is not None:
            folder = ROOT if self.editable_mode else Path(self.build_lib)
            write_record(folder / "fastbert", REASON)


def build_extension_command():
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        """Builds, or under `auto` records why the compiler failed and goes on."""

        def run(self):
            reason = None
            try:
                super().run()
            except Exception as error:  # whatever the toolchain raises is the reason
                reason = f"compiling failed: {str(error).splitlines()[0]}"
                refuse_or_record(reason)
                self.extensions = []
            folder = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
            write_record(folder / "fastbert", reason)

    return BuildExt.with_options(use_ninja=importlib.util.find_spec("ninja") is not None)


REASON = why_no_extension()
if REASON is not None and BUILD != "none":
    refuse_or_record(REASON)

setup(
    packages=PACKAGES,
    package_dir=PACKAGE_DIR,
    ext_modules=[] if REASON else [extension()],
    cmdclass={
        "build_py": BuildPython,
        **({} if REASON else {"build_ext": build_extension_command()}),
    },
)
