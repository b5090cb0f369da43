"""An average of the weights over the steps, of lower loss than the weights while the rate is high.

Source: Polyak and Juditsky 1992, with shares that fall exponentially as in Tarvainen and Valpola
2017, section 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fastbert.train.parallel import own_part


class WeightAverage:
    """average = decay · average + (1 - decay) · weights, after every step.

    torch's `AveragedModel` copies the whole model, which a sharded one refuses; here each process
    averages the parts that it holds. A step that was skipped counts as one that changed nothing.

    Args:
        model: whose parameters, after `fastbert.train.parallel.distribute`, are averaged.
        decay: in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float):
        self._weights = {name: p.detach() for name, p in model.named_parameters()}
        self._averages = {name: weight.clone() for name, weight in self._weights.items()}
        self._update = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """Takes in the weights as they are."""
        pairs = [
            (own_part(average), own_part(self._weights[name]))
            for name, average in self._averages.items()
        ]
        self._update(*map(list, zip(*pairs, strict=True)), None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In the block, the model has the averages as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages by their parameters' names; what is written into them is taken."""
        return self._averages

    def _swap(self) -> None:
        for name, average in self._averages.items():
            weight = own_part(self._weights[name])
            average = own_part(average)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
