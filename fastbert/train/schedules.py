"""Learning rates: up linearly, then down, as a factor for torch's `LambdaLR`."""

import math
from collections.abc import Callable

from fastbert.train.config import ScheduleConfig


def factor(schedule: ScheduleConfig, num_steps: int) -> Callable[[int], float]:
    """The share of the peak rate that step 0, 1, ... is taken with.

    Step s of the warm-up has (s + 1) / warmup_steps, so that no step is wasted on a rate of 0.
    Behind it, with p from 0 at its end to 1 at `num_steps` and f the final share:

        linear  1 - (1 - f) p
        poly    f + (1 - f) (1 - p)^power          (BERT's published code, power 1)
        cosine  f + (1 - f) (1 + cos(pi p)) / 2    (Loshchilov and Hutter 2017, equation 5)
        wsd     1, then linearly to f in the last `decay_steps`  (Hu et al. 2024, section 4)

    Args:
        schedule: kind and numbers, checked by `fastbert.train.config.check`.
        num_steps: of the run.
    """
    warmup, final = schedule.warmup_steps, schedule.final_share
    begin = num_steps - schedule.decay_steps if schedule.kind == "wsd" else warmup

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(max(step - begin, 0) / max(num_steps - begin, 1), 1.0)
        if schedule.kind == "cosine":
            left = (1 + math.cos(math.pi * progress)) / 2
        elif schedule.kind == "poly":
            left = (1 - progress) ** schedule.power
        else:
            left = 1 - progress
        return final + (1 - final) * left

    return at
