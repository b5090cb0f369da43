"""Mends Triton's interpreter where it is wrong, so that kernels run in it as they are shipped."""

import importlib.util


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
