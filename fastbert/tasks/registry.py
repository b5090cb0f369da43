"""The tasks by name, and a task from what stands beside a model."""

import json
from pathlib import Path

from fastbert.folders import check_folder
from fastbert.tasks.classification import Classification
from fastbert.tasks.glue import GLUE_TASKS
from fastbert.tasks.multiple_choice import MultipleChoice
from fastbert.tasks.question_answering import QuestionAnswering
from fastbert.tasks.runs import DESCRIPTION
from fastbert.tasks.tables import TaskError
from fastbert.tasks.task import Task
from fastbert.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (Classification, TokenClassification, QuestionAnswering, MultipleChoice)
} | GLUE_TASKS


def task_class(name: str) -> type[Task]:
    """The task of a name; GLUE's also as its folders are named, such as SST-2.

    Raises:
        TaskError: an unknown name.
    """
    glue = name.lower().replace("-", "")
    if name not in TASKS and glue not in GLUE_TASKS:
        raise TaskError(f"there is no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS.get(name) or GLUE_TASKS[glue]


def write_description(description: dict, folder: Path) -> None:
    """Writes what `read_description` reads: the task's name and its settings."""
    text = json.dumps(description, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def read_description(folder: str | Path) -> dict:
    """What a model was fine-tuned on.

    Raises:
        TaskError: a folder that `finetune` did not write.
        FileNotFoundError: no folder.
    """
    check_folder("folder", folder)
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise TaskError(f"{folder} has no {DESCRIPTION}; `fastbert finetune` writes such folders")
    return json.loads(path.read_text(encoding="utf-8"))


def read_task(folder: str | Path, **changes) -> Task:
    """The task a model was fine-tuned on.

    Args:
        folder: `finetune` wrote it.
        changes: settings to replace: columns of another file, `overlong`.

    Raises:
        TaskError: a folder without a task, a setting the task does not have.
    """
    found = read_description(folder)
    if found["task"] not in TASKS:
        raise TaskError(
            f"{folder} is a {found['task']} and has no answers of its own: use `fastbert encode` "
            "and `similarity` with a bi-encoder, `rerank` with a cross-encoder"
        )
    kind = task_class(found["task"])
    return kind(settings_of(kind, found["settings"] | changes), found["labels"])


def settings_of(kind: type[Task], values: dict):
    """The task's settings from names and values.

    Raises:
        TaskError: a name the task does not have.
    """
    known = kind.settings_class.__dataclass_fields__
    for name in values:
        if name not in known:
            raise TaskError(f"{kind.name} has no setting {name!r}; it has {', '.join(known)}")
    return kind.settings_class(**values)
