"""A tag for every word: named entities (BIO and its kin), parts of speech."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastbert.tasks.tables import TaskError, check_columns, check_varied
from fastbert.tasks.task import (
    Encoded,
    Outcomes,
    Task,
    TaskSettings,
    features_of,
    softmax,
    tokenize,
)

ENTITY_PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")


@dataclass(frozen=True, kw_only=True)
class TokenClassificationSettings(TaskSettings):
    """
    Attributes:
        tokens: column of the words, a list; one text is split at its white space.
        tags: column of the tags, one a word.
    """

    tokens: str = "tokens"
    tags: str = "tags"


class TokenClassification(Task):
    """The first token of a word carries its tag.

    Under `stride` a word takes its tag from the feature that shows most of what stands around it;
    under `truncate` words behind the end have the tag O, or the first one where there is no O.
    """

    name = "token-classification"
    auto_class = "AutoModelForTokenClassification"
    settings_class = TokenClassificationSettings
    # A byte-level tokenizer (RoBERTa's) would glue each word to the one before. Others ignore it.
    tokenizer_options: ClassVar[dict] = {"add_prefix_space": True}

    @property
    def best(self) -> str:
        return "f1" if self._are_entities() else "accuracy"

    def _are_entities(self) -> bool:
        return all(tag == "O" or tag.startswith(ENTITY_PREFIXES) for tag in self.labels)

    def labels_of(self, rows):
        return sorted({tag for row in rows for tag in row[self.settings.tags]})

    def check_varied(self, rows):
        check_varied((tag for row in rows for tag in row[self.settings.tags]), "tag", "tags")

    def check(self, rows, name, *, labelled):
        settings = self.settings
        check_columns(rows, {"tokens": settings.tokens}, name)
        for number, row in enumerate(rows, 1):
            words = row[settings.tokens]
            if not isinstance(words, str) and not _is_strings(words):
                raise TaskError(
                    f"{name}, row {number}: {settings.tokens!r} must be a list of words, got "
                    f"{words!r:.60}"
                )
            if not self._words(row):
                raise TaskError(f"{name}, row {number}: {settings.tokens!r} holds no word")
        if not labelled:
            return
        check_columns(rows, {"tags": settings.tags}, name)
        for number, row in enumerate(rows, 1):
            self._check_tags(row, f"{name}, row {number}")

    def _check_tags(self, row: dict, where: str) -> None:
        words, tags = self._words(row), row[self.settings.tags]
        if not _is_strings(tags) or len(tags) != len(words):
            raise TaskError(
                f"{where}: {self.settings.tags!r} must hold a tag for each of the {len(words)} "
                f"words, got {tags!r:.60}"
            )
        unknown = set(tags) - set(self.labels or tags)
        if unknown:
            raise TaskError(
                f"{where}: unknown tag {sorted(unknown)[0]!r}; the model knows "
                f"{', '.join(self.labels)}"
            )

    def _words(self, row: dict) -> list[str]:
        words = row[self.settings.tokens]
        return words.split() if isinstance(words, str) else list(words)

    def encode(self, rows, tokenizer, *, labelled, name="rows"):
        from fastbert.padding import IGNORE_INDEX

        encoding, origins = tokenize(
            tokenizer,
            [self._words(row) for row in rows],
            None,
            max_length=self.settings.max_length,
            settings=self.settings,
            name=name,
            is_split_into_words=True,
        )
        features, places = features_of(encoding), []
        before: tuple[int | None, set[int]] = (None, set())
        for index, row in enumerate(origins):
            words = encoding.word_ids(index)
            seen = before[1] if before[0] == row else set()
            firsts = _first_tokens(words, seen)
            places.append(firsts)
            before = row, {w for w in words if w is not None}
            if labelled:
                tags = rows[row][self.settings.tags]
                labels = [IGNORE_INDEX] * len(words)
                for word, position in firsts.items():
                    labels[position] = self.labels.index(tags[word])
                features[index]["labels"] = labels
        return Encoded(features, list(origins), places)

    def collator(self, tokenizer):
        import transformers

        return transformers.DataCollatorForTokenClassification(tokenizer)

    def answers(self, rows, encoded, logits):
        chosen: list[dict[int, tuple[int, np.ndarray]]] = [{} for _ in rows]
        for feature, row, firsts, scores in zip(
            encoded.features, encoded.rows, encoded.places, logits, strict=True
        ):
            length = len(feature["input_ids"])
            for word, position in firsts.items():
                context = min(position, length - 1 - position)
                if word not in chosen[row] or context > chosen[row][word][0]:
                    chosen[row][word] = context, scores[position]
        return [self._answer(row, found) for row, found in zip(rows, chosen, strict=True)]

    def _answer(self, row: dict, found: dict[int, tuple[int, np.ndarray]]) -> dict:
        words = self._words(row)
        absent = "O" if "O" in self.labels else self.labels[0]
        tags, scores = [absent] * len(words), np.zeros(len(words))
        for word, (_, logits) in found.items():
            probabilities = softmax(logits)
            tags[word] = self.labels[int(probabilities.argmax())]
            scores[word] = probabilities.max()
        answer: dict = {"tags": tags, "scores": [float(score) for score in scores]}
        if self._are_entities():
            answer["entities"] = _entities(words, tags, scores)
        return answer

    def metrics(self, rows, answers):
        truth = [list(row[self.settings.tags]) for row in rows]
        given = [answer["tags"] for answer in answers]
        same = [
            a == b for x, y in zip(truth, given, strict=True) for a, b in zip(x, y, strict=True)
        ]
        accuracy = float(np.mean(same))
        if not self._are_entities():
            return {"accuracy": accuracy}
        from seqeval.metrics import f1_score, precision_score, recall_score

        return {
            "f1": float(f1_score(truth, given, zero_division=0)),
            "precision": float(precision_score(truth, given, zero_division=0)),
            "recall": float(recall_score(truth, given, zero_division=0)),
            "accuracy": accuracy,
        }

    def outcomes(self, rows, answers):
        truth = [tag for row in rows for tag in row[self.settings.tags]]
        given = [tag for answer in answers for tag in answer["tags"]]
        return Outcomes(
            truth,
            given,
            [score for answer in answers for score in answer["scores"]],
            [a == b for a, b in zip(truth, given, strict=True)],
        )


def _first_tokens(words: list[int | None], seen: set[int]) -> dict[int, int]:
    """Position of the first token of each word that begins in a feature.

    A word at the head of a feature may have begun in the one before, `seen` there; then it is left
    to that one.
    """
    firsts: dict[int, int] = {}
    for position, word in enumerate(words):
        if word is not None and word not in firsts:
            firsts[word] = position
    head = next(iter(firsts), None)
    if head in seen:
        del firsts[head]
    return firsts


def _entities(words: list[str], tags: list[str], scores: np.ndarray) -> list[dict]:
    """Entities as seqeval finds them; start and end count words, end excluded."""
    from seqeval.metrics.sequence_labeling import get_entities

    return [
        {
            "type": kind,
            "start": int(start),
            "end": int(last) + 1,
            "text": " ".join(words[start : last + 1]),
            "score": float(scores[start : last + 1].mean()),
        }
        for kind, start, last in get_entities(tags)
    ]


def _is_strings(values) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) for v in values)
