"""Pretraining: the loop.

    RUN/config.yaml                settings
    RUN/config.json, tokenizer/    of the model
    RUN/metrics.jsonl              a line a step
    RUN/checkpoints/               see fastbert.train.checkpoints
    RUN/nonfinite/                 batches of the steps that stopped a run

A step is a function of the checkpoint before it: what is drawn at random comes from seeds and
places that the checkpoint holds, so a run that is killed anywhere and started again goes on as if
it had not been.
"""

import io
import random
import signal
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoTokenizer

from fastbert.data import Corpus
from fastbert.data.corpus import write_atomically
from fastbert.differences import differences
from fastbert.train import building
from fastbert.train.averaging import WeightAverage
from fastbert.train.batches import BatchStream, Place, TrainingBatch, masking_of, prefetched
from fastbert.train.checkpoints import Checkpoints
from fastbert.train.config import FREE, ConfigError, PretrainConfig, check, read_run
from fastbert.train.evaluation import DetectionEvaluation, Evaluation, evaluate
from fastbert.train.graphed_step import GraphedStep, StepReport, model_loss
from fastbert.train.journal import Journal, SilentJournal
from fastbert.train.parallel import distribute
from fastbert.train.processes import Processes, joined
from fastbert.train.schedules import factor


class NonFiniteError(RuntimeError):
    """Too many steps in a row whose gradients were not finite."""


@dataclass(frozen=True)
class Summary:
    """What became of a run.

    Attributes:
        steps: done in all. finished: whether these are all; False after SIGTERM.
        loss: of the last step; None if all were done before.
        skipped: steps of this process that changed nothing.
        num_tokens: since this process began, of all. seconds: the time it took.
        heldout: the last evaluation, if there was one.
    """

    steps: int
    finished: bool
    loss: float | None
    skipped: int
    num_tokens: int
    seconds: float
    heldout: Evaluation | DetectionEvaluation | None


@dataclass(frozen=True)
class _Pending:
    """What is known of a step before its report is read."""

    step: int
    lr: float
    seconds: float
    batches: list[TrainingBatch]
    agreed: torch.Tensor


def pretrain(config: PretrainConfig) -> Summary:
    """Runs, or goes on with, a pretraining.

    Sets torch's, numpy's and Python's global seeds. Under torchrun the processes train together.

    Raises:
        ConfigError: settings that cannot be used, or that differ from those of the run that is in
            `config.output`.
        CheckpointError: a checkpoint that cannot be written or read.
        NonFiniteError: `max_skipped` steps in a row were skipped.
    """
    # It is built on what stands here.
    from fastbert.train.replaced_tokens import ReplacedTokenPretraining

    kinds = {"masked_lm": Pretraining, "replaced_tokens": ReplacedTokenPretraining}
    with joined(building.device_of(config)) as processes:
        return kinds[config.objective](config, processes).run()


class Pretraining:
    """A run in this process, maybe one of several; `run` does it all."""

    def __init__(self, config: PretrainConfig, processes: Processes | None = None):
        self.processes = Processes() if processes is None else processes
        self.device = building.device_of(config)
        check(config, num_ranks=self.processes.size, has_gpu=self.device.type == "cuda")
        masking_of(config.data.masking, config.num_steps)
        self.config, self.folder = config, Path(config.output)
        _check_same_run(self.folder, config)
        _seed_everything(config.seed)
        self.corpus = _open_corpus("data.corpus", config.data.corpus)
        self.tokenizer = AutoTokenizer.from_pretrained(self.corpus.folder / "tokenizer")
        self.heldout = self._open_heldout()
        self.model = self.build_model().to(self.device)
        if config.activation_checkpointing:
            building.checkpoint_activations(self.model)
        if config.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        self.parallel_model = distribute(
            self.model, config.parallel, self.processes, building.DTYPES[config.precision]
        )
        self.optimizer = building.build_optimizer(config.optimizer, self.model)
        self.scaler = building.build_scaler(config.precision, self.device)
        self.step = self._graphed_step(_dropout_seed(config.seed, self.processes.rank))
        # Behind the step, which turns rates into tensors that schedulers then write into.
        self._factor = factor(config.schedule, config.num_steps)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        decay = config.average_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            config.checkpoint.keep,
            self.processes,
            background=config.checkpoint.background,
        )
        self.place = Place()
        self.steps_done = self.skipped_in_a_row = 0
        self._pending: deque[_Pending] = deque()
        self._recent: deque[_Pending] = deque(maxlen=config.max_skipped)
        self._skipped, self._num_tokens = 0, 0
        self._loss: float | None = None
        self._asked_to_stop = self._stopping = False
        self._evaluation: Evaluation | DetectionEvaluation | None = None

    def run(self) -> Summary:
        """Trains to the end, or to a SIGTERM."""
        self.resume()
        if self.processes.is_first:
            self._write_description()
        begun = time.perf_counter()
        with self._open_journal() as self.journal, self._terminable(), self.checkpoints:
            end = 0
            for number, phase in enumerate(self.config.phases):
                end += phase.steps
                if self.steps_done < end and not self._stopping:
                    self._run_phase(number, end)
        return Summary(
            self.steps_done,
            self.steps_done == self.config.num_steps,
            self._loss,
            self._skipped,
            self._num_tokens,
            time.perf_counter() - begun,
            self._evaluation,
        )

    def _run_phase(self, number: int, end: int) -> None:
        """Trains until `end` steps are done."""
        if self.place.phase != number:
            # Other sequences and shapes: a new epoch, and a new step to be captured.
            self._drain()
            self.place = Place(phase=number, epoch=self.place.epoch + 1)
            state = self.step.state_dict()
            self.step = self._graphed_step(state["rng_state"])
            self.step.load_state_dict(state)
        stream = self._stream(number, self.corpus, self.place)
        with closing(prefetched(iter(stream))) as batches:
            while self.steps_done < end and not self._stopping:
                self._train(islice(batches, stream.accumulation))
                if self._is_due(self.config.evaluation.every) and self.heldout is not None:
                    self._evaluate(number)
                if self._is_due(self.config.checkpoint.every) or self._stopping:
                    self._save()

    def _train(self, stream: Iterator[TrainingBatch]) -> None:
        """One optimizer step; on a GPU its report is read in a later one."""
        begun = time.perf_counter()
        batches = list(stream)
        lr = self.config.optimizer.lr * self._factor(self.steps_done)
        report = self.step(*(batch.inputs for batch in batches))
        self.scheduler.step()
        if self.average is not None:
            self.average.update()
        seconds = time.perf_counter() - begun
        # Summed over the processes, so that all know the same and stop at the same step.
        num_tokens = sum(batch.num_tokens for batch in batches)
        agreed = self.processes.add(torch.tensor([num_tokens, int(self._asked_to_stop)]))
        self._pending.append(_Pending(self.steps_done, lr, seconds, batches, agreed))
        self.steps_done += 1
        self.place = batches[-1].place
        if report is not None:
            self._note(report)

    def _is_due(self, every: int) -> bool:
        return self.steps_done % every == 0 or self.steps_done == self.config.num_steps

    def _note(self, report: StepReport) -> None:
        """Records a step, and stops the run if too many in a row were skipped."""
        pending = self._pending.popleft()
        self._recent.append(pending)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if report.skipped else 0
        self._skipped += report.skipped
        self._loss = report.loss
        num_tokens, asked_to_stop = pending.agreed.tolist()
        self._stopping |= asked_to_stop > 0
        self._num_tokens += num_tokens
        capacity = sum(b.capacity for b in pending.batches) * self.processes.size
        values = {
            "loss": report.loss,
            **report.parts,
            "grad_norm": report.grad_norm,
            "lr": pending.lr,
            "skipped": report.skipped,
            "num_labels": report.num_labels,
            "num_tokens": num_tokens,
            "epoch": pending.batches[-1].place.epoch,
            "padding_share": 1 - num_tokens / capacity,
            "tokens_per_second": num_tokens / pending.seconds,
        }
        if self.config.log.peak_tflops is not None:
            # Of this process, whose share of the tokens is that of the others.
            flops = sum(self.flops(b.lengths, b.num_labels) for b in pending.batches)
            values["mfu"] = flops / pending.seconds / (self.config.log.peak_tflops * 1e12)
        self.journal.record(report.step + 1, values)
        if self.skipped_in_a_row >= self.config.max_skipped:
            self._give_up()

    def _drain(self) -> None:
        for report in self.step.drain():
            self._note(report)

    def _give_up(self) -> None:
        folder = self.folder / "nonfinite"
        if self.processes.size > 1:
            folder /= f"rank-{self.processes.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        for pending in self._recent:
            batches = [batch.inputs for batch in pending.batches]
            torch.save(batches, folder / f"step-{pending.step + 1}.pt")
        raise NonFiniteError(
            f"{self.skipped_in_a_row} steps in a row up to step {self._recent[-1].step + 1} had "
            f"gradients that are not finite; their batches are in {folder}. Lower optimizer.lr, "
            f"lengthen schedule.warmup_steps, or train in bf16 if this is fp16; the checkpoints "
            f"are {', '.join(self.checkpoints.names()) or 'none yet'}"
        )

    def _evaluate(self, phase: int) -> None:
        self._drain()
        stream = self._stream(phase, self.heldout, Place())
        first_epoch = takewhile(lambda batch: batch.place.epoch == 0, stream)
        batches = islice(first_epoch, self.config.evaluation.batches)
        dtype = building.DTYPES[self.config.precision]
        with self.average.in_use() if self.config.evaluation.average else nullcontext():
            self._evaluation = evaluation = self.evaluate(
                self.model, batches, dtype, self.processes
            )
        self.journal.record(
            self.steps_done,
            {f"heldout_{name}": value for name, value in asdict(evaluation).items()},
        )

    # --- parts

    def build_model(self) -> torch.nn.Module:
        """The model to train, in training mode."""
        return building.build_model(
            self.config.model,
            self.tokenizer,
            pairs=self.config.data.sequences != "packed",
            max_length=max(phase.max_length for phase in self.config.phases),
        )

    def flops(self, lengths: np.ndarray, num_labels: int) -> float:
        """Of a step on sequences of these lengths."""
        return building.training_flops(self.model.config, lengths, num_labels)

    # A sharded model could not compute logits later, when they are read, and none are.
    step_loss = staticmethod(partial(model_loss, return_logits=False))
    evaluate = staticmethod(evaluate)

    def _graphed_step(self, rng_state: torch.Tensor) -> GraphedStep:
        return GraphedStep(
            self.parallel_model,
            self.optimizer,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            dtype=building.DTYPES[self.config.precision],
            scaler=self.scaler,
            rng_state=rng_state.to(self.device),
            loss=self.step_loss,
            # Reading a report of a GPU at once would wait for it.
            lag=2 if self.device.type == "cuda" else 0,
        )

    def _stream(self, phase: int, corpus: Corpus, place: Place) -> BatchStream:
        return BatchStream(
            corpus,
            self.tokenizer,
            self.config.data,
            self.config.phases[phase],
            num_steps=self.config.num_steps,
            seed=self.config.seed,
            place=place,
            rank=self.processes.rank,
            num_ranks=self.processes.size,
            first_step=sum(p.steps for p in self.config.phases[:phase]),
            pin=self.device.type == "cuda",
            last_layer_subset=self.config.last_layer_subset,
        )

    def _open_journal(self) -> Journal | SilentJournal:
        if not self.processes.is_first:
            return SilentJournal()
        return Journal(
            self.folder,
            self.config.log,
            num_steps=self.config.num_steps,
            first_step=self.steps_done,
            settings=self.config.to_dict(),
        )

    def _open_heldout(self) -> Corpus | None:
        if self.config.data.heldout is None:
            return None
        heldout = _open_corpus("data.heldout", self.config.data.heldout)
        other = AutoTokenizer.from_pretrained(heldout.folder / "tokenizer")
        if other.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                f"data.heldout {heldout.folder} was prepared with another tokenizer than "
                f"{self.corpus.folder}; prepare it with {self.corpus.folder / 'tokenizer'}"
            )
        return heldout

    def _write_description(self) -> None:
        """What export and resumption need beside checkpoints."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_configs()
        self.tokenizer.save_pretrained(self.folder / "tokenizer")
        text = yaml.safe_dump(_plain(self.config), sort_keys=False)
        write_atomically(self.folder / "config.yaml", text)

    def write_configs(self) -> None:
        """The model's, by which it is built again."""
        self.model.config.save_pretrained(self.folder)

    # --- nothing lost

    @contextmanager
    def _terminable(self) -> Iterator[None]:
        """SIGTERM lets the step end; the state is then saved."""

        def terminate(signum, frame):
            self._asked_to_stop = True

        before = signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _save(self) -> None:
        self._drain()
        # One after the other: what a full disk kept from being written is told before more is.
        self.checkpoints.finish()
        self.journal.sync()
        state = self._checkpointed({f"rank{self.processes.rank}": self._host_state()})
        self.checkpoints.save(self.steps_done, state)

    def resume(self) -> None:
        """Loads the last checkpoint, or the one asked for, if there is any."""
        chosen = self.config.checkpoint.resume_from
        names = self.checkpoints.names()
        if chosen is None and not names:
            return
        name = chosen or names[-1]
        self.checkpoints.verify(name)
        count = {"num_processes": 0}
        self.checkpoints.load(name, count)
        before = count["num_processes"]
        # A process that was not there goes on from what the first one had.
        source = f"rank{self.processes.rank if self.processes.rank < before else 0}"
        state = self._checkpointed({source: b""})
        self.checkpoints.load(name, state)
        if chosen is not None:
            self.checkpoints.set_aside_after(name)
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self._load_host_state(state["host"][source])
        if before != self.processes.size:
            self._go_on_among_others(name, before)

    def _go_on_among_others(self, name: str, before: int) -> None:
        """What a checkpoint of another number of processes does not tell this one."""
        self.place = self.place.among(self.processes.size, before)
        # All were at one offset, which none of the streams has passed.
        self.step.rng_state[0] = _dropout_seed(self.config.seed, self.processes.rank)[0]
        if self.processes.is_first:
            warnings.warn(
                f"{name} was written by {before} processes and goes on in {self.processes.size}: "
                "every sequence of the epoch is still met once, in other batches than it would "
                "have been",
                stacklevel=2,
            )

    def state(self) -> dict:
        """The tensors of a checkpoint, each whole or this process's part of it."""
        average = {} if self.average is None else {"average": self.average.state_dict()}
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            **average,
        }

    def _checkpointed(self, host: dict[str, bytes]) -> dict:
        """All that a checkpoint holds: tensors one by one, the rest of every process as bytes."""
        return {**self.state(), "host": host, "num_processes": self.processes.size}

    def _host_state(self) -> bytes:
        """All of this process but the tensors of model and optimizer."""
        numpy_state = np.random.get_state(legacy=False)
        numpy_state["state"]["key"] = numpy_state["state"]["key"].tolist()
        file = io.BytesIO()
        torch.save(
            {
                "steps_done": self.steps_done,
                "skipped_in_a_row": self.skipped_in_a_row,
                "place": asdict(self.place),
                "step": self.step.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "torch_rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
                "numpy_rng": numpy_state,
                "python_rng": random.getstate(),
            },
            file,
        )
        return file.getvalue()

    def _load_host_state(self, content: bytes) -> None:
        state = torch.load(io.BytesIO(content), weights_only=True)
        self.steps_done = state["steps_done"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.place = Place(**state["place"])
        self.step.load_state_dict(state["step"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        np.random.set_state(state["numpy_rng"])
        random.setstate(state["python_rng"])


def _open_corpus(name: str, folder: str) -> Corpus:
    try:
        return Corpus.open(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_same_run(folder: Path, config: PretrainConfig) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        return
    # Read whole: settings that are newer than the run have their defaults in it.
    changed = differences(_plain(read_run(folder)), _plain(config), free=FREE)
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings; choose another output, or remove it:\n"
            + "\n".join(changed)
        )


def _plain(config: PretrainConfig) -> dict:
    """The settings without tuples, which YAML would mark as Python's."""

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    # A checkpoint is asked for once; the run that goes on from it is resumed like any other.
    return plain(replace(config, checkpoint=replace(config.checkpoint, resume_from=None)).to_dict())


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _dropout_seed(seed: int, rank: int) -> torch.Tensor:
    """(seed, offset 0) of a rank's dropout stream."""
    word = np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    return torch.tensor([int(word), 0])
