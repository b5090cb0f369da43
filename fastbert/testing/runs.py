"""Pretraining runs of tests: what their processes do, and what is compared of them."""

from pathlib import Path

import torch
import transformers

import fastbert
from fastbert.train.config import config_from
from fastbert.train.exporting import export
from fastbert.train.journal import METRICS, read_records
from fastbert.train.pretraining import pretrain

# Classes that load lazily: the server of `fastbert.testing.killing` imports this file, so that its
# processes need not load them one by one.
LOADED = (
    fastbert.BertForMaskedLM,
    fastbert.BertForPreTraining,
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
)


def run(settings: dict) -> None:
    """A pretraining, in one thread."""
    torch.set_num_threads(1)
    pretrain(config_from(settings))


def learned(folder: str | Path) -> list[dict]:
    """A run's records without times."""
    records = read_records(Path(folder) / METRICS)
    return [{name: record.get(name) for name in LEARNED} for record in records]


def weights(folder: str | Path) -> bytes:
    """A run's last weights, as they are exported beside it."""
    output = Path(f"{folder} exported")
    export(folder, output)
    return (output / "model.safetensors").read_bytes()
