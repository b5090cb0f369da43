"""Fine-tuning on real data with transformers and with fastbert: the same seeds, recipe and metric.

    python -m benchmarks.finetuning --data PATH --model CHECKPOINT [--seeds 3] [--rows 2000]
        [--tasks sentiment,ner,qa,retrieval] [--sts FILE] [--epochs 2] [--json PATH]

PATH holds folders as they are published: `glue-like/sentiment_mr` (movie reviews, Pang and Lee
2005: train.tsv, test.tsv), `ner/wikigold` (Balasuriya et al. 2009: train.conll, test.conll),
`qa/xquad_en` (XQuAD, Artetxe et al. 2020: train.json, dev.json), `retrieval/xquad_en` (its
questions and paragraphs: queries.jsonl, corpus.jsonl, qrels.tsv). FILE, with which there is the
task sts, holds pairs of sentences and their similarity, as STS-B (Cer et al. 2017): the columns
sentence1, sentence2 and score, which is divided by the highest where that is above 1; every other
row is trained on. Both are trained by Trainer with dynamic padding, batch 32, in bf16 autocast, one
after the other for every seed. A metric holds if the means differ by at most one standard error of
their difference. Speeds: of training as Trainer counts them, evaluations and saving included; of
prediction from rows to answers, both in turn, by Trainer in the order of the rows. In retrieval and
sts batches go to sentence-transformers' encode in that order, too; what it is handed over at once
it sorts by length, which takes padding from both. Ratios are medians over the seeds.
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

import fastbert
from fastbert.tasks import (
    BiEncoderSettings,
    Predictor,
    TrainingSettings,
    finetune,
    finetune_bi_encoder,
    read_rows,
)
from fastbert.tasks.classification import ClassificationSettings
from fastbert.tasks.question_answering import QuestionAnsweringSettings
from fastbert.tasks.task import TaskSettings
from fastbert.tasks.token_classification import TokenClassificationSettings

ROUNDS = 3
BATCH = 32
RETRIEVAL, STS = "retrieval", "sts"
ENCODER_METRICS = {RETRIEVAL: "mrr@10", STS: "spearman"}
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
    results, predictors = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, accelerated in IMPLEMENTATIONS.items():
            output = Path(folder) / name
            trained = finetune(
                proof.task,
                model,
                rows,
                test[:32],
                output=output,
                settings=proof.settings,
                training=_recipe(seed, accelerated, options),
            )
            results[name] = {"training": trained.samples_per_second}
            predictors[name] = Predictor(output, accelerated=accelerated)
        answers, speeds = _timed({n: _predicting(p, test) for n, p in predictors.items()})
    for name, predictor in predictors.items():
        results[name]["metric"] = predictor.task.metrics(test, answers[name])[proof.metric]
        results[name]["prediction"] = len(test) / speeds[name]
    return results


def measure_encoder(name: str, model: str, seed: int, options) -> dict[str, dict]:
    """The same of a bi-encoder: questions of XQuAD search its paragraphs, or cosines are fitted to
    similarities."""
    from sentence_transformers import SentenceTransformer

    if name == RETRIEVAL:
        train, test = _queries(options.data / "retrieval" / "xquad_en", options.rows)
        settings = BiEncoderSettings(max_length=256)
    else:
        train, test = _similarities(options.sts, options.rows)
        settings = BiEncoderSettings(
            first="sentence1", second="sentence2", score="score", max_length=128
        )
    results, encoders = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for implementation, accelerated in IMPLEMENTATIONS.items():
            output = Path(folder) / implementation
            trained = finetune_bi_encoder(
                model,
                train,
                test,
                output=output,
                settings=settings,
                training=_recipe(seed, accelerated, options),
            )
            results[implementation] = {
                "training": trained.samples_per_second,
                "metric": trained.metrics[ENCODER_METRICS[name]],
            }
            encoder = SentenceTransformer(str(output), device="cpu")
            encoders[implementation] = fastbert.accelerate(encoder) if accelerated else encoder
        texts = [row[settings.second] for row in test]
        _, speeds = _timed({n: _encoding(e, texts) for n, e in encoders.items()})
    for implementation, seconds in speeds.items():
        results[implementation]["prediction"] = len(test) / seconds
    return results


def _recipe(seed: int, accelerated: bool, options) -> TrainingSettings:
    return TrainingSettings(
        epochs=options.epochs,
        batch_size=BATCH,
        learning_rate=options.lr,
        seed=seed,
        bf16=True,
        patience=None,
        accelerated=accelerated,
    )


def _predicting(predictor: Predictor, rows: list[dict]):
    return lambda: predictor.predict(rows, bf16=True, by_length=False)


def _encoding(encoder, texts: list[str]):
    def encode():
        with torch.autocast("cpu", torch.bfloat16):
            return [encoder.encode(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]

    return encode


def _timed(functions: dict) -> tuple[dict, dict[str, float]]:
    """Results and median seconds, taken in turn; the first call packs weights and is left out."""
    results = {name: function() for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return results, {name: statistics.median(values) for name, values in seconds.items()}


def _queries(folder: Path, count: int) -> tuple[list[dict], list[dict]]:
    """Every other question for training, the rest for judging, with their paragraphs."""
    corpus = {row["_id"]: row["text"] for row in read_rows(folder / "corpus.jsonl")}
    questions = {row["_id"]: row["text"] for row in read_rows(folder / "queries.jsonl")}
    rows = [
        {"query": questions[row["query-id"]], "positive": corpus[row["corpus-id"]]}
        for row in read_rows(folder / "qrels.tsv")
    ]
    rows = _drawn(rows, 2 * count)
    return rows[::2], rows[1::2]


def _similarities(file: Path, count: int) -> tuple[list[dict], list[dict]]:
    """Every other pair for training, the rest for judging, with scores of at most 1."""
    rows = read_rows(file)
    highest = max(1.0, *(float(row["score"]) for row in rows))
    rows = _drawn([{**row, "score": float(row["score"]) / highest} for row in rows], 2 * count)
    return rows[::2], rows[1::2]


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


def _metric(name: str) -> str:
    return ENCODER_METRICS.get(name) or PROOFS[name].metric


def table(rows: dict[str, dict]) -> str:
    """The rows in Markdown."""
    lines = [
        "| | metric | transformers | fastbert | ± | training | prediction |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        error = f"{row['standard_error']:.3f}" if "standard_error" in row else "–"
        lines.append(
            f"| {name} | {_metric(name)} | {row['transformers']:.3f} | "
            f"{row['fastbert']:.3f} | {error} | {row['training']:.2f}× | "
            f"{row['prediction']:.2f}× |"
        )
    return "\n".join(lines)


def _run(name: str, seed: int, options) -> dict[str, dict]:
    if name in ENCODER_METRICS:
        return measure_encoder(name, options.model, seed, options)
    return measure(PROOFS[name], options.data, options.model, seed, options)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", help="separated by commas; all, where none are named")
    parser.add_argument("--sts", type=Path, help="pairs of sentences with their similarity")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2000, help="of each file at most")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    known = [*PROOFS, RETRIEVAL, *([STS] if options.sts else [])]
    tasks = options.tasks.split(",") if options.tasks else known
    unknown = set(tasks) - set(known)
    if unknown:
        parser.error(
            f"--tasks: {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            + ("" if options.sts else f", and {STS} with --sts")
        )
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("fastbert").setLevel(logging.ERROR)
    rows, all_runs = {}, {}
    for name in tasks:
        runs = [_run(name, seed, options) for seed in range(options.seeds)]
        rows[name], all_runs[name] = summary(runs), runs
        print(json.dumps({name: rows[name]}), flush=True)
    print(table(rows))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "runs": all_runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
