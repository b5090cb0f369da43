"""Compiles every Triton kernel ahead of time for GPUs that need not be there, and reports
registers, spills and shared memory.

    python benchmarks/gpu/kernel_report.py [--check] [--json PATH]

`--check` fails where a kernel spills or passes its limits below. Needs triton and no GPU: Triton
brings the assembler, whose resource report is read with cuobjdump.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

ARCHITECTURES = (80, 90, 100)
DTYPES = ("fp32", "bf16", "fp16")

_BIAS_GELU = {"ERF": True, "HAS_BIAS": True}
_MASK = {"rng_state_ptr": "*i64", "threshold": "i32", "site": "i64"}

# (module, kernel): pointer and scalar types, compile-time constants, most registers allowed.
KERNELS = {
    ("philox", "_row_keep_mask_kernel"): (
        {**_MASK, "mask_ptr": "*i8", "num_rows": "i32", "num_cols": "i32"},
        {"ROWS": 8, "COLS": 256},
        96,
    ),
    ("philox", "_score_keep_mask_kernel"): (
        {
            **_MASK,
            "sequences_ptr": "*i64",
            "mask_ptr": "*i8",
            "num_heads": "i32",
            "seqlen_q": "i32",
            "seqlen_k": "i32",
        },
        {"ROWS": 64, "COLS": 64},
        168,
    ),
    ("bias_gelu", "_bias_gelu_fwd_kernel"): (
        {"x_ptr": "*T", "bias_ptr": "*T", "y_ptr": "*T", "num_cols": "i32"},
        {**_BIAS_GELU, "COLS": 1024},
        64,
    ),
    ("bias_gelu", "_bias_gelu_bwd_kernel"): (
        {
            "dy_ptr": "*T",
            "x_ptr": "*T",
            "bias_ptr": "*T",
            "dx_ptr": "*T",
            "partial_ptr": "*fp32",
            "num_rows": "i32",
            "num_cols": "i32",
        },
        {**_BIAS_GELU, "ROWS": 64, "COLS": 512},
        96,
    ),
    ("bias_gelu", "_sum_parts_kernel"): (
        {"partial_ptr": "*fp32", "dbias_ptr": "*T", "parts": "i32", "num_cols": "i32"},
        {"COLS": 512},
        64,
    ),
}
SHARED_LIMIT = 48 * 1024


def jobs() -> list[tuple[str, str, int, str]]:
    """(module, kernel, architecture, dtype); kernels without a dtype of their own once."""
    return [
        (module, kernel, arch, dtype)
        for (module, kernel), (types, _, _) in KERNELS.items()
        for arch in ARCHITECTURES
        for dtype in (DTYPES if "*T" in types.values() else ("-",))
    ]


def compile_kernel(job: tuple[str, str, int, str]) -> dict:
    """One row of the report."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, kernel, arch, dtype = job
    types, constants, register_limit = KERNELS[module, kernel]
    function = getattr(importlib.import_module(f"fastbert.kernels.{module}"), kernel)
    signature = {name: kind.replace("T", dtype) for name, kind in types.items()}
    signature = {name: signature.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    registers, spilled = resource_usage(compiled.asm["cubin"])
    return {
        "kernel": kernel.strip("_").removesuffix("_kernel"),
        "arch": f"sm_{arch}",
        "dtype": dtype,
        "registers": registers,
        "register_limit": register_limit,
        "spilled_bytes": spilled,
        "shared_bytes": compiled.metadata.shared,
    }


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory (spills) of the one kernel in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage:\n{text}")
    return int(found[1]), int(found[2]) + int(found[3])


def cuobjdump() -> str:
    """The tool that comes with triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def faults(row: dict) -> list[str]:
    """What about this row is over its limits."""
    name = f"{row['kernel']} {row['arch']} {row['dtype']}"
    found = []
    if row["spilled_bytes"]:
        found.append(f"{name}: spills {row['spilled_bytes']} bytes")
    if row["registers"] > row["register_limit"]:
        found.append(f"{name}: {row['registers']} registers, limit {row['register_limit']}")
    if row["shared_bytes"] > SHARED_LIMIT:
        found.append(f"{name}: {row['shared_bytes']} bytes of shared memory, limit {SHARED_LIMIT}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(compile_kernel, jobs()))
    print(f"{'kernel':24}{'arch':8}{'dtype':7}{'registers':>10}{'spilled':>9}{'shared':>8}")
    for row in rows:
        print(
            f"{row['kernel']:24}{row['arch']:8}{row['dtype']:7}{row['registers']:>10}"
            f"{row['spilled_bytes']:>9}{row['shared_bytes']:>8}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [fault for row in rows for fault in faults(row)]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
