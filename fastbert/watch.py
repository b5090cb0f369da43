"""Whether a model's modules are still what they were: identities of objects, compared in C++."""

from itertools import chain

from torch import nn

from fastbert import extension

_TABLES = (
    "_parameters",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_available() -> bool:
    """Whether the compiled part is there, which does the comparing."""
    return extension.load() is None


class ModuleWatch:
    """The modules below `root` as they are: their classes, attributes, parameters, children and
    hooks. Keeps what it met alive.

    Args:
        root: a module; its own attributes are not looked at.
    """

    def __init__(self, root: nn.Module):
        self._modules = tuple(m for child in root.children() for m in child.modules())
        self._types = tuple(map(type, self._modules))
        states = [module.__dict__ for module in self._modules]
        tables = [state[name] for state in states for name in _TABLES]
        self._tables = (root.__dict__["_modules"], *states, *tables)
        self._values = tuple(chain.from_iterable(table.values() for table in self._tables))

    def are_unchanged(self) -> bool:
        """Whether none of that was set, added or removed since."""
        from fastbert import _C

        return _C.same_identities(self._modules, self._types, self._tables, self._values)
