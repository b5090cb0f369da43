"""The correctness protocol: our result, plain PyTorch in the same dtype, and a float64 oracle."""

import math
from collections.abc import Callable, Mapping

import torch

from fastbert.testing.inputs import noncontiguous
from fastbert.testing.tolerances import EPS, MAX_FACTOR, MEAN_FACTOR, atol


def assert_close_to_oracle(
    actual: torch.Tensor,
    oracle: torch.Tensor,
    same_dtype: torch.Tensor,
    name: str,
    *,
    op: str | None = None,
    reduction_rows: int = 1,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Fails unless our error is within twice plain PyTorch's error in the same dtype.

    Args:
        actual: our result.
        oracle: the float64 result.
        same_dtype: plain PyTorch's result, in the dtype of `actual`.
        name: for the message.
        op: row of the table of absolute terms.
        reduction_rows: rows summed over; the absolute term grows with their square root.
        compute_dtype: dtype of the matmuls behind the result where it is narrower (autocast).

    Raises:
        AssertionError: naming the tensor, the error, the budget and the worst index.
    """
    if actual.shape != oracle.shape or actual.shape != same_dtype.shape:
        raise AssertionError(
            f"{name}: shapes differ: got {tuple(actual.shape)}, oracle {tuple(oracle.shape)}, "
            f"plain {tuple(same_dtype.shape)}"
        )
    if actual.dtype != same_dtype.dtype:
        raise AssertionError(f"{name}: dtype is {actual.dtype}, expected {same_dtype.dtype}")
    if actual.numel() == 0:
        return
    actual, oracle, plain = (t.detach().double() for t in (actual, oracle, same_dtype))
    finite = oracle.isfinite()
    if not torch.equal(actual[~finite], oracle[~finite]):
        raise AssertionError(f"{name}: infinities differ from the oracle's")
    if not actual[finite].isfinite().all():
        raise AssertionError(f"{name}: {int((~actual.isfinite()).sum())} values are not finite")
    error = torch.where(finite, (actual - oracle).abs(), 0)
    base = torch.where(finite & plain.isfinite(), (plain - oracle).abs(), 0)
    largest = oracle[finite].abs().max().item() if finite.any() else 0.0
    dtype = compute_dtype or same_dtype.dtype
    rounding = EPS[dtype] * largest
    floor = atol(op, dtype) * math.sqrt(reduction_rows)
    for kind, factor, measured, allowed in (
        ("largest", MAX_FACTOR, error.max().item(), base.max().item()),
        ("mean", MEAN_FACTOR, error.mean().item(), base.mean().item()),
    ):
        budget = factor * (allowed + rounding) + floor
        if measured > budget:
            worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            raise AssertionError(
                f"{name}: {kind} error {measured:.3e} exceeds {budget:.3e} (plain PyTorch "
                f"{allowed:.3e}); worst at {worst}: got {actual[worst].item():.9g}, oracle "
                f"{oracle[worst].item():.9g}"
            )


def assert_bitwise_equal(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
    """Fails unless `a` and `b` have the same dtype, shape and bits (NaN equals NaN)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(
            f"{name}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
        )
    same = (a == b) | ((a != a) & (b != b))
    if not same.all():
        where = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {a.numel()} elements differ, first at {where}: "
            f"{a[where].item()!r} against {b[where].item()!r}"
        )


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64."""
    expected = expected.detach().double()
    return ((actual.detach().double() - expected).norm() / expected.norm()).item()


def compare_gradients(
    actual: Mapping[str, torch.Tensor | None],
    oracle: Mapping[str, torch.Tensor | None],
    same_dtype: Mapping[str, torch.Tensor | None],
    *,
    op: str | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """`assert_close_to_oracle` for every named gradient; a missing one fails, so does a surplus."""
    if actual.keys() != oracle.keys():
        raise AssertionError(f"parameters differ: {sorted(actual.keys() ^ oracle.keys())}")
    for name, expected in oracle.items():
        if (actual[name] is None) != (expected is None):
            raise AssertionError(
                f"gradient of {name}: got {'none' if actual[name] is None else 'one'}, expected "
                f"{'none' if expected is None else 'one'}"
            )
        if expected is not None:
            assert_close_to_oracle(
                actual[name],
                expected,
                same_dtype[name],
                f"gradient of {name}",
                op=op,
                compute_dtype=compute_dtype,
            )


def op_check(
    op: Callable,
    reference: Callable,
    inputs: Mapping[str, object],
    dtype: torch.dtype,
    *,
    name: str,
    layout: str = "contiguous",
    autocast: torch.dtype | None = None,
    reduction_rows: int = 1,
    seed: int = 0,
) -> None:
    """Outputs and every gradient of `op` by the protocol.

    Args:
        op: called as `op(**inputs)`; returns a tensor or a tuple of tensors.
        reference: plain PyTorch with the same arguments, run in float64 and in `dtype`.
        inputs: float tensors are cast to `dtype` (to float64 for the oracle, from the rounded
            values) and differentiated; everything else is passed on.
        dtype: dtype under test.
        name: row of the tolerance table, and prefix of messages.
        layout: `noncontiguous` gives the op strided views of the same values.
        autocast: runs `op` and `reference` in `dtype` under autocast to this; errors are then
            judged by its precision.
        reduction_rows: rows the gradients sum over.
        seed: of the outputs' gradients.
    """
    rounded = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    leaves = {k for k, v in rounded.items() if isinstance(v, torch.Tensor) and v.dtype == dtype}
    device = next(rounded[key].device.type for key in leaves)
    runs = []
    for function, kind, strided in (
        (op, dtype, layout == "noncontiguous"),
        (reference, torch.float64, False),
        (reference, dtype, False),
    ):
        arguments = dict(rounded)
        for key in leaves:
            leaf = rounded[key].to(kind).clone()
            leaf = noncontiguous(leaf) if strided else leaf
            arguments[key] = leaf.detach().requires_grad_()
        narrow = autocast is not None and kind != torch.float64
        with torch.autocast(device, autocast, enabled=narrow):
            outputs = function(**arguments)
        runs.append((arguments, outputs if isinstance(outputs, tuple) else (outputs,)))
    for index, (ours, oracle, plain) in enumerate(zip(*(r[1] for r in runs), strict=True)):
        assert_close_to_oracle(
            ours, oracle, plain, f"{name} output {index}", op=name, compute_dtype=autocast
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = [i for i, output in enumerate(runs[0][1]) if output.requires_grad]
    grads = [torch.randn(runs[0][1][i].shape, generator=generator) for i in chosen]
    for _, outputs in runs:
        torch.autograd.backward(
            [outputs[i] for i in chosen],
            [g.to(dtype).to(outputs[i]) for i, g in zip(chosen, grads, strict=True)],
        )
    for key in sorted(leaves):
        ours, oracle, plain = (arguments[key].grad for arguments, _ in runs)
        if oracle is None:
            if ours is not None and ours.any():
                raise AssertionError(f"{name} gradient of {key}: expected none")
            continue
        if ours is None:
            raise AssertionError(f"{name} gradient of {key} is missing")
        assert_close_to_oracle(
            ours,
            oracle,
            plain,
            f"{name} gradient of {key}",
            op=name,
            reduction_rows=reduction_rows,
            compute_dtype=autocast,
        )
