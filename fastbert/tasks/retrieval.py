"""Bi-encoders for search and similarity: sentence-transformers' trainer with fastbert inside.

A bi-encoder gives every text a vector; in training the other rows of a batch are the negatives
(Henderson et al. 2017, section 4), or the cosine of two texts is fitted to a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastbert.folders import check_checkpoint
from fastbert.tasks import pairs
from fastbert.tasks.pairs import PairSettings
from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.runs import Finetuned
from fastbert.tasks.tables import TaskError


@dataclass(frozen=True, kw_only=True)
class BiEncoderSettings(PairSettings):
    """
    Attributes:
        score: column of the cosine wanted, in [-1, 1]. None: every row is a pair that belongs
            together.
        negative: column of a text that does not belong to the first, where there is one; without
            scores only.
        chunk: without scores, rows computed at once: gradients are those of the whole batch, memory
            that of a chunk (GradCache, Gao et al. 2021). None: the batch.
    """

    negative: str | None = None
    chunk: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.chunk is not None and self.chunk < 1:
            raise TaskError(f"chunk must be at least 1, got {self.chunk}")
        for name in ("negative", "chunk"):
            if self.score is not None and getattr(self, name) is not None:
                raise TaskError(f"{name} has no meaning beside a score; leave one of them out")


def finetune_bi_encoder(
    model: str,
    train: str | Path | Sequence[dict],
    evaluation: str | Path | Sequence[dict] | None = None,
    *,
    output: str | Path,
    settings: BiEncoderSettings | None = None,
    training: TrainingSettings | None = None,
    split: str | None = None,
    evaluation_split: str | None = None,
    overwrite: bool = False,
) -> Finetuned:
    """Trains a sentence-transformers model and keeps the best epoch's.

    Without scores it is judged by search: every query of the evaluation rows among all their
    passages (`accuracy@1`, `mrr@10`, `ndcg@10`, which chooses the epoch, `recall@10`); with scores
    by Spearman's correlation with the cosines (`spearman`).

    Args:
        model: a sentence-transformers model or a bare encoder, whose tokens are then averaged.
        train, evaluation, output, training, split, evaluation_split, overwrite: as
            `fastbert.tasks.finetune`.
        settings: columns and loss.

    Returns:
        What `finetune` returns; `SentenceTransformer(output)` loads the folder.

    Raises:
        TaskError: rows, columns or settings that do not fit, or output holds another run; before
            anything is trained.
    """
    check_checkpoint("model", model, owner="sentence-transformers")
    import transformers
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    settings = BiEncoderSettings() if settings is None else settings
    training = TrainingSettings() if training is None else training
    checkpoints, found = pairs.checked_run(
        "bi-encoder",
        model,
        (train, evaluation),
        (split, evaluation_split),
        output,
        settings,
        training,
        overwrite=overwrite,
        bounds=(-1, 1),
        negative=settings.negative,
    )
    done = checkpoints.done_before()
    if done is not None:
        return done
    rows, held_out = found.train, found.held_out
    transformers.set_seed(training.seed)
    network = SentenceTransformer(model, device=pairs.device())
    network.max_seq_length = settings.max_length
    for name, some in found.sources:
        for column in _columns(settings).values():
            pairs.check_lengths(network.tokenizer, [r[column] for r in some], settings, name)
    return pairs.run(
        "bi-encoder",
        (SentenceTransformerTrainer, SentenceTransformerTrainingArguments),
        network,
        checkpoints,
        settings,
        training,
        best="cosine_ndcg@10" if settings.score is None else "spearman_cosine",
        dataset=_dataset(rows, settings),
        loss=_loss(network, settings),
        evaluator=_evaluator(held_out, settings, training.batch_size),
    )


def evaluate_bi_encoder(
    folder: str | Path,
    rows: Sequence[dict],
    settings: BiEncoderSettings,
    *,
    batch_size: int = 32,
    name: str = "rows",
    **options,
) -> dict[str, float]:
    """The metrics `finetune_bi_encoder` judges by.

    Args:
        folder: a sentence-transformers model. rows, settings: with their columns.
        batch_size: texts computed at once. name: of the rows, for messages.
        options: accelerated and bf16, as of `Predictor`.

    Raises:
        TaskError: rows that do not fit, a text that is refused.
    """
    from sentence_transformers import SentenceTransformer

    rows = list(rows)
    pairs.check(rows, settings, name, bounds=(-1, 1), negative=settings.negative)
    network = SentenceTransformer(str(folder), device=pairs.device())
    network.max_seq_length = settings.max_length
    for column in _columns(settings).values():
        pairs.check_lengths(network.tokenizer, [row[column] for row in rows], settings, name)
    return pairs.judged(network, _evaluator(rows, settings, batch_size), **options)


def _columns(settings: BiEncoderSettings) -> dict[str, str]:
    columns = {"first": settings.first, "second": settings.second}
    return columns if settings.negative is None else {**columns, "negative": settings.negative}


def _dataset(rows: list[dict], settings: BiEncoderSettings):
    import datasets

    columns = {name: [row[c] for row in rows] for name, c in _columns(settings).items()}
    if settings.score is not None:
        columns["label"] = [float(row[settings.score]) for row in rows]
    return datasets.Dataset.from_dict(columns)


def _loss(network, settings: BiEncoderSettings):
    from sentence_transformers.sentence_transformer import losses

    if settings.score is not None:
        return losses.CosineSimilarityLoss(network)
    if settings.chunk is not None:
        return losses.CachedMultipleNegativesRankingLoss(network, mini_batch_size=settings.chunk)
    return losses.MultipleNegativesRankingLoss(network)


def _evaluator(rows: list[dict], settings: BiEncoderSettings, batch_size: int):
    from sentence_transformers.sentence_transformer import evaluation

    options = {"write_csv": False, "batch_size": batch_size}
    texts = {name: [row[c] for row in rows] for name, c in _columns(settings).items()}
    firsts, seconds = texts["first"], texts["second"]
    if settings.score is not None:
        scores = [float(row[settings.score]) for row in rows]
        return evaluation.EmbeddingSimilarityEvaluator(
            firsts, seconds, scores, main_similarity="cosine", **options
        )
    # A passage that answers several queries stands in the corpus once, and so does a query.
    corpus = dict.fromkeys([*seconds, *texts.get("negative", [])])
    passages = {text: f"p{index}" for index, text in enumerate(corpus)}
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
