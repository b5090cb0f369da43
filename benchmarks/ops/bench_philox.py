"""Keep masks of the dropout stream, one byte written an element; the rival is torch's bernoulli."""

import pytest
import torch

from fastbert.dispatch import use_backend
from fastbert.ops.philox import row_keep_mask, score_keep_mask
from fastbert.reference.philox import row_keep_mask_reference, score_keep_mask_reference
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran

from ..device import DEVICE, waited_for
from ..harness import RIVAL, ROUNDS, providers
from ..roofs import copy_bandwidth

RNG = torch.tensor([1, 2], device=DEVICE)
THRESHOLD = 6554


def _rows(tiny):
    size = (8, 24) if tiny else (4096, 768)
    return (
        size,
        lambda: row_keep_mask(RNG, *size, dropout_p=0.1, site=1),
        lambda: row_keep_mask_reference(RNG, *size, THRESHOLD, 1),
    )


def _scores(tiny):
    size = (2, 2, 9, 9) if tiny else (8, 12, 128, 128)
    batch = torch.arange(size[0], device=DEVICE)
    return (
        size,
        lambda: score_keep_mask(RNG, batch, *size[1:], dropout_p=0.1, site=0),
        lambda: score_keep_mask_reference(RNG, batch, *size[1:], THRESHOLD, 0),
    )


@pytest.mark.parametrize("mask", [_rows, _scores], ids=["rows", "scores"])
@pytest.mark.parametrize("provider", providers("philox"))
def test_philox(benchmark, tiny, provider, mask):
    size, ours, reference = mask(tiny)
    benchmark.group = f"philox {mask.__name__.strip('_')}"
    op = f"{'row' if mask is _rows else 'score'}_keep_mask"
    if provider == RIVAL:
        like = torch.empty(size, device=DEVICE)
        drawn = waited_for(lambda: like.bernoulli_(0.9))
        benchmark.pedantic(drawn, rounds=ROUNDS, warmup_rounds=1)
        return
    with use_backend(philox=provider):
        with assert_ran(op, provider):
            assert_bitwise_equal(ours(), reference(), op)
        result = benchmark.pedantic(waited_for(ours), rounds=ROUNDS, warmup_rounds=1)
    benchmark.extra_info["bytes"] = result.numel()
    if benchmark.stats:
        rate = result.numel() / benchmark.stats.stats.median
        benchmark.extra_info["of_copy_bandwidth"] = round(rate / copy_bandwidth(), 3)
