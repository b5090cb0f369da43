"""Batches by tokens: every sequence once, within the budget, even across ranks, resumed exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from fastbert.data import TokenBudgetSampler
from fastbert.data.sampler import balance


def _samplers(lengths, budget, num_ranks, **options):
    return [
        TokenBudgetSampler(lengths, budget, rank=rank, num_ranks=num_ranks, **options)
        for rank in range(num_ranks)
    ]


def _steps(samplers):
    """Every step's batches, one for each rank."""
    return list(zip(*samplers, strict=True))


LENGTHS = st.lists(st.integers(1, 30), min_size=0, max_size=60)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(30, 90), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_every_sequence_once_within_the_budget(lengths, budget, num_ranks, shuffle, seed):
    lengths = np.array(lengths, np.int64)
    samplers = _samplers(lengths, budget, num_ranks, shuffle=shuffle, seed=seed)
    expected = [len(sampler) for sampler in samplers]
    steps = _steps(samplers)
    assert expected == [len(steps)] * num_ranks
    batches = [batch for step in steps for batch in step]
    assert all(batch and lengths[batch].sum() <= budget for batch in batches)
    seen = [i for batch in batches for i in batch]
    assert len(seen) == len(set(seen)) > len(lengths) - num_ranks
    assert samplers[0].epoch == 1


def test_a_step_that_fits_only_with_one_sequence_a_rank_is_made():
    """All five fit 3 x 30 in sum, but two of 27 leave no rank with room for two of 10."""
    steps = _steps(_samplers([27, 27, 10, 10, 10], 30, 3, shuffle=False))
    assert steps == [([0], [1], [2])]


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
@pytest.mark.parametrize("law", ["uniform", "long tail"])
def test_ranks_differ_by_less_than_two_percent(law, num_ranks):
    rng = np.random.default_rng(0)
    if law == "uniform":
        lengths = rng.integers(8, 513, 400 * num_ranks)
    else:
        lengths = np.minimum(rng.lognormal(4, 1, 2000 * num_ranks).astype(np.int64) + 3, 512)
    steps = _steps(_samplers(lengths, 16_384, num_ranks, drop_last=True))
    assert len(steps) >= 4
    for step in steps:
        tokens = np.array([lengths[batch].sum() for batch in step])
        assert (tokens.max() - tokens.min()) / tokens.max() < 0.02
        # The budget is used, too.
        assert tokens.mean() > 0.94 * 16_384


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=4, max_size=60), st.integers(1, 4))
def test_balance_shares_all_out(lengths, num_ranks):
    lengths = np.array(lengths)
    parts = balance(lengths, num_ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    sums = [int(lengths[part].sum()) for part in parts]
    # Longest first alone keeps ranks within one sequence of each other, exchanges or not.
    assert max(sums) - min(sums) <= lengths.max()


def test_exchanges_help_where_longest_first_does_not():
    """Longest first gives 50 + 33 + 22 and 45 + 40; exchanging 50 and 40 evens it out."""
    lengths = np.array([50, 45, 40, 33, 22])
    assert [int(lengths[part].sum()) for part in balance(lengths, 2)] == [95, 95]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_resume_is_exact(num_ranks):
    lengths = np.random.default_rng(1).integers(5, 120, 700)
    whole = _steps(_samplers(lengths, 1024, num_ranks, seed=4))
    assert len(whole) > 8
    for stop in (0, 1, 5, len(whole) - 1, len(whole)):
        for rank in range(num_ranks):
            old, new = (_samplers(lengths, 1024, num_ranks, seed=4)[rank] for _ in range(2))
            batches = iter(old)
            for _ in range(stop):
                next(batches)
            new.load_state_dict(old.state_dict())
            assert list(new) == [step[rank] for step in whole[stop:]]
            # And into the next epoch.
            assert new.epoch == 1
            old.set_epoch(1)
            assert list(new) == list(old)


def test_state_of_an_earlier_step():
    """A loader's workers are ahead of training; what counts are the steps that were trained on."""
    lengths = np.random.default_rng(1).integers(5, 120, 400)
    sampler = TokenBudgetSampler(lengths, 512)
    loader = DataLoader(torch.arange(400), batch_sampler=sampler, num_workers=1, prefetch_factor=4)
    trained = [next(batches) for batches in [iter(loader)] for _ in range(3)]
    assert len(trained) == 3
    state = sampler.state_dict(step=3)
    resumed = TokenBudgetSampler(lengths, 512)
    resumed.load_state_dict(state)
    assert list(resumed) == list(TokenBudgetSampler(lengths, 512))[3:]
    with pytest.raises(ValueError, match="step must lie in 0 to"):
        sampler.state_dict(step=100_000)


def test_epochs_have_their_own_order():
    lengths = np.full(64, 10)
    sampler = TokenBudgetSampler(lengths, 40)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    plain = TokenBudgetSampler(lengths, 40, shuffle=False)
    assert list(plain) == [list(range(i, i + 4)) for i in range(0, 64, 4)]


def test_drop_last():
    lengths = np.full(10, 10)
    assert [len(b) for b in TokenBudgetSampler(lengths, 40)] == [4, 4, 2]
    assert [len(b) for b in TokenBudgetSampler(lengths, 40, drop_last=True)] == [4, 4]


def test_arguments_that_are_none():
    with pytest.raises(ValueError, match="got 5 to 600"):
        TokenBudgetSampler([5, 600], 512)
    with pytest.raises(ValueError, match="rank must lie in 0 to 1, got 2"):
        TokenBudgetSampler([5], 512, rank=2, num_ranks=2)
    with pytest.raises(ValueError, match="tokens_per_batch must be at least 1"):
        TokenBudgetSampler([5], 0)
    with pytest.raises(ValueError, match="too few for 3 ranks"):
        balance(np.array([1, 2]), 3)
    sampler = TokenBudgetSampler([5, 6], 512, seed=1)
    with pytest.raises(ValueError, match=r"seed \(2 instead of 1\)"):
        sampler.load_state_dict(TokenBudgetSampler([5, 6], 512, seed=2).state_dict())
