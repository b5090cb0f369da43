"""Assertions that the implementation a test names is the one that ran."""

import contextlib
from collections.abc import Iterator

from fastbert import dispatch


@contextlib.contextmanager
def assert_ran(op: str, backend: str = "reference") -> Iterator[None]:
    """Fails unless `op` was called inside the block, and every call served by `backend`."""
    before = dispatch.counters()
    yield
    made = {b: n for (o, b), n in (dispatch.counters() - before).items() if o == op}
    if set(made) != {backend}:
        raise AssertionError(f"{op}: expected calls served by {backend} only, got {made or 'none'}")
