"""Mends Triton's interpreter where it is wrong, so that kernels run in it as they are shipped, and
lets it run the end of a launch alone."""

import contextlib
import importlib.util
import unittest.mock
from collections.abc import Iterator


def patch_bf16_dot() -> None:
    """Makes the interpreter's `tl.dot` multiply bf16 values instead of their bits.

    It holds bf16 as uint16 and hands that to numpy. Products of bf16 values are exact in fp32, and
    both machine and numpy sum in fp32. Does nothing without triton, or a second time.
    """
    if importlib.util.find_spec("triton") is None:
        return
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder.create_dot, "multiplies_bf16", False):
        return
    original = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(numpy.uint32) << 16
        return TensorHandle(bits.view(numpy.float32), tl.float32)

    def create_dot(self, a, b, d, *options):
        return original(self, widened(a), widened(b), d, *options)

    create_dot.multiplies_bf16 = True
    InterpreterBuilder.create_dot = create_dot


@contextlib.contextmanager
def last_programs(count: int) -> Iterator[None]:
    """Inside the block only the last `count` programs of each axis of a launch are run, with the
    numbers they have in the whole grid, on tensors that are not copied.

    Launches over more rows than memory holds become possible: pages nobody touches take none.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    original = executor.__call__

    def scalar(value):
        return interpreter.TensorHandle(numpy.array([value], numpy.int32), tl.int32)

    def run(self, *args, **kwargs):
        grid = self.grid
        skipped = [max(0, size - count) for size in grid] + [0, 0]

        def number(axis):
            place = builder.grid_idx[axis] + skipped[axis]
            return interpreter.TensorHandle(numpy.array([place], numpy.int32), tl.int32)

        def programs(axis):
            return interpreter.TensorHandle(
                numpy.array([(*grid, 1, 1)[axis]], numpy.int32), tl.int32
            )

        self.grid = tuple(min(size, count) for size in grid)
        with (
            unittest.mock.patch.object(builder, "create_get_program_id", number),
            unittest.mock.patch.object(builder, "create_get_num_programs", programs),
        ):
            return original(self, *args, **kwargs)

    with (
        unittest.mock.patch.object(executor, "__call__", run),
        unittest.mock.patch.object(executor, "_init_args_hst", lambda _, args, kw: (args, kw)),
        unittest.mock.patch.object(executor, "_restore_args_dev"),
    ):
        yield
