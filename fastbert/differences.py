"""In what the settings of two runs differ, for the messages that refuse to mix them."""

from collections.abc import Collection
from typing import Any


def differences(
    old: dict[str, Any], new: dict[str, Any], *, free: Collection[str] = ()
) -> list[str]:
    """A line for each setting in which two runs differ, by its dotted name.

    Args:
        old, new: nested mappings, as `dataclasses.asdict` makes them.
        free: keys of the outermost mapping that may differ.
    """
    before, after = _flat(old), _flat(new)
    return [
        f"{key}: {before.get(key)} there, {after.get(key)} now"
        for key in sorted(before.keys() | after.keys())
        if key.split(".")[0] not in free and before.get(key) != after.get(key)
    ]


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], dict):
        data = dict(enumerate(data))
    if not isinstance(data, dict):
        return {prefix: list(data) if isinstance(data, tuple) else data}
    flat = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
