"""A small BERT trained twice on the same batches of real text: transformers' model and ours.

    python -m benchmarks.pretraining_curves [--texts FILE_OR_FOLDER ...] [--steps 400]
        [--lr 5e-4] [--dropout 0.1] [--seed N] [--plot curves.png] [--json curves.json]

First 50 steps in fp32 without dropout, whose losses must agree. Then bf16 autocast with dropout:
blocks of steps of the one and of the other in turn in one process, so that a slow spell of the
machine meets both, and between blocks the held-out loss of both, outside of the clocks.

Ours is what `fastbert pretrain` runs, `BatchStream` into `GraphedStep`, and making the batches is
inside its clock. transformers' model gets the same batches, padded, for nothing: autocast, loss,
clipping and torch's fused AdamW are those of a plain loop.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from fastbert.data import Corpus, prepare, train_tokenizer
from fastbert.testing.models import assert_packed
from fastbert.train.config import OptimizerConfig, ScheduleConfig
from fastbert.train.evaluation import evaluate
from fastbert.train.schedules import factor

from .ladder import machine
from .models.pretraining import LENGTH, padded, step_of, stream
from .models.twins import twins
from .shapes import SEED
from .texts import paragraphs, written

MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": LENGTH,
}
VOCABULARY = 16_384
TOKENS = 2048
BLOCK, EVALUATED_EVERY = 10, 50
"""Steps of the one before those of the other, and steps between evaluations."""
EQUAL_STEPS, EQUAL_TO = 50, 1e-3
HELD_OUT_BATCHES = 10
NAMES = ("transformers", "fastbert")


def corpora(texts: list[Path], folder: Path) -> tuple[Corpus, Corpus, object]:
    """The texts as token ids, to train and to evaluate on, by a tokenizer of their own."""
    files = written(paragraphs(texts), folder)
    tokenizer = train_tokenizer([files[0].read_text("utf-8")], vocab_size=VOCABULARY)
    train, heldout = (
        prepare([file], tokenizer, folder / file.stem, workers=1, progress=False) for file in files
    )
    return train, heldout, tokenizer


@dataclass(frozen=True)
class Training:
    """What is trained: peak rate, dropout, and the seed of both dropout streams."""

    lr: float = 5e-4
    dropout: float = 0.1
    seed: int = SEED


def steps_of(
    models: dict, num_steps: int, dtype: torch.dtype | None, training: Training
) -> dict[str, Callable]:
    """A step of each model, with the same optimizer and rates."""
    torch.manual_seed(training.seed)
    rate = factor(ScheduleConfig(warmup_steps=max(num_steps // 10, 1)), num_steps)
    steps = {}
    for name, model in models.items():
        settings = OptimizerConfig(lr=training.lr)
        step, optimizer = step_of(name, model, dtype, settings, training.seed)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

        def scheduled(batch, step=step, scheduler=scheduler):
            loss = step(batch)
            scheduler.step()
            return loss

        steps[name] = scheduled
    return steps


def models_for(tokenizer, dropout: float) -> dict[str, nn.Module]:
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    settings = {**MODEL, "vocab_size": len(tokenizer), **dict.fromkeys(names, dropout)}
    return twins("BertForMaskedLM", settings)


def equal_losses(train: Corpus, tokenizer, training: Training) -> dict:
    """Largest relative difference of the losses of the first steps, fp32, without dropout."""
    steps = steps_of(models_for(tokenizer, 0.0), EQUAL_STEPS, None, training)
    pairs = []
    for batch in islice(stream(train, tokenizer, TOKENS, EQUAL_STEPS), EQUAL_STEPS):
        with assert_packed():
            ours = steps["fastbert"](batch.inputs)
        pairs.append((steps["transformers"](padded(batch.inputs, tokenizer.pad_token_id)), ours))
    worst = max(abs(a - b) / a for a, b in pairs)
    assert worst <= EQUAL_TO, f"losses differ by {worst:.1e}, allowed {EQUAL_TO:.0e}: {pairs}"
    return {"steps": EQUAL_STEPS, "largest_relative_difference": worst, "last": pairs[-1]}


def heldout_losses(models: dict, heldout: Corpus, tokenizer) -> dict[str, float]:
    """The mean over the labels of the same held-out batches, each by its own library."""
    dtype = torch.bfloat16
    batches = list(islice(stream(heldout, tokenizer, TOKENS), HELD_OUT_BATCHES))
    theirs = models["transformers"].eval()
    total = 0.0
    for batch in batches:
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            loss = theirs(**padded(batch.inputs, tokenizer.pad_token_id)).loss
        total += loss.item() * batch.num_labels
    theirs.train()
    count = sum(batch.num_labels for batch in batches)
    return {
        "transformers": total / count,
        "fastbert": evaluate(models["fastbert"], batches, dtype).loss,
    }


def curves(train: Corpus, heldout: Corpus, tokenizer, num_steps: int, training: Training) -> dict:
    """Trains both in turn.

    Returns:
        Of each by name: seconds of `wall` and of `processor` time of each block, `train_loss` of
        each step, and `points`: step, wall seconds until then, held-out loss.
    """
    models = models_for(tokenizer, training.dropout)
    steps = steps_of(models, num_steps, torch.bfloat16, training)
    batches = stream(train, tokenizer, TOKENS, num_steps)
    result = {name: {"wall": [], "processor": [], "train_loss": [], "points": []} for name in NAMES}
    _note(result, 0, heldout_losses(models, heldout, tokenizer))
    for first in range(0, num_steps, BLOCK):
        count = min(BLOCK, num_steps - first)
        ours = result["fastbert"]
        with _clocked(ours), assert_packed():
            taken = []
            for batch in islice(batches, count):
                taken.append(batch.inputs)
                ours["train_loss"].append(steps["fastbert"](batch.inputs))
        ready = [padded(inputs, tokenizer.pad_token_id) for inputs in taken]
        theirs = result["transformers"]
        with _clocked(theirs):
            for batch in ready:
                theirs["train_loss"].append(steps["transformers"](batch))
        done = first + count
        if done % EVALUATED_EVERY == 0 or done == num_steps:
            _note(result, done, heldout_losses(models, heldout, tokenizer))
    return result


@contextmanager
def _clocked(result: dict) -> Iterator[None]:
    """Adds the block's seconds to a result."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    result["wall"].append(time.perf_counter() - wall)
    result["processor"].append(time.process_time() - processor)


def _note(result: dict, step: int, losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        seconds = sum(result[name]["wall"])
        result[name]["points"].append((step, seconds, loss))
    figures = ", ".join(
        f"{name} {loss:.3f} after {result[name]['points'][-1][1]:.0f} s"
        for name, loss in losses.items()
    )
    print(f"step {step}: held-out loss {figures}", flush=True)


def summary(result: dict) -> dict:
    """Ratio of the speeds, block by block, and the distance of the held-out losses."""
    ratios = {
        clock: [
            theirs / ours for theirs, ours in zip(*(result[n][clock] for n in NAMES), strict=True)
        ]
        for clock in ("wall", "processor")
    }
    last = {name: result[name]["points"][-1] for name in NAMES}
    return {
        "times_transformers": {k: statistics.median(v) for k, v in ratios.items()},
        "slowest_and_fastest_block": {k: (min(v), max(v)) for k, v in ratios.items()},
        "seconds": {name: point[1] for name, point in last.items()},
        "heldout_loss": {name: point[2] for name, point in last.items()},
        "largest_distance_of_heldout_losses": max(
            abs(a[2] - b[2]) for a, b in zip(*(result[n]["points"] for n in NAMES), strict=True)
        ),
    }


def plot(result: dict, path: Path) -> None:
    """Held-out loss over steps and over minutes, both models in both."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    for axes, place, label in zip(
        figure.subplots(1, 2, sharey=True), (0, 1), ("step", "minutes of training"), strict=True
    ):
        for name, line in zip(NAMES, ("o-", "x--"), strict=True):
            points = result[name]["points"]
            over = [point[place] / (60 if place else 1) for point in points]
            axes.plot(over, [point[2] for point in points], line, markersize=4, label=name)
        axes.set(xlabel=label, ylabel="held-out loss of masked tokens")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lr", type=float, default=Training.lr, help="peak rate")
    parser.add_argument("--dropout", type=float, default=Training.dropout, help="in bf16")
    parser.add_argument("--seed", type=int, default=Training.seed, help="of both dropout streams")
    parser.add_argument("--skip-fp32", action="store_true", help="no comparison in fp32")
    arguments = parser.parse_args()
    training = Training(arguments.lr, arguments.dropout, arguments.seed)
    results = {"machine": machine(), "model": MODEL, "tokens_a_step": TOKENS, **asdict(training)}
    with tempfile.TemporaryDirectory() as folder:
        train, heldout, tokenizer = corpora(arguments.texts, Path(folder))
        if not arguments.skip_fp32:
            results["fp32"] = equal_losses(train, tokenizer, training)
            print(results["fp32"], flush=True)
        result = curves(train, heldout, tokenizer, arguments.steps, training)
    results["bf16"] = summary(result)
    print(json.dumps(results, indent=1))
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps({**results, "curves": result}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
