"""Triton launchers: on the device of their tensors, in the interpreter where there is no GPU."""

import pytest
import torch
from fastbert.kernels import bias_gelu, philox

from fastbert.reference.bias_gelu import bias_gelu_bwd_reference, bias_gelu_fwd_reference
from fastbert.reference.philox import row_keep_mask_reference, score_keep_mask_reference
from fastbert.testing.compare import assert_bitwise_equal


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (65, 40), (3, 600)], ids=str)
def test_bias_gelu_kernels(device, shape, form):
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    bias = torch.randn(shape[-1], device=device)
    torch.testing.assert_close(
        bias_gelu.bias_gelu_fwd(x, bias, form),
        bias_gelu_fwd_reference(x, bias, form),
        rtol=1e-6,
        atol=2e-6,
    )
    ours = bias_gelu.bias_gelu_bwd(dy, x, bias, form)
    expected = bias_gelu_bwd_reference(dy, x, bias, form)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("site", [0, 1, 0xFFFFFFF8])
def test_keep_mask_kernels(device, site):
    state = torch.tensor([-5, 2**35 + 1], device=device)
    assert_bitwise_equal(
        philox.row_keep_mask(state, 33, 70, 6554, site),
        row_keep_mask_reference(state, 33, 70, 6554, site),
        "rows",
    )
    sequences = torch.tensor([2, 9], device=device)
    assert_bitwise_equal(
        philox.score_keep_mask(state, sequences, 3, 20, 70, 6554, site),
        score_keep_mask_reference(state, sequences, 3, 20, 70, 6554, site),
        "scores",
    )


def test_deterministic_bias_gradient(device):
    x, dy = (torch.randn(500, 40, device=device) for _ in range(2))
    bias = torch.randn(40, device=device)
    first, second = (bias_gelu.bias_gelu_bwd(dy, x, bias, "none")[1] for _ in range(2))
    assert_bitwise_equal(first, second, "dbias")
