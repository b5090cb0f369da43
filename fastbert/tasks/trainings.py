"""Everything `fastbert finetune` trains, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastbert.tasks.registry import TASKS, task_class
from fastbert.tasks.reranking import (
    CrossEncoderSettings,
    evaluate_cross_encoder,
    finetune_cross_encoder,
)
from fastbert.tasks.retrieval import BiEncoderSettings, evaluate_bi_encoder, finetune_bi_encoder
from fastbert.tasks.runs import Finetuned
from fastbert.tasks.tables import TaskError


@dataclass(frozen=True)
class Training:
    """
    Attributes:
        settings_class: columns and lengths; all have defaults.
        run: trains; takes what `finetune` takes behind the task.
        evaluate: of an encoder, gives the metrics of a folder.
    """

    settings_class: type
    run: Callable
    evaluate: Callable | None = None


ENCODERS = {
    "bi-encoder": Training(BiEncoderSettings, finetune_bi_encoder, evaluate_bi_encoder),
    "cross-encoder": Training(CrossEncoderSettings, finetune_cross_encoder, evaluate_cross_encoder),
}
NAMES = (*TASKS, *ENCODERS)


def _finetune(task: str, *arguments, **options) -> Finetuned:
    # Its imports take seconds, for which help need not wait.
    from fastbert.tasks.finetuning import finetune

    return finetune(task, *arguments, **options)


def training_named(name: str) -> Training:
    """
    Raises:
        TaskError: an unknown name.
    """
    if name in ENCODERS:
        return ENCODERS[name]
    try:
        return Training(task_class(name).settings_class, partial(_finetune, name))
    except TaskError as error:
        raise TaskError(f"{error}, {', '.join(ENCODERS)}") from error
