"""Where Triton keeps what it compiles, when it cannot be where the user has it."""

import functools
import logging
import os
import tempfile

import triton

logger = logging.getLogger("fastbert")


@functools.cache
def ensure_writable() -> tempfile.TemporaryDirectory | None:
    """Moves Triton's cache to a private temporary directory, for the life of the process and of
    those it starts, where its own cannot be written. Called before the first compile.

    Triton makes a directory for every kernel and raises where it cannot: in a read-only container,
    without a home, or where TRITON_CACHE_DIR names a file. What such a directory holds already is
    compiled again.

    Returns:
        The directory, which is removed with this result; None where Triton's own serves.
    """
    folder = triton.knobs.cache.dir
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        private = tempfile.TemporaryDirectory(prefix="fastbert-triton-")
        triton.knobs.cache.dir = private.name
        logger.warning(
            "Triton's cache %r cannot be written (%s): compiling into %s until the process ends; "
            "set TRITON_CACHE_DIR to a directory that can be written to keep what is compiled",
            folder,
            error,
            private.name,
        )
        return private
    return None
