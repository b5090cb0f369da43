"""Runs of tests: what their processes do, and what is compared of them."""

import json
import os
from collections import Counter
from pathlib import Path

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fastbert
from fastbert import dispatch
from fastbert.train.config import DistillConfig, config_from
from fastbert.train.distillation import distill
from fastbert.train.exporting import export
from fastbert.train.journal import METRICS, read_records
from fastbert.train.parallel import whole
from fastbert.train.pretraining import Pretraining, pretrain
from fastbert.train.processes import joined

# Classes that load lazily: the server of `fastbert.testing.killing` imports this file, so that its
# processes need not load them one by one.
LOADED = (
    fastbert.BertForMaskedLM,
    fastbert.BertForPreTraining,
    fastbert.ElectraForPreTraining,
    fastbert.DebertaV2ForPreTraining,
    transformers.AutoTokenizer,
)
# Figures that depend on what is learned, not on the clock.
LEARNED = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "num_labels",
    "num_tokens",
    "epoch",
    "skipped",
    "heldout_loss",
    "heldout_accuracy",
    # Of a distillation.
    "soft_loss",
    "mlm_loss",
    "cosine_loss",
    # Of replaced-token detection.
    "detection_loss",
    "heldout_recall",
)


def run(settings: dict) -> None:
    """A pretraining, in one thread."""
    torch.set_num_threads(1)
    pretrain(config_from(settings))


def finetune_rows(kind: str, base: str, rows: list[dict], output: str, training: dict, **options):
    """A fine-tuning, in one thread, judged by the last quarter of the rows."""
    from fastbert.tasks import TrainingSettings
    from fastbert.tasks.trainings import training_named

    torch.set_num_threads(1)
    first = len(rows) * 3 // 4
    options |= {"output": output, "training": TrainingSettings(**training)}
    return training_named(kind).run(base, rows[:first], rows[first:], **options)


def run_distillation(settings: dict) -> None:
    """A distillation, in one thread."""
    torch.set_num_threads(1)
    distill(config_from(settings, kind=DistillConfig))


class _Sent(TorchDispatchMode):
    """Counts collectives; torch's own mode for this hooks modules, which are then not fused."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_counted(settings: dict, path: str) -> None:
    """A pretraining; the first process writes what it called and sent.

    Args:
        settings: of the run.
        path: of JSON: `ops`, calls of each op and backend, and `sent`, those of each collective.
    """
    before = dispatch.counters()
    with _Sent() as sent:
        run(settings)
    ops = {" ".join(key): n for key, n in sorted((dispatch.counters() - before).items())}
    if os.environ.get("RANK", "0") == "0":
        Path(path).write_text(json.dumps({"ops": ops, "sent": sent.counts}))


def run_and_write_state(settings: dict, path: str, go_on_from: str | None = None) -> None:
    """A pretraining to its end, whose state the first process writes whole.

    Args:
        settings: of the run.
        path: to write weights, optimizer state, average and the steps done to.
        go_on_from: a checkpoint, from which the run then goes on once more.
    """
    torch.set_num_threads(1)
    with joined(torch.device("cpu")) as processes:
        pretraining = Pretraining(config_from(settings), processes)
        pretraining.run()
        state = tree_map_only(torch.Tensor, whole, pretraining.state())
        if processes.is_first:
            torch.save(state | {"steps_done": pretraining.steps_done}, path)
        if go_on_from is not None:
            settings["checkpoint"]["resume_from"] = go_on_from
            Pretraining(config_from(settings), processes).run()


def learned(folder: str | Path) -> list[dict]:
    """A run's records without times."""
    records = read_records(Path(folder) / METRICS)
    return [{name: record.get(name) for name in LEARNED} for record in records]


def weights(folder: str | Path, *, average: bool = False) -> bytes:
    """A run's last weights, or their average, as they are exported beside it."""
    output = Path(f"{folder} exported{' average' if average else ''}")
    export(folder, output, average=average)
    return (output / "model.safetensors").read_bytes()
