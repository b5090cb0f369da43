"""Builds fastbert, with those of its compiled parts that are possible.

`fastbert._C` holds the C++ kernels, `fastbert._C_cuda` the CUDA kernels. FASTBERT_BUILD=auto|none|
cpu|cuda|cuda_only|cuda_emulated: `auto` (the default) builds what this machine has compilers for
and records why it left the rest out; `cpu` and `cuda` fail where they cannot be built; `cuda_only`
is `cuda` without the C++ kernels; `cuda_emulated` builds nothing but `fastbert._C_emulated`, the
CUDA kernels run by a CPU for tests. The choice looks for compilers, never for a GPU;
TORCH_CUDA_ARCH_LIST says for which ones; unset, for those here, or where there are none for all.
Code is compiled against the torch that is installed, so the build must see it:
`pip install --no-build-isolation`.
FASTBERT_SANITIZE=1 builds with address and undefined-behaviour checks (`make sanitize`).
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
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
CHECKS = SANITIZERS if os.environ.get("FASTBERT_SANITIZE") == "1" else []
# For machines that build without a GPU; code for 8.0 runs on 8.6 and 8.9 too.
ARCHITECTURES = ("8.0", "9.0", "10.0", "12.0")
# Beginnings of the names of the sources with the most instances.
LONGEST = ("isa_portable", "attention_bwd", "disentangled_attention")
PACKAGE_DIR = {"fastbert": "fastbert", "fastbert.kernels": "kernels"}


# Parts each FASTBERT_BUILD is about, and those it must build or fail.
WANTED = {
    "auto": (("_C", "_C_cuda"), ()),
    "none": (("_C", "_C_cuda"), ()),
    "cpu": (("_C",), ("_C",)),
    "cuda": (("_C", "_C_cuda"), ("_C", "_C_cuda")),
    "cuda_only": (("_C_cuda",), ("_C_cuda",)),
    "cuda_emulated": (("_C_emulated",), ("_C_emulated",)),
}


def why_not(part: str) -> str | None:
    """Why a compiled part cannot be built here; None if it can be tried."""
    if BUILD == "none":
        return "FASTBERT_BUILD=none"
    if importlib.util.find_spec("torch") is None:
        return "torch is not visible to the build; install torch, then --no-build-isolation"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no C++ compiler (c++) on PATH"
    if part == "_C_emulated" and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the emulation runs on Linux on x86-64"
    return why_no_cuda() if part == "_C_cuda" else None


def why_no_cuda() -> str | None:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").is_file():
        return "no nvcc; install the CUDA toolkit or set CUDA_HOME"
    return None


def relative(paths) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(paths)]


def cpu_part():
    """`fastbert._C`: every file of csrc/cpu, and the registrations."""
    from torch.utils.cpp_extension import CppExtension

    # Compilers default to half of AVX-512 where a loop is theirs to vectorise.
    wide = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    return CppExtension(
        "fastbert._C",
        relative([*CSRC.glob("cpu/*.cpp"), CSRC / "register_cpu.cpp"]),
        include_dirs=[str(CSRC)],
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
            *CHECKS,
        ],
        extra_link_args=["-fopenmp", *CHECKS],
    )


def architectures(nvcc: Path) -> str:
    """TORCH_CUDA_ARCH_LIST with those of ARCHITECTURES that this nvcc compiles for."""
    run = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    known = run.stdout.split()
    found = [a for a in ARCHITECTURES if f"compute_{a.replace('.', '')}" in known]
    return ";".join(found) + "+PTX"  # for what comes after the last


def cuda_part():
    """`fastbert._C_cuda`: every kernel of csrc/cuda by nvcc, and what hands them tensors."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, CUDAExtension

    # torch takes what the GPUs here need, and has no default where there are none.
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and torch.cuda.device_count() == 0:
        os.environ["TORCH_CUDA_ARCH_LIST"] = architectures(Path(CUDA_HOME) / "bin" / "nvcc")
    sources = [*CSRC.glob("cuda/*.cu"), *CSRC.glob("cuda/ops/*.cpp"), CSRC / "register_cuda.cpp"]
    return CUDAExtension(
        "fastbert._C_cuda",
        relative(sources),
        include_dirs=[str(CSRC)],
        extra_compile_args={"cxx": ["-O2", "-g0"], "nvcc": ["-O3", "--threads=1"]},
    )


def emulated_part():
    """`fastbert._C_emulated`: the same kernels by the C++ compiler, and what runs them."""
    from torch.utils.cpp_extension import CppExtension

    # Compilers choose the language by the suffix, so each kernel file gets one with another.
    folder = ROOT / "build" / "cuda_on_cpu"
    folder.mkdir(parents=True, exist_ok=True)
    included = []
    for kernel in CSRC.glob("cuda/*.cu"):
        included.append(folder / f"{kernel.stem}.cpp")
        line = f'#include "{kernel}"\n'
        # Rewritten, it would be newer than what was compiled from it.
        if not included[-1].is_file() or included[-1].read_text() != line:
            included[-1].write_text(line)
    sources = [*included, *CSRC.glob("cuda/ops/*.cpp"), *CSRC.glob("cuda_on_cpu/*.cpp")]
    return CppExtension(
        "fastbert._C_emulated",
        relative([*sources, CSRC / "register_cuda.cpp"]),
        include_dirs=[str(CSRC)],
        extra_compile_args=[
            "-O1",
            "-g0",
            "-ffp-contract=off",
            "-DFASTBERT_CUDA_ON_CPU",
            "-Wno-unknown-pragmas",
            *CHECKS,
        ],
        extra_link_args=CHECKS,
    )


PARTS = {"_C": cpu_part, "_C_cuda": cuda_part, "_C_emulated": emulated_part}


def write_record(folder: Path, part: str, reason: str | None) -> None:
    """Leaves beside the package what was built, for `fastbert.extension`."""
    record = {"built": reason is None, "torch": None, "reason": reason}
    if reason is None:
        import torch

        record["torch"] = torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}.json").write_text(json.dumps(record) + "\n")
    print(f"fastbert.{part}:", reason or f"built with torch {record['torch']}")


def refuse_if_required(part: str, reason: str) -> None:
    """An explicit request that cannot be met is an error."""
    if part in REQUIRED:
        sys.exit(f"FASTBERT_BUILD={BUILD} cannot be built: {reason}")


class BuildPython(build_py):
    """Writes the records of the parts that are not built: without any there is no build_ext."""

    def run(self):
        super().run()
        folder = ROOT if self.editable_mode else Path(self.build_lib)
        for part, reason in LEFT_OUT.items():
            write_record(folder / "fastbert", part, reason)


def build_extension_command():
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        """Builds, or under `auto` records why the compiler failed and goes on."""

        def run(self):
            # Setuptools builds as if not in place, and copies.
            folder = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
            self.record_folder = folder / "fastbert"
            super().run()

        def swig_sources(self, sources, *arguments):
            """Called between setuptools' sorting and compiling: what compiles longest comes first,
            so that no other core waits for it in the end."""
            rest = super().swig_sources(sources, *arguments)
            return sorted(rest, key=lambda source: not Path(source).stem.startswith(LONGEST))

        def build_extensions(self):
            wanted, self.extensions = self.extensions, []
            built = []
            for extension in wanted:
                self.extensions = [extension]
                if self.try_to_build(extension):
                    built.append(extension)
            self.extensions = built

        def try_to_build(self, extension) -> bool:
            part, reason = extension.name.rpartition(".")[2], None
            try:
                super().build_extensions()
            except Exception as error:  # whatever the toolchain raises is the reason
                reason = f"compiling failed: {str(error).splitlines()[0]}"
                refuse_if_required(part, reason)
            write_record(self.record_folder, part, reason)
            return reason is None

    return BuildExt.with_options(use_ninja=importlib.util.find_spec("ninja") is not None)


if BUILD not in WANTED:
    sys.exit(f"FASTBERT_BUILD must be one of {', '.join(WANTED)}, got {BUILD!r}")
ASKED_FOR, REQUIRED = WANTED[BUILD]
REASONS = {part: why_not(part) for part in ASKED_FOR}
LEFT_OUT = {part: reason for part, reason in REASONS.items() if reason is not None}
for part, reason in LEFT_OUT.items():
    refuse_if_required(part, reason)
BUILDABLE = [part for part in ASKED_FOR if part not in LEFT_OUT]

setup(
    packages=PACKAGES,
    package_dir=PACKAGE_DIR,
    package_data={"fastbert.train": ["configs/*.yaml"]},
    ext_modules=[PARTS[part]() for part in BUILDABLE],
    cmdclass={
        "build_py": BuildPython,
        **({"build_ext": build_extension_command()} if BUILDABLE else {}),
    },
)
