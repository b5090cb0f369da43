"""Cross-encoders: sentence-transformers' trainer with fastbert inside.

A cross-encoder reads a query and a passage at once and gives a number.

Losses: binary cross-entropy and squared error of single pairs (Nogueira and Cho 2019, section 3),
and LambdaLoss over the passages of a query (Wang et al. 2018, NDCG-Loss2++).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastbert.folders import check_checkpoint
from fastbert.tasks import pairs
from fastbert.tasks.correlations import UNBOUNDED
from fastbert.tasks.pairs import PairSettings
from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.runs import Finetuned
from fastbert.tasks.tables import TaskError

# What the scores of each loss lie in.
BOUNDS = {
    "binary": (0.0, 1.0),
    "regression": UNBOUNDED,
    "listwise": (0.0, math.inf),
}


@dataclass(frozen=True, kw_only=True)
class CrossEncoderSettings(PairSettings):
    """
    Attributes:
        score: column of the relevance: in [0, 1] for `binary`, any number for `regression`, 0 or
            more for `listwise`.
        loss: `binary` and `regression` fit the score of each row; `listwise` the order of the rows
            with one query, and a batch counts queries.
        relevant: score from which a passage counts as a hit in `mrr@10` and `ndcg@10`.
    """

    second: str = "passage"
    score: str = "score"
    loss: str = "binary"
    relevant: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.loss not in BOUNDS:
            raise TaskError(f"loss must be one of {tuple(BOUNDS)}, got {self.loss!r}")


def finetune_cross_encoder(
    model: str,
    train: str | Path | Sequence[dict],
    evaluation: str | Path | Sequence[dict] | None = None,
    *,
    output: str | Path,
    settings: CrossEncoderSettings | None = None,
    training: TrainingSettings | None = None,
    split: str | None = None,
    evaluation_split: str | None = None,
    overwrite: bool = False,
) -> Finetuned:
    """Trains a sentence-transformers cross-encoder on scores and keeps the best epoch's.

    Judged by the correlations of its scores with the column's (`spearman`, which chooses the epoch,
    and `pearson`), and, where queries have both hits and other passages, by their order (`map`,
    `mrr@10`, `ndcg@10`, which chooses the epoch under `listwise`).

    Args, Returns, Raises: as `finetune_bi_encoder`; `CrossEncoder(output)` loads the folder. Its
    scores are probabilities after `binary`, and numbers without bounds after the others.
    """
    check_checkpoint("model", model)
    import transformers
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from torch import nn

    settings = CrossEncoderSettings() if settings is None else settings
    training = TrainingSettings() if training is None else training
    checkpoints, found = pairs.checked_run(
        "cross-encoder",
        model,
        (train, evaluation),
        (split, evaluation_split),
        output,
        settings,
        training,
        overwrite=overwrite,
        bounds=BOUNDS[settings.loss],
    )
    rows, held_out = found.train, found.held_out
    listwise = settings.loss == "listwise"
    judged = _judged_lists(held_out, settings)
    if listwise and not judged:
        raise TaskError(
            f"{found.sources[-1][0]}: no query has both a hit and another passage, so there is no "
            f"order to judge; a hit has a score of {settings.relevant:g} or more (relevant)"
        )
    done = checkpoints.done_before()
    if done is not None:
        return done
    transformers.set_seed(training.seed)
    network = CrossEncoder(
        model,
        num_labels=1,
        max_length=settings.max_length,
        device=pairs.device(),
        activation_fn=nn.Sigmoid() if settings.loss == "binary" else nn.Identity(),
    )
    for name, some in found.sources:
        texts = [(row[settings.first], row[settings.second]) for row in some]
        pairs.check_lengths(network.tokenizer, texts, settings, name)
    return pairs.run(
        "cross-encoder",
        (CrossEncoderTrainer, CrossEncoderTrainingArguments),
        network,
        checkpoints,
        settings,
        training,
        best="ndcg@10" if listwise else "spearman",
        dataset=_dataset(rows, settings),
        loss=_loss(network, settings, training),
        evaluator=_evaluator(held_out, judged, settings, training.batch_size),
    )


def evaluate_cross_encoder(
    folder: str | Path,
    rows: Sequence[dict],
    settings: CrossEncoderSettings,
    *,
    batch_size: int = 32,
    name: str = "rows",
    **options,
) -> dict[str, float]:
    """The metrics `finetune_cross_encoder` judges by; arguments as of `evaluate_bi_encoder`."""
    from sentence_transformers import CrossEncoder

    rows = list(rows)
    pairs.check(rows, settings, name, bounds=BOUNDS[settings.loss])
    network = CrossEncoder(str(folder), max_length=settings.max_length, device=pairs.device())
    texts = [(row[settings.first], row[settings.second]) for row in rows]
    pairs.check_lengths(network.tokenizer, texts, settings, name)
    lists = _judged_lists(rows, settings)
    return pairs.judged(network, _evaluator(rows, lists, settings, batch_size), **options)


def _lists(rows: list[dict], settings: CrossEncoderSettings) -> list[dict]:
    """One row a query: its passages and their scores, in the order of the rows."""
    found: dict[str, dict] = {}
    for row in rows:
        query = row[settings.first]
        one = found.setdefault(query, {settings.first: query, "passages": [], "scores": []})
        one["passages"].append(row[settings.second])
        one["scores"].append(float(row[settings.score]))
    return list(found.values())


def _judged_lists(rows: list[dict], settings: CrossEncoderSettings) -> list[dict]:
    """Those with both hits and other passages, whose order tells something."""
    return [
        one
        for one in _lists(rows, settings)
        if len({score >= settings.relevant for score in one["scores"]}) == 2
    ]


def _dataset(rows: list[dict], settings: CrossEncoderSettings):
    import datasets

    listwise = settings.loss == "listwise"
    second, score = ("passages", "scores") if listwise else (settings.second, settings.score)
    rows = _lists(rows, settings) if listwise else rows
    labels = [row[score] if listwise else float(row[score]) for row in rows]
    return datasets.Dataset.from_dict(
        {
            "first": [row[settings.first] for row in rows],
            "second": [row[second] for row in rows],
            "label": labels,
        }
    )


def _loss(network, settings: CrossEncoderSettings, training: TrainingSettings):
    from sentence_transformers.cross_encoder import losses

    if settings.loss == "binary":
        return losses.BinaryCrossEntropyLoss(network)
    if settings.loss == "regression":
        return losses.MSELoss(network)
    return losses.LambdaLoss(network, mini_batch_size=training.batch_size)


def _evaluator(
    rows: list[dict], lists: list[dict], settings: CrossEncoderSettings, batch_size: int
):
    from sentence_transformers.cross_encoder import evaluation
    from sentence_transformers.sentence_transformer.evaluation import SequentialEvaluator

    options = {"write_csv": False, "batch_size": batch_size}
    judges = [
        evaluation.CrossEncoderCorrelationEvaluator(
            [(row[settings.first], row[settings.second]) for row in rows],
            [float(row[settings.score]) for row in rows],
            **options,
        )
    ]
    if lists:
        samples = [_sample(one, settings) for one in lists]
        judges.append(evaluation.CrossEncoderRerankingEvaluator(samples, at_k=10, **options))
    return SequentialEvaluator(judges)


def _sample(one: dict, settings: CrossEncoderSettings) -> dict:
    scored = list(zip(one["passages"], one["scores"], strict=True))
    return {
        "query": one[settings.first],
        "positive": [text for text, score in scored if score >= settings.relevant],
        "negative": [text for text, score in scored if score < settings.relevant],
    }
