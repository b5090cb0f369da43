"""Encoders for search and similarity: sentence-transformers' trainers with fastbert inside.

A bi-encoder gives every text a vector; in training the other rows of a batch are the negatives
(Henderson et al. 2017, section 4), or the cosine of two texts is fitted to a number. A
cross-encoder reads both texts at once and gives a number.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from fastbert.models.accelerate import accelerate
from fastbert.tasks.recipe import TrainingSettings, callbacks_of, optimizer_of, trainer_arguments
from fastbert.tasks.runs import (
    CHECKPOINTS,
    Finetuned,
    epochs_of,
    output_folder,
    rows_and_held_out,
    write_metrics,
)
from fastbert.tasks.tables import TaskError, check_columns, check_texts


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """
    Attributes:
        first: column of the query or the first text.
        second: column of the passage or the second text.
        score: column of a number: of a bi-encoder the cosine wanted, in [-1, 1]; of a cross-encoder
            the relevance, in [0, 1]. None: every row is a pair that belongs together, for a
            bi-encoder only.
        max_length: tokens of a text, or of a pair; what is longer is cut by sentence-transformers.
        chunk: of a bi-encoder without scores, rows computed at once: gradients are those of the
            whole batch, memory that of a chunk (GradCache, Gao et al. 2021). None: the batch.
    """

    first: str = "query"
    second: str = "positive"
    score: str | None = None
    max_length: int = 128
    chunk: int | None = None


def finetune_bi_encoder(
    model: str,
    train: str | Path | Sequence[dict],
    evaluation: str | Path | Sequence[dict] | None = None,
    *,
    output: str | Path,
    settings: PairSettings | None = None,
    training: TrainingSettings | None = None,
) -> Finetuned:
    """Trains a sentence-transformers model and keeps the best epoch's.

    Without scores it is judged by search: every query of the evaluation rows among all their
    passages (`accuracy@1`, `mrr@10`, `ndcg@10`, which chooses the epoch, `recall@10`); with scores
    by Spearman's correlation with the cosines (`spearman`).

    Args:
        model: a sentence-transformers model or a bare encoder, whose tokens are then averaged.
        train, evaluation, output, training: as `fastbert.tasks.finetune`.
        settings: columns and loss.

    Returns:
        What `finetune` returns; `SentenceTransformer(output)` loads the folder.

    Raises:
        TaskError: rows, columns or settings that do not fit, before anything is trained.
    """
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    settings = PairSettings() if settings is None else settings
    training = TrainingSettings() if training is None else training
    folder, rows, held_out = _checked(train, evaluation, output, settings, training, low=-1)
    transformers.set_seed(training.seed)
    network = SentenceTransformer(model, device=_device())
    network.max_seq_length = settings.max_length
    if settings.score is not None:
        loss, best = losses.CosineSimilarityLoss(network), "eval_spearman_cosine"
    elif settings.chunk is not None:
        loss = losses.CachedMultipleNegativesRankingLoss(network, mini_batch_size=settings.chunk)
        best = "eval_cosine_ndcg@10"
    else:
        loss, best = losses.MultipleNegativesRankingLoss(network), "eval_cosine_ndcg@10"
    trainer = SentenceTransformerTrainer(
        model=_accelerated(network, training),
        args=trainer_arguments(
            SentenceTransformerTrainingArguments,
            folder / CHECKPOINTS,
            training,
            num_features=len(rows),
            best=best,
        ),
        train_dataset=_pairs(rows, settings),
        loss=loss,
        evaluator=_bi_evaluator(held_out, settings, training),
        optimizers=(optimizer_of(network, training), None),
        callbacks=callbacks_of(training),
    )
    return _trained(trainer, network, folder, settings, training)


def finetune_cross_encoder(
    model: str,
    train: str | Path | Sequence[dict],
    evaluation: str | Path | Sequence[dict] | None = None,
    *,
    output: str | Path,
    settings: PairSettings,
    training: TrainingSettings | None = None,
) -> Finetuned:
    """Trains a sentence-transformers cross-encoder on scores by binary cross-entropy.

    Judged by the correlations of its scores with the column's (`spearman`, which chooses the epoch,
    and `pearson`).

    Args, Returns, Raises: as `finetune_bi_encoder`; `CrossEncoder(output)` loads the folder, and a
    score is required.
    """
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    training = TrainingSettings() if training is None else training
    if settings.score is None or settings.chunk is not None:
        raise TaskError("a cross-encoder is trained on scores: name their column, and no chunk")
    folder, rows, held_out = _checked(train, evaluation, output, settings, training, low=0)
    transformers.set_seed(training.seed)
    network = CrossEncoder(model, num_labels=1, max_length=settings.max_length, device=_device())
    judge = CrossEncoderCorrelationEvaluator(
        [(row[settings.first], row[settings.second]) for row in held_out],
        [float(row[settings.score]) for row in held_out],
        write_csv=False,
    )
    trainer = CrossEncoderTrainer(
        model=_accelerated(network, training),
        args=trainer_arguments(
            CrossEncoderTrainingArguments,
            folder / CHECKPOINTS,
            training,
            num_features=len(rows),
            best="eval_spearman",
        ),
        train_dataset=_pairs(rows, settings),
        loss=BinaryCrossEntropyLoss(network),
        evaluator=judge,
        optimizers=(optimizer_of(network, training), None),
        callbacks=callbacks_of(training),
    )
    return _trained(trainer, network, folder, settings, training)


def _checked(train, evaluation, output, settings: PairSettings, training, *, low: float):
    folder = output_folder(output)
    rows, held_out = rows_and_held_out(train, evaluation, None, None, training.seed)
    columns = {"first": settings.first, "second": settings.second, "score": settings.score}
    for name, some in (("train", rows), ("evaluation", held_out)):
        check_columns(some, columns, name)
        check_texts(some, [settings.first, settings.second], name)
        for number, row in enumerate(some, 1):
            if settings.score is not None and not _within(row[settings.score], low):
                raise TaskError(
                    f"{name}, row {number}: {settings.score!r} must lie in [{low:g}, 1], got "
                    f"{row[settings.score]!r}"
                )
    return folder, rows, held_out


def _within(value, low: float) -> bool:
    try:
        return low <= float(value) <= 1
    except (TypeError, ValueError):
        return False


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _accelerated(network, training: TrainingSettings):
    return accelerate(network) if training.accelerated else network


def _pairs(rows: list[dict], settings: PairSettings):
    import datasets

    columns = {
        "first": [row[settings.first] for row in rows],
        "second": [row[settings.second] for row in rows],
    }
    if settings.score is not None:
        columns["label"] = [float(row[settings.score]) for row in rows]
    return datasets.Dataset.from_dict(columns)


def _bi_evaluator(rows: list[dict], settings: PairSettings, training: TrainingSettings):
    from sentence_transformers.sentence_transformer import evaluation

    options = {"write_csv": False, "batch_size": training.batch_size}
    firsts, seconds = ([row[c] for row in rows] for c in (settings.first, settings.second))
    if settings.score is not None:
        scores = [float(row[settings.score]) for row in rows]
        return evaluation.EmbeddingSimilarityEvaluator(
            firsts, seconds, scores, main_similarity="cosine", **options
        )
    # A passage that answers several queries stands in the corpus once, and so does a query.
    passages = {text: f"p{index}" for index, text in enumerate(dict.fromkeys(seconds))}
    queries = {text: f"q{index}" for index, text in enumerate(dict.fromkeys(firsts))}
    relevant: dict[str, set[str]] = {}
    for first, second in zip(firsts, seconds, strict=True):
        relevant.setdefault(queries[first], set()).add(passages[second])
    return evaluation.InformationRetrievalEvaluator(
        {index: text for text, index in queries.items()},
        {index: text for text, index in passages.items()},
        relevant,
        **options,
    )


def _trained(trainer, network, folder: Path, settings, training) -> Finetuned:
    trained = trainer.train().metrics
    result = Finetuned(
        folder,
        {_short(name): float(value) for name, value in trainer.evaluator(network).items()},
        [{_short(n): v for n, v in e.items()} for e in epochs_of(trainer.state.log_history)],
        trained["train_runtime"],
        trained["train_samples_per_second"],
    )
    network.save_pretrained(str(folder))
    write_metrics(result, settings=asdict(settings), training=asdict(training))
    shutil.rmtree(trainer.args.output_dir)
    return result


def _short(name: str) -> str:
    """Evaluators' names without what is the same in all: `cosine_mrr@10`, `spearman_cosine`."""
    return name.removeprefix("cosine_").removesuffix("_cosine")
