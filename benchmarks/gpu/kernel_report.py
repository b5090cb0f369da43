"""Compiles every Triton kernel ahead of time for GPUs that need not be there, and reports what the
machine code says: registers, spills, shared memory, occupancy, and the inner loop's instructions.

    python benchmarks/gpu/kernel_report.py [--check] [--only attention] [--everywhere] [--json PATH]

`--check` fails where a kernel spills (but for `OLDER_SPILLS`), passes its limits or lacks the
instructions named below.
Needs triton and no GPU: Triton brings the assembler and cuobjdump. Every dtype is compiled for
sm_90 with the shipped tiles, bf16 for the other targets; `--everywhere` adds disentangled
attention's forms with fewer tables for all of them, in every dtype.

The last columns are the innermost loop with the most tensor-core instructions (else the longest
loop), for one pass of a block: cycles of the tensor cores, the special-function units and the fp32
lanes of one SM, by the rates in `MACHINES`. The largest bounds the loop. Of sm_100's tensor
instructions the code does not tell the shapes: `-`.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"

CUDA_TARGETS = (90, 80, 89, 100, 120)
HIP_TARGETS = ("gfx942",)
DTYPES = ("bf16", "fp16", "fp32")


@dataclasses.dataclass(frozen=True)
class Machine:
    """One SM. Sizes: CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability"; rates: its "Throughput of Native Arithmetic Instructions", and dense bf16 peaks of
    the white papers of A100, RTX 4090, H100 and RTX 5090, over SMs and clock."""

    shared_of_block: int
    shared: int
    threads: int
    tensor_flops: int  # a cycle
    fp32_results: int  # a cycle
    special_results: int = 16  # a cycle


MACHINES = {
    80: Machine(163 << 10, 164 << 10, 2048, 2048, 64),
    89: Machine(99 << 10, 100 << 10, 1536, 512, 128),
    90: Machine(227 << 10, 228 << 10, 2048, 4096, 128),
    100: Machine(227 << 10, 228 << 10, 2048, 8192, 128),
    120: Machine(99 << 10, 100 << 10, 1536, 512, 128),
}
REGISTERS = 65536
TILE = ("ROWS", "COLS", "DEPTH", "PARTS", "STEP", "TABLE", "BLOCK_Q", "BLOCK_K", "BLOCK_D")

# Tiles are chosen for the newest Triton, with which nothing is spilled. What the registers of an
# older one make of the same source: spilled loads and stores by kernel, target and dtype.
OLDER_SPILLS = {
    "3.6": {
        ("mlm_cross_entropy_bwd", "sm_80", "bf16"): 2,
        ("linear_gelu_fwd", "sm_120", "bf16"): 6,
        ("gelu_matmul_bwd", "sm_120", "bf16"): 6,
    }
}

INT64_POINTERS = {
    "rng_state_ptr",
    "sequences_ptr",
    "indices_ptr",
    "input_ids_ptr",
    "token_type_ids_ptr",
    "position_ids_ptr",
    "flag_ptr",
    "sorted_ids_ptr",
    "order_ptr",
    "ids_ptr",
    "labels_ptr",
}
FLOAT_POINTERS = {
    "partial_ptr",
    "mean_ptr",
    "rstd_ptr",
    "lse_ptr",
    "soft_lse_ptr",
    "teacher_lse_ptr",
    "delta_ptr",
    "dq_sum_ptr",
    "sums_ptr",
    "loss_ptr",
    "soft_loss_ptr",
    "dloss_ptr",
    "dsoft_loss_ptr",
    "wide_dh_ptr",
}
INT32_POINTERS = {"cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "cu_seqlens_ptr", "buckets_ptr"}
FLOATS = {"eps", "dropout_scale", "softmax_scale", "label_smoothing", "z_loss", "temperature"}
STRIDED = ("q", "k", "v", "dq", "dk", "position_key", "position_query")
# Multiples of 16 in every model, which Triton is told at each launch.
DIVISIBLE = {"num_cols", "part_rows", "depth"} | {
    f"{name}_{step}" for name in STRIDED for step in ("row", "head")
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is compiled, and what must be true of it.

    Args:
        constants: of a dtype's name and a target; tiles, warps and stages as shipped.
        types: arguments whose types their names do not tell.
        least_blocks: blocks of a kernel an SM of sm_90 must hold.
        wide: 16-byte loads must be there (bf16 and fp32).
        tensor_cores: HGMMA must be there on sm_90 for bf16 and fp16, and MMA elsewhere.
        warpgroups: its tiles have the 64 rows HGMMA takes; else MMA must be there on sm_90 too.
        dtypes: it is launched for; the first on every target, the others on the first target.
    """

    constants: Callable[[str, object], dict]
    types: dict[str, str] = dataclasses.field(default_factory=dict)
    least_blocks: int = 4
    wide: bool = True
    tensor_cores: bool = False
    warpgroups: bool = True
    dtypes: tuple[str, ...] = DTYPES


def _tile(module: str, function: str, **constants) -> Callable[[str, object], dict]:
    """Constants with the tile that `function` gives rows of 768 columns."""

    def of(dtype: str, target) -> dict:
        rows, cols, warps = getattr(_module(module), function)(768)
        return {**constants, "ROWS": rows, "COLS": cols, "num_warps": warps}

    return of


def _attention(
    kernel: str, head_dim: int = 64, window: bool = False
) -> Callable[[str, object], dict]:
    def of(dtype: str, target) -> dict:
        import torch

        names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        major = 0 if target in HIP_TARGETS else target // 10
        sizes = _module("attention").blocks(head_dim, names[dtype], kernel, major)
        options = {"DROPOUT": True, "PRECISION": "ieee", "D": head_dim}
        if kernel != "bwd":
            options["WINDOW"] = window
        return {**options, **sizes}

    return of


def _disentangled(
    kernel: str, key: bool = True, query: bool = True, dropout: bool = True, of_keys: bool = False
) -> Callable[[str, object], dict]:
    def of(dtype: str, target) -> dict:
        import torch

        names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        module = _module("disentangled_attention")
        options = {"HAS_KEY": key, "HAS_QUERY": query, "DROPOUT": dropout, "PRECISION": "ieee"}
        if kernel == "bwd_positions":
            options["OF_KEYS"] = of_keys
        else:
            options["BLOCK_B"] = module.BLOCK_B
        sizes = module.blocks(64, names[dtype], kernel, target in HIP_TARGETS)
        return {**options, "D": 64, **sizes}

    return of


def _distances(dtype: str, target) -> dict:
    sizes = _disentangled("bwd_positions")(dtype, target)
    module = _module("disentangled_attention")
    kept = {name: sizes[name] for name in ("D", "BLOCK_D", "BLOCK")}
    return {**kept, "FALLING": True, "STEP": module.STEP, "BLOCK_M": module.BLOCK_M}


def _matmul(**constants) -> Callable[[str, object], dict]:
    def of(dtype: str, target) -> dict:
        import torch

        names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        descriptors = target not in HIP_TARGETS and target >= 90
        options = {"ERF": True, "HAS_BIAS": True, "DESCRIPTORS": descriptors, "PRECISION": "ieee"}
        return {**options, **constants, **_module("linear_gelu").tiles(names[dtype])}

    return of


def _rotary(dtype: str, target) -> dict:
    return {"INVERSE": False, "HALF": 32, **_module("rotary").blocks(32)}


def _fixed(**constants) -> Callable[[str, object], dict]:
    return lambda dtype, target: constants


def _module(name: str):
    return importlib.import_module(f"fastbert.kernels.{name}")


_SUM = {"HAS_LINEAR_BIAS": True, "DROPOUT": True}
KERNELS = {
    ("common", "_sum_parts_kernel"): Kernel(
        _fixed(VECTORS=3, PARTS=64, COLS=32),
        {"first_ptr": "*T", "second_ptr": "*T", "third_ptr": "*T"},
    ),
    ("philox", "_row_keep_mask_kernel"): Kernel(
        _fixed(ROWS=8, COLS=256), {"mask_ptr": "*i8"}, wide=False
    ),
    ("philox", "_score_keep_mask_kernel"): Kernel(
        _fixed(ROWS=64, COLS=64), {"mask_ptr": "*i8"}, least_blocks=3, wide=False
    ),
    ("bias_gelu", "_bias_gelu_fwd_kernel"): Kernel(_fixed(ERF=True, HAS_BIAS=True, COLS=1024)),
    ("bias_gelu", "_bias_gelu_bwd_kernel"): Kernel(
        _fixed(ERF=True, HAS_BIAS=True, COLS=512), wide=False
    ),
    ("geglu", "_geglu_fwd_kernel"): Kernel(_fixed(ERF=True, HAS_BIAS=True, COLS=1024)),
    ("geglu", "_geglu_bwd_kernel"): Kernel(_fixed(ERF=True, HAS_BIAS=True, COLS=512), wide=False),
    ("rotary", "_rotary_kernel"): Kernel(
        _rotary,
        {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "index_ptr": "*i64"},
    ),
    ("add_layer_norm", "_add_layer_norm_fwd_kernel"): Kernel(
        _tile(
            "add_layer_norm", "row_block", **_SUM, HAS_RESIDUAL=True, HAS_BIAS=True, KEEP_SUM=True
        )
    ),
    ("add_layer_norm", "_add_layer_norm_bwd_kernel"): Kernel(
        _tile("add_layer_norm", "gradient_block", **_SUM, HAS_DH=True, WRITE_DX=True),
    ),
    ("embed_layer_norm", "_embed_layer_norm_fwd_kernel"): Kernel(
        _tile(
            "embed_layer_norm",
            "row_block",
            FROM_EMBEDS=False,
            HAS_BIAS=True,
            DROPOUT=True,
            CHECK=True,
        )
    ),
    ("embed_layer_norm", "_embed_layer_norm_bwd_kernel"): Kernel(
        _tile("embed_layer_norm", "gradient_block", DROPOUT=True)
    ),
    ("embed_layer_norm", "_table_gradient_kernel"): Kernel(
        _fixed(STEP=8, COLS=256), {"dh_ptr": "*fp32", "skipped": "i32"}
    ),
    ("embed_layer_norm", "_small_table_gradient_kernel"): Kernel(
        _fixed(TABLE=8, COLS=256), {"dh_ptr": "*fp32", "skipped": "i32"}, wide=False
    ),
    ("unpad", "_move_rows_kernel"): Kernel(
        _fixed(SCATTER=True, COLS=1024), {"x_ptr": "*i64", "y_ptr": "*i64"}
    ),
    # Rows of 30,522 logits begin anywhere.
    ("mlm_cross_entropy", "_mlm_cross_entropy_fwd_kernel"): Kernel(
        _fixed(SMOOTH=True, COLS=2048), wide=False
    ),
    ("mlm_cross_entropy", "_mlm_cross_entropy_bwd_kernel"): Kernel(
        _fixed(HAS_BIAS=True, COLS=1024), wide=False
    ),
    ("mlm_distillation", "_mlm_distillation_fwd_kernel"): Kernel(_fixed(COLS=1024), wide=False),
    ("mlm_distillation", "_mlm_distillation_bwd_kernel"): Kernel(
        _fixed(HAS_BIAS=True, COLS=1024), wide=False
    ),
    ("linear_gelu", "_linear_gelu_fwd_kernel"): Kernel(
        _matmul(KEEP_PREACT=True), least_blocks=1, wide=False, tensor_cores=True
    ),
    ("linear_gelu", "_gelu_matmul_bwd_kernel"): Kernel(
        _matmul(), least_blocks=1, wide=False, tensor_cores=True
    ),
    ("attention", "_attention_fwd_kernel"): Kernel(
        _attention("fwd"), least_blocks=3, tensor_cores=True
    ),
    ("attention", "_attention_bwd_kernel"): Kernel(
        _attention("bwd"), least_blocks=2, tensor_cores=True, dtypes=("bf16", "fp16")
    ),
    ("attention", "_attention_bwd_dq_kernel"): Kernel(
        _attention("bwd_dq"), least_blocks=2, tensor_cores=True
    ),
    ("attention", "_attention_bwd_dkv_kernel"): Kernel(
        _attention("bwd_dkv"), least_blocks=2, tensor_cores=True
    ),
    **{
        ("disentangled_attention", f"_disentangled_attention_{kernel}_kernel"): Kernel(
            _disentangled(kernel),
            least_blocks=1,
            tensor_cores=True,
            warpgroups=False,
        )
        for kernel in ("fwd", "bwd_dq", "bwd_dkv", "bwd_positions")
    },
    ("disentangled_attention", "_sum_distances_kernel"): Kernel(_distances, wide=False),
}
# The same kernels with other tiles; fp32 left out, whose heads of 128 spill and are rare.
WIDE_HEADS = {
    name: dataclasses.replace(
        KERNELS["attention", name], constants=_attention(kernel, 128), least_blocks=2
    )
    for kernel in ("fwd", "bwd_dq", "bwd_dkv")
    for name in (f"_attention_{kernel}_kernel",)
}

WINDOWED = {
    name: dataclasses.replace(KERNELS["attention", name], constants=_attention(kernel, window=True))
    for kernel in ("fwd", "bwd_dq", "bwd_dkv")
    for name in (f"_attention_{kernel}_kernel",)
}


def _other_tables() -> list[tuple[str, Kernel]]:
    """The kernels of disentangled attention as they are launched beside their rows in `KERNELS`:
    with one position table or none, without dropout, and for the sums of the other table."""
    found = []
    for kernel in ("fwd", "bwd_dq", "bwd_dkv", "bwd_positions"):
        name = f"_disentangled_attention_{kernel}_kernel"
        usual = KERNELS["disentangled_attention", name]
        for key, query, dropout, of_keys in itertools.product((True, False), repeat=4):
            summed = (key if of_keys else query) if kernel == "bwd_positions" else not of_keys
            if not summed or (key and query and dropout and not of_keys):
                continue
            constants = _disentangled(kernel, key, query, dropout, of_keys)
            found.append((name, dataclasses.replace(usual, constants=constants)))
    return found


# Triton compiles a kernel apart where one of its integers is 1.
ONES = ("num_rows", "num_rows_q", "num_rows_k", "num_sequences", "num_heads", "parts", "part_rows")


def _with_ones(module: str, name: str) -> Kernel:
    kernel = KERNELS[module, name]

    def of(dtype: str, target) -> dict:
        present = set(ONES) & set(getattr(_module(module), name).arg_names)
        return {**kernel.constants(dtype, target), **dict.fromkeys(present, 1)}

    return dataclasses.replace(kernel, constants=of, least_blocks=1, wide=False, tensor_cores=False)


Job = tuple[str, str, Kernel, object, str]
"""Module, name, kernel, target, dtype."""


def jobs(only: str = "", everywhere: bool = False) -> list[Job]:
    """Every dtype for the first target, bf16 for the others; heads of 128, windows, other tables
    and integers of 1, in bf16. `everywhere`: other tables for every target and dtype too."""

    def on_each(kernel: Kernel, every_dtype: bool = False) -> Iterator[tuple[object, str]]:
        for target in (*CUDA_TARGETS, *HIP_TARGETS):
            each = every_dtype or target == CUDA_TARGETS[0]
            yield from ((target, dtype) for dtype in kernel.dtypes[: None if each else 1])

    found = [
        (module, name, kernel, target, dtype)
        for (module, name), kernel in KERNELS.items()
        for target, dtype in on_each(kernel)
    ]
    found += [
        ("attention", name, kernel, target, "bf16")
        for kernels in (WIDE_HEADS, WINDOWED)
        for name, kernel in kernels.items()
        for target in CUDA_TARGETS
    ]
    found += [
        ("disentangled_attention", name, kernel, target, dtype)
        for name, kernel in _other_tables()
        for target, dtype in (
            on_each(kernel, every_dtype=True) if everywhere else [(CUDA_TARGETS[0], "bf16")]
        )
    ]
    found += [
        (module, name, _with_ones(module, name), CUDA_TARGETS[0], "bf16")
        for module, name in KERNELS
    ]
    return [job for job in found if only in job[1]]


def argument_type(name: str, kernel: Kernel, dtype: str) -> str:
    """Triton's name for an argument's type."""
    if name in kernel.types:
        return kernel.types[name].replace("T", dtype)
    if not name.endswith("_ptr"):
        return "fp32" if name in FLOATS else "i64" if name == "site" else "i32"
    for names, kind in ((INT64_POINTERS, "i64"), (INT32_POINTERS, "i32"), (FLOAT_POINTERS, "fp32")):
        if name in names:
            return f"*{kind}"
    return f"*{dtype}"


def compile_number(index: int, *selection) -> dict:
    """One row of the report; jobs hold functions, which do not travel between processes."""
    return compile_kernel(jobs(*selection)[index])


def compile_kernel(job: Job) -> dict:
    """One row of the report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, kernel, target, dtype = job
    function = getattr(_module(module), name)
    constants = dict(kernel.constants(dtype, target))
    options = {"num_warps": constants.pop("num_warps", 4)}
    options["num_stages"] = constants.pop("num_stages", 3)
    if "maxnreg" in constants:
        options["maxnreg"] = constants.pop("maxnreg")
    signature = {
        n: "constexpr" if n in constants else argument_type(n, kernel, dtype)
        for n in function.arg_names
    }
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(function.arg_names)
        if n not in constants and (n.endswith("_ptr") or n in DIVISIBLE)
    }
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    row = {"kernel": name.strip("_").removesuffix("_kernel"), "dtype": dtype, **options}
    row["form"] = " ".join(n for n, value in constants.items() if value is True)
    row["tile"] = "x".join(str(v) for n, v in constants.items() if n in TILE)
    if target in HIP_TARGETS:
        compiled = triton.compile(source, target=GPUTarget("hip", target, 64), options=options)
        return {**row, "target": target, **_amd_usage(compiled.asm["amdgcn"])}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    code = machine_code(compiled.asm["cubin"])
    registers = resource_usage(compiled.asm["cubin"])
    shared, threads = compiled.metadata.shared, 32 * options["num_warps"]
    return {
        **row,
        "target": f"sm_{target}",
        "registers": registers,
        "spills": sum(code_count(code, opcode) for opcode in ("LDL", "STL")),
        "shared_bytes": shared,
        "blocks": blocks_per_sm(target, registers, shared, threads),
        "wide_loads": sum(
            1 for _, opcode, _ in code if opcode.startswith(("LDG", "LDGSTS")) and "128" in opcode
        ),
        "tensor": sum(code_count(code, opcode) for opcode in ("HGMMA", "HMMA", "UTCHMMA", "QMMA")),
        "hgmma": code_count(code, "HGMMA"),
        "loop": loop_cycles(code, target, options["num_warps"]),
    }


def _amd_usage(text: str) -> dict:
    """Registers, spills and shared memory from AMD's own metadata."""
    found = {
        key: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        for key, name in (
            ("registers", "vgpr_count"),
            ("spills", "vgpr_spill_count"),
            ("shared_bytes", "group_segment_fixed_size"),
        )
    }
    return {**found, "tensor": len(re.findall(r"\bv_mfma", text))}


# --- reading machine code -------------------------------------------------------------------------

Instruction = tuple[int, str, str]
"""Address, opcode, operands."""


def cuobjdump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(tool), option, file.name], capture_output=True, text=True, check=True
        ).stdout


def machine_code(cubin: bytes) -> list[Instruction]:
    """The kernel's instructions in their order."""
    pattern = re.compile(
        r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);", re.M
    )
    return [
        (int(address, 16), opcode, operands)
        for address, opcode, operands in pattern.findall(cuobjdump(cubin, "-sass"))
    ]


def code_count(code: list[Instruction], opcode: str) -> int:
    """How often an opcode, whatever its modifiers, stands in the code."""
    return sum(1 for _, found, _ in code if found.split(".")[0] == opcode)


def resource_usage(cubin: bytes) -> int:
    """Registers a thread."""
    text = cuobjdump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage:\n{text}")
    return int(found[1])


def blocks_per_sm(target: int, registers: int, shared: int, threads: int) -> int:
    """Blocks an SM holds at once; registers are given out by 8 a thread, shared memory with 1 KiB
    of the system's own."""
    machine = MACHINES[target]
    by_registers = REGISTERS // (max(1, -(-registers // 8) * 8) * threads)
    return min(by_registers, machine.shared // (shared + 1024), machine.threads // threads, 32)


def loop_cycles(code: list[Instruction], target: int, num_warps: int) -> dict | None:
    """Cycles one pass of the main loop takes of each unit of an SM; None without a loop."""
    loops = []
    for address, opcode, operands in code:
        jump = re.search(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else None
        if jump and int(jump[1], 16) < address:
            loops.append([i for i in code if int(jump[1], 16) <= i[0] <= address])
    if not loops:
        return None
    body = max(loops, key=_importance)
    opcodes = Counter(i[1].split(".")[0] for i in body)
    flops = sum(_tensor_flops(i[1]) for i in body)
    # A warpgroup issues HGMMA together, a warp every other instruction by itself.
    issuers = num_warps / 4 if any(i[1].startswith("HGMMA") for i in body) else num_warps
    lanes, machine = 32 * num_warps, MACHINES[target]
    fp32 = sum(opcodes[o] for o in ("FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "FSETP"))
    unknown = any(i[1].startswith("UTC") for i in body)
    return {
        "tensor": "-" if unknown else round(flops * issuers / machine.tensor_flops),
        "special": opcodes["MUFU"] * lanes // machine.special_results,
        "fp32": fp32 * lanes // machine.fp32_results,
        "instructions": len(body),
    }


def _importance(loop: list[Instruction]) -> tuple[int, int]:
    """Orders loops: by tensor-core instructions, the inner one first; else by length."""
    tensor = sum(i[1].startswith(("HGMMA", "HMMA", "UTCHMMA")) for i in loop)
    return tensor, -len(loop) if tensor else len(loop)


def _tensor_flops(opcode: str) -> int:
    """FLOP of one tensor-core instruction, from the shape in its name."""
    shape = re.search(r"\.(\d+)x(\d+)x(\d+)", opcode)
    if opcode.startswith("HGMMA") and shape:
        m, n, k = (int(s) for s in shape.groups())
        return 2 * m * n * k
    shape = re.search(r"HMMA\.(\d\d?)(\d)(\d\d?)", opcode)
    return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0


# --- the report -----------------------------------------------------------------------------------


def faults(row: dict, kernel: Kernel) -> list[str]:
    """What about this row is over its limits, or not there."""
    name = " ".join(row[key] for key in ("kernel", "target", "dtype", "form") if row[key])
    found = []
    if row["spills"] > _allowed_spills(row):
        found.append(f"{name}: {row['spills']} loads and stores of spilled registers")
    if row["target"] in HIP_TARGETS:
        return found
    target = int(row["target"].removeprefix("sm_"))
    limit = MACHINES[target].shared_of_block
    if row["shared_bytes"] > limit:
        found.append(f"{name}: {row['shared_bytes']} bytes of shared memory, limit {limit}")
    if target == 90 and row["dtype"] != "fp32" and row["blocks"] < kernel.least_blocks:
        found.append(f"{name}: {row['blocks']} blocks to an SM, wanted {kernel.least_blocks}")
    if kernel.wide and not row["wide_loads"]:
        found.append(f"{name}: no 16-byte loads")
    if kernel.tensor_cores and row["dtype"] != "fp32" and not row["tensor"]:
        found.append(f"{name}: no tensor-core instructions")
    in_groups = kernel.tensor_cores and kernel.warpgroups and target == 90
    if in_groups and row["dtype"] != "fp32" and not row["hgmma"]:
        found.append(f"{name}: no HGMMA")
    return found


def _allowed_spills(row: dict) -> int:
    import triton

    version = ".".join(triton.__version__.split(".")[:2])
    return OLDER_SPILLS.get(version, {}).get((row["kernel"], row["target"], row["dtype"]), 0)


def table(rows: list[dict]) -> str:
    """The rows as text."""
    heads = ("warps", "regs", "spills", "shared", "blocks", "16-byte")
    lines = [f"{'kernel':37}{'tile':11}{'target':8}{'dtype':5}" + "".join(f"{h:>8}" for h in heads)]
    lines[0] += "  loop: tensor, special, fp32 cycles; instructions  form"
    for row in rows:
        keys = ("num_warps", "registers", "spills", "shared_bytes", "blocks", "wide_loads")
        numbers = "".join(f"{row.get(key, '-'):>8}" for key in keys)
        loop = row.get("loop")
        tail = "  " + ", ".join(str(v) for v in loop.values()) if loop else ""
        name = f"{row['kernel']:37}{row['tile']:11}{row['target']:8}{row['dtype']:5}"
        lines.append(f"{name}{numbers}{tail}  {row['form']}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail where a limit is passed")
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    parser.add_argument("--everywhere", action="store_true", help="every form, target and dtype")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    selection = (arguments.only, arguments.everywhere)
    work = jobs(*selection)
    _module("cache").ensure_writable()
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = list(
            pool.map(compile_number, range(len(work)), *([s] * len(work) for s in selection))
        )
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [
        fault
        for (_, _, kernel, _, _), row in zip(work, rows, strict=True)
        for fault in faults(row, kernel)
    ]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if arguments.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
