"""Our forward under the signature of transformers' one."""

import functools
import inspect
from collections.abc import Callable


def transformers_signature(theirs: type) -> Callable[[Callable], Callable]:
    """Lets a forward that takes names only be called, and inspected, as `theirs.forward`.

    Trainer, pipelines and collators read the argument names off the signature, and callers pass
    some of them by position; both follow the installed transformers.

    Args:
        theirs: the transformers class.
    """
    signature = inspect.signature(theirs.forward)
    names = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ][1:]

    def decorate(forward: Callable) -> Callable:
        @functools.wraps(forward)
        def wrapper(self, *args, **kwargs):
            if len(args) > len(names):
                raise TypeError(
                    f"{theirs.__name__}.forward takes {len(names)} positional arguments, got "
                    f"{len(args)}"
                )
            for name, value in zip(names, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"{theirs.__name__}.forward got {name!r} twice")
                kwargs[name] = value
            return forward(self, **kwargs)

        wrapper.__signature__ = signature
        return wrapper

    return decorate
