"""Fine-tuning: tasks, the training of a model on one, and its use on files.

`finetune` trains, `Predictor` answers; `fastbert finetune`, `evaluate` and `predict` call them.
"""

from fastbert.tasks.finetuning import Finetuned, TrainingSettings, finetune
from fastbert.tasks.prediction import Predictor
from fastbert.tasks.registry import TASKS
from fastbert.tasks.tables import TaskError, read_rows

__all__ = [
    "TASKS",
    "Finetuned",
    "Predictor",
    "TaskError",
    "TrainingSettings",
    "finetune",
    "read_rows",
]
