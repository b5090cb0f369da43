"""Counts against a binomial law, with a bound that says how seldom it is wrong."""

import math

ALARM = 1e-6


def assert_proportion(hits: int, trials: int, p: float, alarm: float = ALARM) -> None:
    """Fails where `hits` of `trials` are too far from `p` to be chance.

    Chernoff's bound: a share q as far or farther from p on its side comes up with probability at
    most exp(-trials · KL(q, p)), KL the relative entropy of the two coins; both sides together are
    held to `alarm`.
    """
    assert trials > 0, "no trial was made"
    q = hits / trials
    entropy = sum(
        share * math.log(share / expected)
        for share, expected in ((q, p), (1 - q, 1 - p))
        if share > 0
    )
    bound = math.log(2 / alarm) / trials
    assert entropy <= bound, (
        f"{hits} of {trials} are {q:.5f} where {p:.5f} is expected; chance does this less often "
        f"than once in {1 / alarm:.0e}"
    )
