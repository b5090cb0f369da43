"""Triton launchers: on the device of their tensors, in the interpreter where there is no GPU."""

import pytest
import torch
from fastbert.kernels import bias_gelu, embed_layer_norm, mlm_cross_entropy, philox

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


def test_embed_layer_norm_flags_ids_outside_their_tables(device):
    """Where the host must not look at ids they are clamped, and the flag says so."""
    words, types, positions = (torch.randn(n, 12, device=device) for n in (9, 2, 5))
    weight = torch.ones(12, device=device)
    ids = torch.tensor([3, 8, 0], device=device)
    place = torch.tensor([0, 4, 1], device=device)
    kind = torch.tensor([0, 1, 1], device=device)
    for wrong, clamped, expected in ((ids, ids, 0), (ids + 1, torch.tensor([4, 8, 1]), 1)):
        flag = torch.zeros((), dtype=torch.int64, device=device)
        options = (words, types, positions, weight, None, 1e-5, None, 0.0, 0, None, torch.float32)
        y, _, _, _ = embed_layer_norm.embed_layer_norm_fwd(wrong, kind, place, *options, flag)
        total = words[clamped.to(device)] + types[kind] + positions[place]
        torch.testing.assert_close(y, torch.layer_norm(total, (12,), weight, None, 1e-5))
        assert flag.item() == expected


def test_mlm_cross_entropy_in_chunks(device, monkeypatch):
    hidden, weight = torch.randn(11, 16, device=device), torch.randn(50, 16, device=device)
    bias, dloss = torch.randn(50, device=device), torch.randn(11, device=device)
    labels = torch.randint(50, (11,), device=device)
    labels[2] = -100
    runs = []
    for most in (4 * 50, 1 << 20):
        monkeypatch.setattr(mlm_cross_entropy, "MAX_LOGITS", most)
        tensors, options = (hidden, weight, bias, labels), (-100, 0.1, 1e-3)
        loss, lse = mlm_cross_entropy.mlm_cross_entropy_fwd(*tensors, *options)
        gradients = mlm_cross_entropy.mlm_cross_entropy_bwd(
            dloss, *tensors, lse, *options, True, True
        )
        runs.append((loss, lse, *gradients))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
