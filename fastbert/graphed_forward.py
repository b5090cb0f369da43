"""Inference in fixed shapes: one CUDA graph per bucket of tokens, nothing for the host to wait for.

Letters: T rows of a bucket, B sequences.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fastbert.capture import capture, warm_up
from fastbert.padding import pack


class GraphedForward:
    """Runs a model on batches of any lengths, each in the smallest bucket it fits into.

    On a GPU the first batch of a bucket captures its graph and later ones replay it: a forward is
    then one launch, which is what small batches spend their time on. On a CPU, or with
    `graph=False`, the same shapes run without graphs. Weights may change in place, also between
    replays; a weight that is replaced by another tensor needs a new `GraphedForward`.

    Args:
        model: in eval mode, on one device.
        token_buckets: tokens T of a batch, one graph each.
        num_sequences: most sequences of a batch.
        max_seqlen: longest sequence; None: the bucket.
        dtype: of autocast, bf16 or fp16; None: no autocast.
        pad_token_id: input id of filling.
        graph: whether to capture; None: on a GPU.

    Raises:
        ValueError: a model in training mode, no buckets, `graph=True` on a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token_buckets: Sequence[int],
        num_sequences: int,
        max_seqlen: int | None = None,
        dtype: torch.dtype | None = None,
        pad_token_id: int = 0,
        graph: bool | None = None,
    ):
        if model.training:
            raise ValueError("GraphedForward is for inference; call model.eval() before")
        if not token_buckets or min(token_buckets) < 1:
            raise ValueError(f"token_buckets must be positive numbers, got {list(token_buckets)}")
        self.model, self.device = model, next(model.parameters()).device
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph=True needs a model on a GPU, this one is on {self.device}")
        self._buckets = sorted(token_buckets)
        self._num_sequences, self._max_seqlen = num_sequences, max_seqlen
        self._dtype, self._pad_token_id = dtype, pad_token_id
        self._uses_graph = self.device.type == "cuda" if graph is None else graph
        self._captured: dict[int, tuple] = {}
        self._pool = None

    def __call__(self, features: Sequence[Mapping]):
        """Runs one batch.

        Args:
            features: sequences as `fastbert.padding.pack` takes them, without labels.

        Returns:
            The model's output: tensors of tokens as `(1, T', ...)`, the real tokens one sequence
            after the other, and of sequences (`pooler_output`, two-dimensional logits) as
            `(B', ...)`, without what fills the bucket.

        Raises:
            ValueError: a batch that fits into no bucket.
        """
        num_tokens = sum(len(feature["input_ids"]) for feature in features)
        batch = pack(
            features,
            num_tokens=self._bucket(num_tokens),
            num_sequences=self._num_sequences,
            max_seqlen=self._max_seqlen,
            pad_token_id=self._pad_token_id,
            first_position=self.model.base_model.first_position,
        )
        outputs = self._replay(batch) if self._uses_graph else self._forward(self._moved(batch))
        return type(outputs)(
            **{
                name: _without_filling(value, num_tokens, len(features))
                for name, value in outputs.items()
            }
        )

    def _bucket(self, num_tokens: int) -> int:
        for bucket in self._buckets:
            if num_tokens <= bucket:
                return bucket
        raise ValueError(
            f"the batch has {num_tokens} tokens, the largest of token_buckets is "
            f"{self._buckets[-1]}; split the batch or add a bucket"
        )

    def _forward(self, batch: Mapping):
        autocast = torch.autocast(
            self.device.type, dtype=self._dtype, enabled=self._dtype is not None
        )
        with torch.no_grad(), autocast:
            return self.model(**batch, return_dict=True)

    def _moved(self, batch: Mapping) -> dict:
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def _replay(self, batch: Mapping):
        # Columns may differ from call to call: token types given or not.
        key = (batch["input_ids"].shape[1], *sorted(batch))
        if key not in self._captured:
            inputs = self._moved(batch)
            warm_up(lambda: self._forward(inputs), self.device)
            graph, outputs = capture(lambda: self._forward(inputs), self.device, self._pool)
            self._pool = graph.pool()
            self._captured[key] = (graph, inputs, outputs)
        graph, inputs, outputs = self._captured[key]
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                inputs[name].copy_(value, non_blocking=True)
        graph.replay()
        return outputs


def _without_filling(value, num_tokens: int, num_sequences: int):
    """A copy of the part that was asked for: the next replay overwrites the graph's own."""
    if isinstance(value, tuple):
        return tuple(_without_filling(part, num_tokens, num_sequences) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    return (value[:, :num_tokens] if value.dim() == 3 else value[:num_sequences]).clone()
