"""A whole training step, forward to optimizer, of fixed shapes: one CUDA graph, no wait for the
device.

The step reads a batch of `fastbert.padding.pack`, whose shapes do not depend on its lengths. What
other loops ask the host for happens on the device: the dropout stream advances there, a gradient
that is not finite makes the optimizer leave weights and state alone there, and the loss is copied
back and read some steps later.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed, nn

from fastbert.capture import capture, warm_up
from fastbert.ops import index_flags
from fastbert.ops.philox import check_rng_state
from fastbert.padding import IGNORE_INDEX
from fastbert.train import parallel

WARM_UP_STEPS = 3
"""Steps run as they are before the capture: libraries make their workspaces in them."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        step: number of the step, from 0.
        loss: mean over the labels of the step. grad_norm: of all gradients, before clipping.
        skipped: whether a gradient was not finite, and weights and state were left alone.
        num_labels: labels the loss is a mean of.
        parts: what else the loss function tells, by name.
    """

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    num_labels: int
    parts: Mapping[str, float] = field(default_factory=dict)


def model_loss(model: nn.Module, batch: Mapping, rng_state, num_labels, **options) -> torch.Tensor:
    """The loss of a fastbert head: the sum over the batch's labels over `num_labels`."""
    return model(**batch, rng_state=rng_state, num_items_in_batch=num_labels, **options).loss


class GraphedStep:
    """One call is one optimizer step: forward, backward, clipping, update.

    On a GPU the first calls run as they are, on the batches given; the next one is captured as one
    CUDA graph and from then on replayed. On a CPU, or with `graph=False`, the same code runs
    without a graph. Several batches in one call are accumulated, and the loss is the mean over all
    their labels, as if they were one batch.

    The learning rate is a tensor in the optimizer's groups, so torch's schedulers act on it between
    calls.

    In several processes (`fastbert.train.parallel.distribute`) the loss is the mean over the labels
    of all of them, whatever share each has; gradients are exchanged once a step, and no graph is
    captured.

    Args:
        model: on one device, maybe in `DistributedDataParallel` or sharded by FSDP2; its forward
            takes the batch's keys.
        optimizer: of torch with `fused=True` (Adam, AdamW, SGD, Adagrad), or any that leaves
            weights and state alone where its attribute `found_inf` is 1
            (`_step_supports_amp_scaling`, as torch calls it).
        max_grad_norm: clips the norm of all gradients; None: no clipping.
        dtype: of autocast, bf16 or fp16; None: no autocast.
        scaler: `torch.amp.GradScaler` for fp16.
        rng_state: `(2,)` int64 (seed, offset) of the dropout stream (docs/dropout.md) on the
            model's device, copied; the offset is raised by 1 in every forward. None: drawn from
            torch's generator.
        loss: `loss(model, batch, rng_state, num_labels)`, the batch's share of a mean over
            `num_labels` labels; or a mapping of such shares, of which `loss` is differentiated and
            the others are reported.
        lag: steps after which a report is read.
        graph: whether to capture; None: on a GPU, in one process.

    Raises:
        ValueError: an optimizer that would have to ask the host whether to skip, fp16 without a
            scaler, `graph=True` on a CPU or in several processes, negative lag.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = 1.0,
        dtype: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        rng_state: torch.Tensor | None = None,
        loss: Callable = model_loss,
        lag: int = 2,
        graph: bool | None = None,
    ):
        self.model, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        _check_optimizer(optimizer)
        if dtype is torch.float16 and scaler is None:
            raise ValueError(
                "dtype float16 needs scaler=torch.amp.GradScaler(...): gradients of fp16 underflow"
            )
        if lag < 0:
            raise ValueError(f"lag must be 0 or more, got {lag}")
        if graph and self.device.type != "cuda":
            raise ValueError(f"graph=True needs a model on a GPU, this one is on {self.device}")
        self._is_distributed = parallel.is_distributed(model)
        if graph and self._is_distributed:
            raise ValueError("graph=True is for one process, this model is distributed")
        if rng_state is None:
            rng_state = torch.empty(2, dtype=torch.int64, device=self.device).random_()
        check_rng_state("GraphedStep", rng_state, self.device)
        self.rng_state = rng_state.clone()
        self._max_grad_norm, self._dtype, self._scaler = max_grad_norm, dtype, scaler
        self._loss, self._lag = loss, lag
        self._parts: tuple[str, ...] = ()
        wants_graph = self.device.type == "cuda" and not self._is_distributed
        self._uses_graph = wants_graph if graph is None else graph
        self._num_steps, self._warm_up_steps = 0, WARM_UP_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[dict] | None = None
        self._reports: deque = deque()
        self._learning_rates = [self._learning_rate(group) for group in optimizer.param_groups]

    def __call__(self, *batches: Mapping) -> StepReport | None:
        """Runs one step.

        Args:
            batches: of `fastbert.padding.pack`, with `labels`; the same number, keys, shapes and
                dtypes in every call. Tensors in pinned memory are copied without a wait.

        Returns:
            The report of the step `lag` calls ago; None in the first `lag` calls.

        Raises:
            ValueError: no batch, or batches unlike the first call's.
            IndexError: ids outside their table in the step reported.
        """
        self._load(batches)
        self._keep_learning_rates()
        if not self._uses_graph:
            results = self._step()
        elif self._warm_up_steps > 0:
            self._warm_up_steps -= 1
            results = warm_up(self._step, self.device)
        else:
            if self._graph is None:
                self._capture()
            self._graph.replay()
            results = self._results
        self._reports.append((self._num_steps, *_to_host(results)))
        self._num_steps += 1
        return self._next_report() if len(self._reports) > self._lag else None

    def drain(self) -> list[StepReport]:
        """The reports not read yet; waits for the device."""
        return [self._next_report() for _ in range(len(self._reports))]

    def state_dict(self) -> dict:
        """What a resumed run needs beside the model's, optimizer's and scaler's states."""
        return {"rng_state": self.rng_state.clone(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping) -> None:
        """Takes the state of another `GraphedStep`."""
        self.rng_state.copy_(state["rng_state"])
        self._num_steps = state["num_steps"]

    # --- the step

    def _step(self) -> torch.Tensor:
        """fp64 on the device: loss, gradient norm, skipped, number of labels, wrong ids, parts."""
        self.optimizer.zero_grad(set_to_none=True)
        num_labels = sum((batch["labels"] != IGNORE_INDEX).sum() for batch in self._inputs)
        self._add_over_processes(num_labels)
        # A batch without any label has loss 0 and no gradient, not NaN.
        share = num_labels.clamp(min=1)
        if self._is_distributed:
            # Gradients become the mean over the processes, and are to be their sum.
            share = share / distributed.get_world_size()
        shares = []
        for number, batch in enumerate(self._inputs, 1):
            with parallel.exchanging(self.model, is_due=number == len(self._inputs)):
                shares.append(self._forward_backward(batch, share))
        losses = torch.stack(shares).sum(0)
        if self._is_distributed:
            losses /= distributed.get_world_size()
            self._add_over_processes(losses)
        grad_norm, found_inf = self._update()
        flag = index_flags.pending(self.device)
        wrong_ids = torch.zeros_like(num_labels) if flag is None else flag
        values = (losses[0], grad_norm, found_inf, num_labels, wrong_ids, *losses[1:])
        return torch.stack([v.detach().double().reshape(()) for v in values])

    def _forward_backward(self, batch: dict, num_labels: torch.Tensor) -> torch.Tensor:
        """The batch's shares of the loss and of its parts."""
        autocast = self._dtype is not None
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=autocast):
            losses = self._loss(self.model, batch, self.rng_state.clone(), num_labels)
        if not isinstance(losses, Mapping):
            losses = {"loss": losses}
        self._parts = tuple(name for name in losses if name != "loss")
        loss = losses["loss"]
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self.rng_state[1] += 1
        return torch.stack([loss.detach(), *(losses[name].detach() for name in self._parts)])

    def _add_over_processes(self, value: torch.Tensor) -> None:
        if self._is_distributed:
            distributed.all_reduce(value)

    def _update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips and updates; the norm before clipping, and 1 where the update was skipped."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        grad_norm = parallel.whole(nn.utils.get_total_norm(gradients))
        if self._max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self._parameters(), self._max_grad_norm, grad_norm)
        # Where a gradient is not finite the norm is not either.
        found_inf = (~grad_norm.isfinite()).float()
        self.optimizer.grad_scale, self.optimizer.found_inf = None, found_inf
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf
        if self._scaler is not None:
            self._scaler.update()
        return grad_norm, found_inf

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    # --- the graph

    def _capture(self) -> None:
        # Gradients are then allocated in the graph's own memory, where each replay writes them.
        self.optimizer.zero_grad(set_to_none=True)
        self._graph, self._results = capture(self._step, self.device)

    def _load(self, batches: Sequence[Mapping]) -> None:
        """Copies the batches to where the graph reads them."""
        if not batches:
            raise ValueError("a step needs at least one batch")
        if self._inputs is None:
            self._inputs = [
                {k: self._on_device(v) for k, v in batch.items() if v is not None}
                for batch in batches
            ]
            return
        if len(batches) != len(self._inputs):
            raise ValueError(
                f"every step takes {len(self._inputs)} batches like the first, got {len(batches)}"
            )
        for batch, inputs in zip(batches, self._inputs, strict=True):
            _check_like(batch, inputs)
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    inputs[name].copy_(value, non_blocking=True)

    def _on_device(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(self.device, copy=True)

    def _learning_rate(self, group: dict) -> torch.Tensor:
        """The group's rate as a tensor: a number would be frozen into the graph."""
        if self.device.type == "cuda" and "capturable" in group:
            group["capturable"] = True
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(self.device, copy=True)
        return group["lr"]

    def _keep_learning_rates(self) -> None:
        """A rate that was assigned in place of the tensor goes into the tensor the graph reads."""
        groups = self.optimizer.param_groups
        for group, learning_rate in zip(groups, self._learning_rates, strict=True):
            if group["lr"] is not learning_rate:
                learning_rate.fill_(group["lr"])
                group["lr"] = learning_rate

    # --- reports

    def _next_report(self) -> StepReport:
        step, values, event = self._reports.popleft()
        if event is not None:
            event.synchronize()
        loss, grad_norm, skipped, num_labels, wrong_ids, *parts = values.tolist()
        if wrong_ids:
            index_flags.raise_pending(self.device)
        named = dict(zip(self._parts, parts, strict=True))
        return StepReport(step, loss, grad_norm, bool(skipped), int(num_labels), named)


def _to_host(results: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy of the results, and the event after which it may be read."""
    if results.device.type != "cuda":
        return results, None
    values = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    values.copy_(results, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return values, event


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"GraphedStep: {type(optimizer).__name__} cannot skip a step on the device; pass "
            "fused=True to torch's Adam, AdamW, SGD or Adagrad"
        )


def _check_like(batch: Mapping, inputs: Mapping) -> None:
    """Raises unless `batch` fits the graph made for `inputs`."""
    given = {name for name, value in batch.items() if value is not None}
    if given != inputs.keys():
        raise ValueError(
            f"every batch must have the keys {sorted(inputs)} like the first, got {sorted(given)}"
        )
    for name, expected in inputs.items():
        value = batch[name]
        if not isinstance(expected, torch.Tensor):
            fits = type(value) is type(expected) and value == expected
        else:
            fits = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (
                expected.shape,
                expected.dtype,
            )
        if not fits:
            raise ValueError(
                f"{name} must be like the first batch's, {_describe(expected)}, got "
                f"{_describe(value)}; pack every batch with the same capacities"
            )


def _describe(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return repr(value)
