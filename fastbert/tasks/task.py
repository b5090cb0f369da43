"""What every task has: columns, features of the model, answers, metrics; and long texts.

A row is what a file holds; a feature is what the model sees, one or more of a row.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fastbert.tasks.tables import TaskError, read_rows

logger = logging.getLogger("fastbert")

OVERLONG = ("truncate", "stride", "refuse")


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Settings of every task; each adds its columns.

    Attributes:
        max_length: tokens of a feature, special ones included; None: what the model takes.
        overlong: of a text with more tokens `truncate` keeps the head, `stride` makes overlapping
            features of it whose answers are joined, `refuse` raises. The log says how many.
        stride: tokens two neighbouring features share.
    """

    max_length: int | None = None
    overlong: str = "truncate"
    stride: int = 64

    def __post_init__(self):
        if self.overlong not in OVERLONG:
            raise TaskError(f"overlong must be one of {OVERLONG}, got {self.overlong!r}")
        if self.stride < 0:
            raise TaskError(f"stride must be 0 or more, got {self.stride}")
        if self.max_length is not None and self.max_length < 8:
            raise TaskError(f"max_length must be at least 8, got {self.max_length}")


@dataclass
class Encoded:
    """Features, and where they come from.

    Attributes:
        features: keyword arguments of the model, one mapping a feature, not padded.
        rows: index of each feature's row.
        places: what the task needs to find its way back from tokens to the row.
    """

    features: list[dict]
    rows: list[int]
    places: list = field(default_factory=list)

    def of_rows(self, rows: Sequence[int]) -> "Encoded":
        """Features of these rows alone, which are counted by their places in the list."""
        numbers = {row: number for number, row in enumerate(rows)}
        chosen = [i for i, row in enumerate(self.rows) if row in numbers]
        return Encoded(
            [self.features[i] for i in chosen],
            [numbers[self.rows[i]] for i in chosen],
            [self.places[i] for i in chosen] if self.places else [],
        )

    def by_length(self) -> "Encoded":
        """The longest first, so that a batch holds little padding."""
        # Of a feature that holds several sequences, the longest makes the padding.
        lengths = [max(_lengths(f["input_ids"])) for f in self.features]
        order = np.argsort(-np.array(lengths), kind="stable")
        return Encoded(
            [self.features[i] for i in order],
            [self.rows[i] for i in order],
            [self.places[i] for i in order] if self.places else [],
        )


def _lengths(input_ids) -> list[int]:
    if isinstance(input_ids[0], list):
        return [len(ids) for ids in input_ids]
    return [len(input_ids)]


@dataclass
class Outcomes:
    """Answers beside the truth, for pictures; empty where a task has none of a kind.

    Attributes:
        truth, given: labels of N rows or words.
        confidence, right: probabilities of N answers, and whether they were right.
    """

    truth: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)


class Task:
    """A task; its subclasses say how rows become features and logits answers.

    Attributes:
        name: on the command line. auto_class: transformers' class of its models.
        best: the metric that chooses the checkpoint; the greater the better.
        label_names: fields of a labelled feature. tokenizer_options: how its tokenizer is loaded.
        labels: names of the classes, in the order of the model's outputs; empty where there are
            none.
    """

    name: str
    auto_class: str
    best: str
    settings_class: type[TaskSettings]
    label_names = ("labels",)
    tokenizer_options: ClassVar[dict] = {}

    def __init__(self, settings: TaskSettings, labels: Sequence[str] = ()):
        self.settings = settings
        self.labels = list(labels)

    def read(self, source: str | Path, *, split: str | None = None) -> list[dict]:
        """Rows of a file or a dataset, as `read_rows`."""
        return read_rows(source, split=split)

    def evaluation_beside(self, source) -> tuple[str | Path, str] | None:
        """Source and split of the evaluation rows of a source that holds several splits."""
        return None

    def labels_of(self, rows: Sequence[dict]) -> list[str]:
        """The labels that training rows hold, sorted."""
        return []

    def check_varied(self, rows: Sequence[dict]) -> None:
        """Raises TaskError where checked training rows have all the same label."""

    def check(self, rows: Sequence[dict], name: str, *, labelled: bool) -> None:
        """Raises TaskError where a row lacks a column or holds what the task cannot use."""
        raise NotImplementedError

    def encode(
        self, rows: Sequence[dict], tokenizer, *, labelled: bool, name: str = "rows"
    ) -> Encoded:
        """Features of checked rows; `labelled` ones have `labels`. name: of them, for messages."""
        raise NotImplementedError

    def collator(self, tokenizer):
        """Makes a batch of features."""
        raise NotImplementedError

    def answers(self, rows: Sequence[dict], encoded: Encoded, logits) -> list[dict]:
        """One JSON object a row, from the logits of every feature."""
        raise NotImplementedError

    def metrics(self, rows: Sequence[dict], answers: Sequence[dict]) -> dict[str, float]:
        """Metrics of answers to labelled rows."""
        raise NotImplementedError

    def outcomes(self, rows: Sequence[dict], answers: Sequence[dict]) -> Outcomes:
        """Answers to labelled rows beside the truth."""
        return Outcomes()

    def model_options(self) -> dict:
        """Options of the model's configuration."""
        names = dict(enumerate(self.labels))
        return {"id2label": names, "label2id": {name: index for index, name in names.items()}}

    def description(self) -> dict:
        """What `registry.read_task` needs to make it again, for JSON."""
        return {"task": self.name, "settings": asdict(self.settings), "labels": self.labels}


def fitted(settings: TaskSettings, tokenizer, model_config) -> TaskSettings:
    """The settings with the number of tokens a feature may have as max_length.

    Raises:
        TaskError: max_length beyond what the model takes, a stride that leaves no room.
    """
    limit = min(tokenizer.model_max_length, _positions(model_config))
    wanted = limit if settings.max_length is None else settings.max_length
    if wanted > limit:
        raise TaskError(f"max_length is {wanted}, but the model takes {limit} tokens")
    if settings.overlong == "stride" and settings.stride >= wanted - 8:
        raise TaskError(
            f"stride is {settings.stride}, but a feature has {wanted} tokens; take a smaller one"
        )
    return replace(settings, max_length=int(wanted))


def _positions(config) -> int:
    positions = getattr(config, "max_position_embeddings", None) or 1 << 30
    # RoBERTa's tables hold pad_token_id + 1 rows that no token takes.
    offset = config.pad_token_id + 1 if config.model_type in _OFFSET_POSITIONS else 0
    return positions - offset


_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "longformer")


def tokenize(
    tokenizer,
    first: Sequence,
    second: Sequence | None,
    *,
    max_length: int,
    settings: TaskSettings,
    cut: str = "longest_first",
    name: str = "rows",
    unit: str = "row",
    texts_of_row: int = 1,
    **options,
):
    """Tokenized rows, with the overlong ones treated as the settings say.

    Args:
        tokenizer: a fast one.
        first, second: texts, or lists of words with is_split_into_words=True; None: no pairs.
        max_length: tokens of a feature.
        settings: for `overlong` and `stride`.
        cut: which of a pair is cut, as transformers' `truncation`; under stride it is the second.
        name: of the rows, for messages. unit: what one is called there.
        texts_of_row: so many texts, one after the other, come from one.
        options: of the tokenizer.

    Returns:
        A BatchEncoding with the fields the tokenizer gives, and the index of each feature's row.

    Raises:
        TaskError: an overlong text that is to be refused, or one that cannot be cut.
    """
    whole = tokenizer(first, second, truncation=False, verbose=False, **options)
    lengths = np.array([len(ids) for ids in whole["input_ids"]])
    overlong = np.flatnonzero(lengths > max_length)
    if not len(overlong):
        return whole, list(range(len(lengths)))
    number, longest = int(overlong[0]), int(lengths.argmax())
    concerned = f"{len(set(overlong // texts_of_row))} of {len(lengths) // texts_of_row} {unit}s"
    if settings.overlong == "refuse":
        raise TaskError(
            f"{name}, {unit} {number // texts_of_row + 1} has {int(lengths[number])} tokens, at "
            f"most {max_length} are taken ({concerned} are too long, {unit} "
            f"{longest // texts_of_row + 1} has {int(lengths[longest])}); shorten them, raise "
            "max_length, or choose overlong truncate or stride"
        )
    strided = settings.overlong == "stride"
    done = "cut into overlapping features" if strided else "truncated"
    logger.warning(
        "%s: %s have more than %d tokens (up to %d) and are %s",
        *(name, concerned, max_length, int(lengths[longest]), done),
    )
    options["truncation"] = cut
    if strided:
        options["truncation"] = "only_first" if second is None else "only_second"
        options |= {"stride": settings.stride, "return_overflowing_tokens": True}
    try:
        encoding = tokenizer(first, second, max_length=max_length, verbose=False, **options)
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise TaskError(
            f"{name}: a first text leaves no room for the second within {max_length} tokens and a "
            f"stride of {settings.stride} ({error}); raise max_length or lower the stride"
        ) from error
    if not strided:
        return encoding, list(range(len(lengths)))
    return encoding, list(encoding.pop("overflow_to_sample_mapping"))


def features_of(encoding) -> list[dict]:
    """One mapping a feature, of what the model takes; masks are the collator's."""
    names = [n for n in ("input_ids", "token_type_ids") if n in encoding]
    return [{n: encoding[n][i] for n in names} for i in range(len(encoding["input_ids"]))]


def padding_collator(tokenizer):
    """Makes a batch of features by padding them to the longest."""
    import transformers

    return transformers.DataCollatorWithPadding(tokenizer)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    import scipy.special

    return scipy.special.softmax(np.asarray(logits, np.float64), axis=-1)
