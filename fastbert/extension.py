"""The compiled part, `fastbert._C`: loaded once, and only by the torch it was built with.

setup.py leaves a record, `_C.json`, beside it: `{"built": bool, "torch": version, "reason": why it
was not built}`. C++ code compiled against one torch can crash under another, so a record that does
not match is refused here and every op runs its other implementations.
"""

import functools
import importlib
import importlib.util
import json
from pathlib import Path

import torch

RECORD = Path(__file__).with_name("_C.json")
REMEDY = "rebuild from the source with: pip install --no-build-isolation ."


@functools.cache
def load() -> str | None:
    """Loads the compiled kernels.

    Returns:
        None when they are registered, else one line saying why not and what to do.
    """
    reason = why_not(RECORD)
    if reason is None:
        importlib.import_module("fastbert._C")
    return reason


def why_not(record: Path) -> str | None:
    """Why the compiled part described by `record` cannot be used here; None if it can."""
    if not record.is_file():
        return f"compiled kernels are not built: no build record; {REMEDY}"
    built = json.loads(record.read_text())
    if not built["built"]:
        return f"compiled kernels are not built: {built['reason']}; {REMEDY}"
    if built["torch"] != torch.__version__:
        return (
            f"compiled kernels were built with torch {built['torch']}, this is torch "
            f"{torch.__version__}; {REMEDY}"
        )
    if importlib.util.find_spec("fastbert._C") is None:
        return f"compiled kernels are missing although a build was recorded; {REMEDY}"
    return None
