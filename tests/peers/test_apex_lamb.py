"""LAMB by NVIDIA apex, which is stood in for (conftest.py)."""

import copy
import sys

import pytest
import torch
from torch import nn

from fastbert.optim import LAMB, decay_groups
from fastbert.testing.counters import assert_ran


def _trained(implementation: str, backend: str, skipped: int | None = None, **options):
    """Weights and state after six steps on the same gradients; one of them not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    groups = decay_groups(model, 0.1)
    optimizer = LAMB(groups, lr=0.02, implementation=implementation, **options)
    generator = torch.Generator().manual_seed(1)
    with assert_ran("lamb", backend):
        for step in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
                if step == skipped:
                    parameter.grad.fill_(float("nan"))
            optimizer.found_inf = torch.tensor(float(step == skipped))
            before = copy.deepcopy(model.state_dict())
            optimizer.step()
            if step == skipped:
                assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    states = [optimizer.state[p][n] for p in model.parameters() for n in ("exp_avg", "exp_avg_sq")]
    return [*model.parameters(), *states]


@pytest.mark.parametrize("skipped", [None, 0, 3])
@pytest.mark.parametrize("adapt_without_decay", [False, True])
def test_apex_updates_as_ours(apex_lamb, adapt_without_decay, skipped):
    options = {"skipped": skipped, "adapt_without_decay": adapt_without_decay}
    theirs = _trained("apex", "apex", **options)
    ours = _trained("fastbert", "fastbert", **options)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_rate_is_a_tensor_of_the_device(apex_lamb):
    """As GraphedStep has it; the first update of a single weight is the rate times the weight."""
    parameter = nn.Parameter(torch.full((1,), 3.0))
    optimizer = LAMB([parameter], lr=torch.tensor(0.5), implementation="apex")
    parameter.grad = torch.ones(1)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((1,), 1.5))


def test_auto_takes_apex_where_it_is(apex_lamb):
    _trained("auto", "apex")


def test_auto_takes_ours_where_it_is_not():
    _trained("auto", "fastbert")


def test_apex_is_refused_with_the_reasons(apex_lamb, monkeypatch):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="it keeps weights in fp32"):
        LAMB([parameter], implementation="apex")
    with pytest.raises(ValueError, match="implementation must be auto, fastbert or apex, got 'x'"):
        LAMB([parameter], implementation="x")
    monkeypatch.delattr(sys.modules["amp_C"], "multi_tensor_lamb_mp")
    with pytest.raises(NotImplementedError, match=r"has no amp_C\.multi_tensor_lamb_mp"):
        LAMB([nn.Parameter(torch.ones(3))], implementation="apex")


def test_apex_that_is_not_there_is_refused():
    with pytest.raises(NotImplementedError, match=r"github.com/NVIDIA/apex"):
        LAMB([nn.Parameter(torch.ones(3))], implementation="apex")
