"""Assertions that the implementation a test names is the one that ran."""

import contextlib
from collections.abc import Iterator

from fastbert import dispatch


@contextlib.contextmanager
def assert_ran(op: str, backend: str | None = None) -> Iterator[None]:
    """Fails unless `op` was called inside the block, and every call served by `backend`, or by any
    one where none is named."""
    before = dispatch.counters()
    yield
    made = {b: n for (o, b), n in (dispatch.counters() - before).items() if o == op}
    if len(made) != 1 or (backend is not None and backend not in made):
        expected = backend or "one backend"
        raise AssertionError(
            f"{op}: expected calls served by {expected} only, got {made or 'none'}"
        )
