"""Fine-tuning on real data with transformers and with fastbert: the same seeds, recipe and metric.

    python -m benchmarks.finetuning --data PATH --model CHECKPOINT [--seeds 3] [--rows 2000]
        [--tasks sentiment,ner,qa] [--epochs 2] [--json PATH]

PATH holds folders as they are published: `glue-like/sentiment_mr` (movie reviews, Pang and Lee
2005: train.tsv, test.tsv), `ner/wikigold` (Balasuriya et al. 2009: train.conll, test.conll),
`qa/xquad_en` (XQuAD, Artetxe et al. 2020: train.json, dev.json). Both are trained by Trainer with
dynamic padding, batch 32, in bf16 autocast, one after the other for every seed. A metric holds if
the means differ by at most one standard error of their difference; speeds are features a second,
the ratio is the median over the seeds.
"""

import argparse
import json
import logging
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from fastbert.tasks import Predictor, TrainingSettings, finetune, read_rows
from fastbert.tasks.classification import ClassificationSettings
from fastbert.tasks.question_answering import QuestionAnsweringSettings
from fastbert.tasks.task import TaskSettings
from fastbert.tasks.token_classification import TokenClassificationSettings

IMPLEMENTATIONS = {"transformers": False, "fastbert": True}


@dataclass(frozen=True)
class Proof:
    """One data set: its task, files below the folder of the data, and metric."""

    task: str
    train: str
    test: str
    settings: TaskSettings
    metric: str


PROOFS = {
    "sentiment": Proof(
        "classification",
        "glue-like/sentiment_mr/train.tsv",
        "glue-like/sentiment_mr/test.tsv",
        ClassificationSettings(text="sentence", max_length=128),
        "accuracy",
    ),
    "ner": Proof(
        "token-classification",
        "ner/wikigold/train.conll",
        "ner/wikigold/test.conll",
        TokenClassificationSettings(max_length=128, overlong="stride", stride=32),
        "f1",
    ),
    "qa": Proof(
        "question-answering",
        "qa/xquad_en/train.json",
        "qa/xquad_en/dev.json",
        QuestionAnsweringSettings(max_length=384, stride=128),
        "f1",
    ),
}


def measure(proof: Proof, data: Path, model: str, seed: int, options) -> dict[str, dict]:
    """Metric and speeds of both, trained with one seed on the same rows."""
    rows, test = (_drawn(read_rows(data / f), options.rows) for f in (proof.train, proof.test))
    results = {}
    for name, accelerated in IMPLEMENTATIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            trained = finetune(
                proof.task,
                model,
                rows,
                test[:32],
                output=Path(folder) / "model",
                settings=proof.settings,
                training=TrainingSettings(
                    epochs=options.epochs,
                    batch_size=32,
                    learning_rate=options.lr,
                    seed=seed,
                    bf16=True,
                    patience=None,
                    accelerated=accelerated,
                ),
            )
            predictor = Predictor(Path(folder) / "model", accelerated=accelerated)
            # The first call packs weights and opens libraries.
            predictor.predict(test[:32], bf16=True)
            start = time.perf_counter()
            answers = predictor.predict(test, bf16=True)
            seconds = time.perf_counter() - start
        results[name] = {
            "metric": predictor.task.metrics(test, answers)[proof.metric],
            "training": trained.samples_per_second,
            "prediction": len(test) / seconds,
        }
    return results


def _drawn(rows: list[dict], count: int) -> list[dict]:
    """The same `count` rows in every run."""
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[i] for i in sorted(order[:count])]


def summary(runs: list[dict[str, dict]]) -> dict:
    """Means, the difference of the metrics in standard errors, ratios of speed."""
    metrics = {n: [run[n]["metric"] for run in runs] for n in IMPLEMENTATIONS}
    row = {name: statistics.mean(values) for name, values in metrics.items()}
    row["difference"] = row["fastbert"] - row["transformers"]
    if len(runs) > 1:
        errors = [statistics.stdev(v) / math.sqrt(len(v)) for v in metrics.values()]
        row["standard_error"] = math.hypot(*errors)
        row["holds"] = abs(row["difference"]) <= row["standard_error"]
    for kind in ("training", "prediction"):
        ratios = [run["fastbert"][kind] / run["transformers"][kind] for run in runs]
        row[kind] = statistics.median(ratios)
    return row


def table(rows: dict[str, dict]) -> str:
    """The rows in Markdown."""
    lines = [
        "| | metric | transformers | fastbert | ± | training | prediction |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        error = f"{row['standard_error']:.3f}" if "standard_error" in row else "–"
        lines.append(
            f"| {name} | {PROOFS[name].metric} | {row['transformers']:.3f} | "
            f"{row['fastbert']:.3f} | {error} | {row['training']:.2f}× | "
            f"{row['prediction']:.2f}× |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", default=",".join(PROOFS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2000, help="of each file at most")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unknown = set(options.tasks.split(",")) - PROOFS.keys()
    if unknown:
        parser.error(f"--tasks: {', '.join(unknown)}; there are {', '.join(PROOFS)}")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("fastbert").setLevel(logging.ERROR)
    rows, all_runs = {}, {}
    for name in options.tasks.split(","):
        runs = [
            measure(PROOFS[name], options.data, options.model, seed, options)
            for seed in range(options.seeds)
        ]
        rows[name], all_runs[name] = summary(runs), runs
        print(json.dumps({name: rows[name]}), flush=True)
    print(table(rows))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "runs": all_runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
