"""Extractive question answering: the span of a text that answers a question, or none.

Source: Devlin et al. 2019, sections 4.2 and 4.3. Metrics: Rajpurkar et al. 2016, section 6.1, and
2018, section 5.
"""

import heapq
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastbert.tasks.tables import TaskError, check_columns, check_texts
from fastbert.tasks.task import (
    Encoded,
    Task,
    TaskSettings,
    features_of,
    padding_collator,
    softmax,
    tokenize,
)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringSettings(TaskSettings):
    """
    Attributes:
        question: column of the question.
        context: column of the text that holds the answer.
        answers: column of the answers, SQuAD's mapping of `text` and `answer_start`, two lists;
            empty ones where the context does not hold the answer.
        no_answer: whether the model may say so (SQuAD 2.0).
        null_threshold: how much more than the best span "no answer" has to score, in logits.
        n_best: spans in an answer.
        max_answer_length: tokens of a span.
    """

    max_length: int | None = 384
    overlong: str = "stride"
    stride: int = 128
    question: str = "question"
    context: str = "context"
    answers: str = "answers"
    no_answer: bool = False
    null_threshold: float = 0.0
    n_best: int = 5
    max_answer_length: int = 30

    def __post_init__(self):
        super().__post_init__()
        if self.n_best < 1 or self.max_answer_length < 1:
            raise TaskError(
                f"n_best and max_answer_length must be at least 1, got {self.n_best} and "
                f"{self.max_answer_length}"
            )


class QuestionAnswering(Task):
    """Answers are cut from the context by characters, so they are exactly what stands there."""

    name = "question-answering"
    auto_class = "AutoModelForQuestionAnswering"
    best = "f1"
    settings_class = QuestionAnsweringSettings
    label_names = ("start_positions", "end_positions")

    def model_options(self):
        # The first and the last token, whatever head the checkpoint had before.
        return {"num_labels": 2}

    def check(self, rows, name, *, labelled):
        settings = self.settings
        columns = {"question": settings.question, "context": settings.context}
        check_columns(rows, columns, name)
        check_texts(rows, list(columns.values()), name)
        if not labelled:
            return
        check_columns(rows, {"answers": settings.answers}, name)
        for number, row in enumerate(rows, 1):
            self._check_answers(row, f"{name}, row {number}")

    def _check_answers(self, row: dict, where: str) -> None:
        answers, context = row[self.settings.answers], row[self.settings.context]
        if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
            raise TaskError(
                f"{where}: {self.settings.answers!r} must map text and answer_start to lists, got "
                f"{answers!r:.60}"
            )
        if len(answers["text"]) != len(answers["answer_start"]):
            raise TaskError(f"{where}: text and answer_start differ in number")
        if not answers["text"] and not self.settings.no_answer:
            raise TaskError(f"{where}: there is no answer; set no_answer where that may be so")
        for text, start in zip(answers["text"], answers["answer_start"], strict=True):
            if not text or context[start : start + len(text)] != text:
                raise TaskError(
                    f"{where}: the answer {text!r} does not stand at {start}, where the context "
                    f"holds {context[start : start + len(text)]!r}"
                )

    def encode(self, rows, tokenizer, *, labelled, name="rows"):
        settings = self.settings
        encoding, origins = tokenize(
            tokenizer,
            # White space in front costs tokens in some vocabularies and says nothing.
            [row[settings.question].strip() for row in rows],
            [row[settings.context] for row in rows],
            max_length=settings.max_length,
            settings=settings,
            cut="only_second",
            name=name,
            return_offsets_mapping=True,
        )
        features, places = features_of(encoding), []
        for index, row in enumerate(origins):
            inside = np.array([s == 1 for s in encoding.sequence_ids(index)])
            # A tokenizer that drops what it does not know may leave tokens of no characters.
            spans = np.array(encoding["offset_mapping"][index]).reshape(-1, 2)
            inside &= spans[:, 1] > spans[:, 0]
            null = encoding["input_ids"][index].index(tokenizer.cls_token_id)
            places.append((inside, spans, null))
            if labelled:
                start, end = self._target(rows[row], inside, spans, null)
                features[index] |= {"start_positions": start, "end_positions": end}
        return Encoded(features, list(origins), places)

    def _target(self, row: dict, inside, spans, null: int) -> tuple[int, int]:
        """First and last token of the first answer; the null token where it is not inside."""
        answers = row[self.settings.answers]
        if not answers["text"]:
            return null, null
        start = answers["answer_start"][0]
        last = start + len(answers["text"][0]) - 1
        tokens = [
            np.flatnonzero(inside & (spans[:, 0] <= place) & (place < spans[:, 1]))
            for place in (start, last)
        ]
        if not all(len(found) for found in tokens):
            return null, null
        return int(tokens[0][0]), int(tokens[1][-1])

    def collator(self, tokenizer):
        return padding_collator(tokenizer)

    def answers(self, rows, encoded, logits):
        spans: list[dict[tuple[int, int], float]] = [{} for _ in rows]
        nulls = np.full(len(rows), np.inf)
        starts, ends = logits
        for row, place, start, end in zip(encoded.rows, encoded.places, starts, ends, strict=True):
            for span, score in self._spans(place, start, end):
                spans[row][span] = max(score, spans[row].get(span, -np.inf))
            null = place[2]
            nulls[row] = min(nulls[row], start[null] + end[null])
        return [
            self._answer(row[self.settings.context], found, float(null))
            for row, found, null in zip(rows, spans, nulls, strict=True)
        ]

    def _spans(self, place, start, end) -> Iterator[tuple[tuple[int, int], float]]:
        """Characters and scores of the best spans of one feature."""
        inside, offsets, _ = place
        tokens = np.flatnonzero(inside)
        if not len(tokens):
            return
        start, end = (np.asarray(x, np.float64)[tokens] for x in (start, end))
        # One more than asked for: two tokens may stand for the same characters.
        count = self.settings.n_best + 1
        firsts = heapq.nlargest(count, range(len(tokens)), key=start.__getitem__)
        lasts = heapq.nlargest(count, range(len(tokens)), key=end.__getitem__)
        pairs = [
            (first, last)
            for first in firsts
            for last in lasts
            if 0 <= tokens[last] - tokens[first] < self.settings.max_answer_length
        ]
        if not pairs:
            pairs = [(firsts[0], firsts[0])]
        for first, last in pairs:
            span = int(offsets[tokens[first], 0]), int(offsets[tokens[last], 1])
            yield span, float(start[first] + end[last])

    def _answer(self, context: str, spans: dict[tuple[int, int], float], null: float) -> dict:
        best = heapq.nlargest(self.settings.n_best, spans.items(), key=lambda item: item[1])
        candidates = [
            {"text": context[first:last], "start": first, "end": last, "logit": score}
            for (first, last), score in best
        ]
        empty = {"text": "", "start": 0, "end": 0, "logit": null}
        if not candidates:
            candidates = [empty]
        elif self.settings.no_answer:
            first = null - candidates[0]["logit"] > self.settings.null_threshold
            candidates = [empty, *candidates] if first else [*candidates, empty]
        scores = softmax(np.array([c.pop("logit") for c in candidates]))
        for candidate, score in zip(candidates, scores, strict=True):
            candidate["score"] = float(score)
        return {"answer": candidates[0]["text"], **_place(candidates[0]), "n_best": candidates}

    def metrics(self, rows, answers):
        truths = [row[self.settings.answers]["text"] or [""] for row in rows]
        pairs = [
            (given["answer"], accepted)
            for given, accepted in zip(answers, _comparable(truths), strict=True)
        ]
        f1 = [max(squad_f1(given, t) for t in accepted) for given, accepted in pairs]
        exact = [
            max(normalized(given) == normalized(t) for t in accepted) for given, accepted in pairs
        ]
        return {"exact_match": 100 * float(np.mean(exact)), "f1": 100 * float(np.mean(f1))}


def _place(candidate: dict) -> dict:
    return {name: candidate[name] for name in ("start", "end", "score")}


def _comparable(truths: Sequence[list[str]]) -> list[list[str]]:
    """As SQuAD's script: answers of which nothing is left count only where no others are."""
    kept = [[t for t in accepted if normalized(t)] for accepted in truths]
    return [k or [""] for k in kept]


def normalized(text: str) -> str:
    """Lower case, without punctuation, articles and surplus white space (SQuAD's script)."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def squad_f1(given: str, truth: str) -> float:
    """F1 of the words two answers share; of empty ones, whether both are (SQuAD's script)."""
    given_words, true_words = (normalized(text).split() for text in (given, truth))
    if not given_words or not true_words:
        return float(given_words == true_words)
    shared = sum((Counter(given_words) & Counter(true_words)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(given_words), shared / len(true_words)
    return 2 * precision * recall / (precision + recall)
