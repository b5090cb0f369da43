"""Names of a package that are loaded when they are asked for: importing it takes no time."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def exports(package: str, modules: Mapping[str, str]) -> tuple[Callable, Callable]:
    """The `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        modules: the module of each public name; one that begins with a dot lies in the package.
    """

    def load(name: str):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return load, names
