"""Where a fused matmul has been measured to be faster than cuBLAS and a kernel behind it.

The table is filled by `python -m fastbert.tune` on the GPU in question, never while training.
Without an entry the unfused form runs.
"""

import functools
import json
import os
from pathlib import Path

import torch

SHIPPED: dict[str, bool] = {}
"""Entries measured by us; none before a GPU run is recorded in docs/gpu_results.md."""


def path() -> Path:
    """The file of this machine's own measurements: FASTBERT_TUNED, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("FASTBERT_TUNED", cache / "fastbert" / "tuned.json"))


def key(op: str, arch: str, dtype: torch.dtype, rows: int, num_cols: int, depth: int) -> str:
    """`op|arch|dtype|rows|columns|depth`; rows by the power of two that holds them."""
    bucket = 1 << max(0, rows - 1).bit_length()
    return f"{op}|{arch}|{str(dtype).removeprefix('torch.')}|{bucket}|{num_cols}|{depth}"


@functools.cache
def table() -> dict[str, bool]:
    """The shipped entries under this machine's; read once.

    Raises:
        ValueError: the file is not a JSON object of booleans.
    """
    file = path()
    if not file.is_file():
        return SHIPPED
    try:
        entries = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}); delete it or tune again") from error
    if not isinstance(entries, dict) or not all(isinstance(v, bool) for v in entries.values()):
        raise ValueError(f"{file} must map keys to true or false; delete it or tune again")
    return {**SHIPPED, **entries}


@functools.cache
def arch_of(device: torch.device) -> str:
    """`sm_90`, AMD's name, or `cpu` in the interpreter."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def fused_is_faster(op: str, x: torch.Tensor, num_cols: int, depth: int) -> bool:
    """Whether the table says so for `x` `(rows, ...)` and a product of that size."""
    entries = table()
    if not entries:
        return False
    return entries.get(key(op, arch_of(x.device), x.dtype, x.shape[0], num_cols, depth), False)
