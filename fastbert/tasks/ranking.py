"""Passages in the order a cross-encoder gives them for a query."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

from fastbert.folders import check_checkpoint
from fastbert.tasks.forwards import forwards
from fastbert.tasks.models import fast_tokenizer, load_network
from fastbert.tasks.tables import TaskError, check_columns, check_texts
from fastbert.tasks.task import TaskSettings, features_of, fitted, padding_collator, tokenize

ACTIVATIONS = {"Sigmoid": expit, "Identity": lambda scores: scores}


@dataclass(frozen=True, kw_only=True)
class RerankSettings(TaskSettings):
    """
    Attributes:
        query: column of the query.
        passages: column of its passages, a list; or of one, and rows with equal queries belong
            together.
        top: passages given of each query; None: all.
    """

    query: str = "query"
    passages: str = "passages"
    top: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.top is not None and self.top < 1:
            raise TaskError(f"top must be at least 1, got {self.top}")


class Reranker:
    """Orders passages by a cross-encoder's scores, which are those of sentence-transformers'
    CrossEncoder for the same folder.

    Under `stride` only the passage is cut, and its best window counts (MaxP: Dai and Callan 2019,
    section 3).

    Args:
        folder: a cross-encoder with one score.
        settings: columns and lengths.
        accelerated: False leaves transformers' forward.

    Raises:
        TaskError: a model with several scores, settings that do not fit.
        OSError: no such checkpoint.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: RerankSettings | None = None,
        *,
        accelerated: bool = True,
    ):
        check_checkpoint("folder", folder)
        settings = RerankSettings() if settings is None else settings
        self.tokenizer = fast_tokenizer(str(folder))
        self.model = load_network(
            "AutoModelForSequenceClassification", str(folder), accelerated=accelerated
        )
        if self.model.config.num_labels != 1:
            raise TaskError(
                f"{folder} gives {self.model.config.num_labels} scores, reranking takes one; train "
                "a model by `fastbert finetune cross-encoder`"
            )
        self._activation = _activation(Path(folder), self.model.config)
        self.settings = fitted(settings, self.tokenizer, self.model.config)

    def scores(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        batch_size: int = 32,
        bf16: bool = False,
        progress: bool = False,
        name: str = "pairs",
    ) -> np.ndarray:
        """One score a pair of query and passage, `(N,)` float64.

        Args:
            pairs: N queries with a passage each.
            batch_size, bf16, progress, name: as of `Predictor.predict`.

        Raises:
            TaskError: a pair that is refused.
        """
        if not pairs:
            return np.zeros(0)
        encoding, origins = tokenize(
            self.tokenizer,
            [query for query, _ in pairs],
            [passage for _, passage in pairs],
            max_length=self.settings.max_length,
            settings=self.settings,
            name=name,
            unit="pair",
        )
        features = features_of(encoding)
        collator = padding_collator(self.tokenizer)
        scores = np.full(len(pairs), -np.inf)
        options = {"batch_size": batch_size, "bf16": bf16, "progress": progress}
        for numbers, _, outputs in forwards(self.model, features, collator, **options):
            rows = [origins[number] for number in numbers]
            np.maximum.at(scores, rows, outputs.logits[:, 0].double().cpu().numpy())
        return self._activation(scores)

    def rerank(self, rows: Sequence[dict], *, name: str = "rows", **options) -> list[dict]:
        """One answer a query: `query` and `ranking`, its passages (`passage`, `score`, and `index`
        in the order they came), the best first.

        Args:
            rows: queries with their passages. name, options: as of `scores`.

        Raises:
            TaskError: a column is missing or holds something else, a pair that is refused.
        """
        lists = self._lists(list(rows), name)
        pairs = [(query, passage) for query, passages in lists for passage in passages]
        scores = self.scores(pairs, name=name, **options)
        answers, first = [], 0
        for query, passages in lists:
            of_query = scores[first : first + len(passages)]
            first += len(passages)
            order = np.argsort(-of_query, kind="stable")[: self.settings.top]
            ranking = [
                {"passage": passages[i], "score": float(of_query[i]), "index": int(i)}
                for i in order
            ]
            answers.append({"query": query, "ranking": ranking})
        return answers

    def _lists(self, rows: list[dict], name: str) -> list[tuple[str, list[str]]]:
        """Queries with their passages, in the order of the rows."""
        settings = self.settings
        check_columns(rows, {"query": settings.query, "passages": settings.passages}, name)
        check_texts(rows, [settings.query], name)
        lists: list[tuple[str, list[str]]] = []
        of_query: dict[str, list[str]] = {}
        for number, row in enumerate(rows, 1):
            query, found = row[settings.query], row[settings.passages]
            if isinstance(found, str):
                if query not in of_query:
                    of_query[query] = []
                    lists.append((query, of_query[query]))
                of_query[query].append(found)
            elif isinstance(found, list) and all(isinstance(text, str) for text in found):
                lists.append((query, found))
            else:
                raise TaskError(
                    f"{name}, row {number}: {settings.passages!r} must be a text or a list of "
                    f"texts, got {found!r:.60}"
                )
        return lists


def _activation(folder: Path, config):
    """What sentence-transformers puts behind the score; where it says nothing, a sigmoid.

    Raises:
        TaskError: something else than the model and an activation.
    """
    of_folder = folder / "config_sentence_transformers.json"
    found = json.loads(of_folder.read_text()) if of_folder.is_file() else {}
    # Older versions kept it in the model's own configuration.
    found = getattr(config, "sentence_transformers", {}) | found
    name = found.get("activation_fn", "Sigmoid").rsplit(".", 1)[-1]
    if name not in ACTIVATIONS:
        raise TaskError(f"{folder} has the activation {name}; known are {', '.join(ACTIVATIONS)}")
    modules = folder / "modules.json"
    if modules.is_file() and len(json.loads(modules.read_text())) > 1:
        raise TaskError(
            f"{folder} has modules behind the model; use sentence-transformers' CrossEncoder with "
            "fastbert.accelerate"
        )
    return ACTIVATIONS[name]
