"""transformers' models with the masks of our dropout stream (docs/dropout.md) in place of their own
dropouts. On a batch without padding a packed row is a padded row, so the masks fit both."""

import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

import torch

from fastbert.ops.philox import row_keep_mask, score_keep_mask
from fastbert.reference.philox import (
    PLACE_ATTENTION,
    dropout_scale,
    dropout_threshold,
    layer_site,
)


class StreamDropout(torch.nn.Module):
    """A dropout module that multiplies rows by the stream's mask.

    Args:
        rng_state: `(2,)` int64. p: the probability.
        sites: of its calls one after the other: one, or as many as a shared layer is used.
    """

    def __init__(self, rng_state: torch.Tensor, sites: Iterable[int], p: float):
        super().__init__()
        self.rng_state, self.sites, self.p = rng_state, iter(sites), p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x[..., 0].numel(), x.shape[-1]
        site = next(self.sites)
        keep = row_keep_mask(self.rng_state, rows, columns, dropout_p=self.p, site=site)
        return torch.where(keep.view_as(x), x, 0) * dropout_scale(dropout_threshold(self.p))


@contextlib.contextmanager
def stream_attention_dropout(rng_state: torch.Tensor, num_layers: int) -> Iterator[None]:
    """torch's dropout of attention probabilities `(B, N, S, S)` by the stream, layer after layer;
    transformers' eager attention calls it.

    Args:
        rng_state: `(2,)` int64.
        num_layers: layers that will be run.
    """
    layers = iter(range(num_layers))

    def dropout(x, p=0.5, training=True, inplace=False):
        shape = (torch.arange(x.shape[0]), *x.shape[1:])
        site = layer_site(next(layers), PLACE_ATTENTION)
        keep = score_keep_mask(rng_state, *shape, dropout_p=p, site=site)
        return torch.where(keep, x, 0) * dropout_scale(dropout_threshold(p))

    with mock.patch.object(torch.nn.functional, "dropout", dropout):
        yield
