"""Compiles every CUDA C++ kernel for GPUs that need not be there, and reports what the machine code
says of each: registers, spills, shared memory, and how many loads and stores are of 16 bytes.

    python benchmarks/gpu/cuda_report.py [--check] [--targets 90,80] [--only gelu] [--json PATH]

Without `--targets` every kernel is compiled for sm_90 and, for sm_80 and sm_100, those of every op
in the dtypes that share a file. `--check` fails where a kernel spills, leaves an SM fewer than
eight warps, or lacks 16-byte loads or stores although its rows allow them. Warnings are errors.
Needs nvcc, and Triton for its cuobjdump; no GPU. `warps` is how many an SM holds at once by the
registers; the shared memory shown is static.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kernel_report
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

ROOT = Path(__file__).resolve().parents[2]
TARGET, SAMPLED_TARGETS = 90, (80, 100)
# Files that repeat the kernels of another in a dtype: left out where a sample is enough.
REPEATED = re.compile(r"_(fp16|fp32)$")
ALL_TARGETS = kernel_report.CUDA_TARGETS
LEAST_WARPS = 8
# Their rows begin on 16-byte boundaries whatever their template arguments.
ALWAYS_WIDE = ("cross_entropy", "distillation")
# They read nothing but the state of the stream; a row's results are two numbers.
NO_WIDE_LOADS = ("row_keep_mask_kernel", "score_keep_mask_kernel")
NO_WIDE_STORES = ("cross_entropy_fwd_kernel", "distillation_fwd_kernel")


def compile_file(source: Path, target: int) -> list[dict]:
    """A row for each kernel of a file, compiled with the flags that setup.py's build gives nvcc.

    Raises:
        RuntimeError: nvcc's own message, where it fails or warns.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernels.cubin"
        command = ["nvcc", "-cubin", f"-arch=sm_{target}", "-std=c++20", "-O3", "-Xptxas", "-v"]
        command += [*COMMON_NVCC_FLAGS, "-Werror", "all-warnings", f"-I{ROOT / 'csrc'}"]
        command += [str(source), "-o", str(cubin)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(f"{source.name} for sm_{target}: {run.stderr}")
        wide = wide_accesses(kernel_report.cuobjdump(cubin.read_bytes(), "-sass"))
    rows = usage(run.stderr)
    names = demangled([row["symbol"] for row in rows])
    return [
        {"kernel": name, "target": target, **row, **wide[row.pop("symbol")]}
        for name, row in zip(names, rows, strict=True)
    ]


def usage(text: str) -> list[dict]:
    """What ptxas says of each kernel."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        re.S,
    )
    rows = []
    for symbol, stores, loads, registers, rest in pattern.findall(text):
        shared = re.search(r"(\d+) bytes smem", rest)
        rows.append(
            {
                "symbol": symbol,
                "registers": int(registers),
                "spills": int(stores) + int(loads),
                "shared_bytes": int(shared[1]) if shared else 0,
                "warps": kernel_report.REGISTERS // (-(-int(registers) // 8) * 8 * 32),
            }
        )
    return rows


def wide_accesses(sass: str) -> dict[str, dict[str, int]]:
    """16-byte loads and stores of each kernel; asynchronous copies are loads."""
    parts = re.split(r"Function : (\w+)", sass)
    return {
        symbol: {
            "wide_loads": len(re.findall(r"\bLDG(?:STS)?\S*\.128", code)),
            "wide_stores": len(re.findall(r"\bSTG\S*\.128", code)),
        }
        for symbol, code in zip(parts[1::2], parts[2::2], strict=True)
    }


def demangled(symbols: list[str]) -> list[str]:
    """`kernel<arguments>`, without namespaces and parameters."""
    run = subprocess.run(["c++filt", *symbols], capture_output=True, text=True, check=True)
    short = run.stdout.replace("(anonymous namespace)::", "").replace("fastbert::", "")
    types = {"__nv_bfloat16": "bf16", "__half": "fp16", "float": "fp32"}
    for long, name in types.items():
        short = short.replace(long, name)
    return [re.sub(r"^void |\((?:\w|[ ,&*])*\)$", "", name) for name in short.splitlines()]


def faults(row: dict) -> list[str]:
    """What about this row is over its limits, or not there."""
    name = f"{row['kernel']} sm_{row['target']}"
    found = []
    if row["spills"]:
        found.append(f"{name}: {row['spills']} bytes of spilled registers")
    if row["warps"] < LEAST_WARPS:
        found.append(f"{name}: {row['warps']} warps to an SM, wanted {LEAST_WARPS}")
    for access, exempt in (("loads", NO_WIDE_LOADS), ("stores", NO_WIDE_STORES)):
        is_wide = row[f"wide_{access}"] or row["kernel"].startswith(exempt)
        if _must_be_wide(row["kernel"]) and not is_wide:
            found.append(f"{name}: no 16-byte {access}")
    return found


def _must_be_wide(kernel: str) -> bool:
    """The last template argument of a kernel, or of its layout, says whether its rows are wide."""
    return kernel.startswith(ALWAYS_WIDE) or re.search(r"(true|Word<16>)[ >]*$", kernel) is not None


def table(rows: list[dict]) -> str:
    """The rows as text."""
    keys = ("registers", "spills", "shared_bytes", "warps", "wide_loads", "wide_stores")
    heads = ("regs", "spills", "shared", "warps", "load 16", "store 16")
    width = max(len(row["kernel"]) for row in rows) + 2
    lines = [f"{'kernel':{width}}{'target':8}" + "".join(f"{h:>9}" for h in heads)]
    for row in rows:
        numbers = "".join(f"{row[key]:>9}" for key in keys)
        lines.append(f"{row['kernel']:{width}}{'sm_' + str(row['target']):8}{numbers}")
    return "\n".join(lines)


def jobs_of(sources: list[Path], targets: str | None) -> list[tuple[Path, int]]:
    """Which files are compiled for which targets, those that take longest first."""
    if targets is not None:
        named = ALL_TARGETS if targets == "all" else tuple(int(t) for t in targets.split(","))
        jobs = [(source, target) for source in sources for target in named]
    else:
        jobs = [(source, TARGET) for source in sources]
        sample = [source for source in sources if not REPEATED.search(source.stem)]
        jobs += [(source, target) for source in sample for target in SAMPLED_TARGETS]
    return sorted(jobs, key=lambda job: -_source_bytes(job[0]))


def _source_bytes(source: Path) -> int:
    """Of a file and the headers it includes first of all: a few lines can hold many instances."""
    headers = re.findall(r'#include "(cuda/.*)"', source.read_text())
    files = [source, *(ROOT / "csrc" / header for header in headers)]
    return sum(file.stat().st_size for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument("--targets", help="everything for these, or for `all`")
    parser.add_argument("--only", default="", help="files whose names contain this")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("no nvcc: nothing was compiled; install the CUDA toolkit", file=sys.stderr)
        return 1
    sources = [s for s in (ROOT / "csrc" / "cuda").glob("*.cu") if arguments.only in s.stem]
    jobs = jobs_of(sources, arguments.targets)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [row for found in pool.map(compile_file, *zip(*jobs, strict=True)) for row in found]
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [fault for row in rows for fault in faults(row)]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
