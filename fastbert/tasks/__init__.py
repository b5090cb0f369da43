"""Fine-tuning: tasks, the training of a model on one, and its use on files.

`finetune` trains, `Predictor` answers; `fastbert finetune`, `evaluate` and `predict` call them.
`finetune_bi_encoder` and `finetune_cross_encoder` are for sentence-transformers.
"""

from fastbert.tasks.finetuning import finetune
from fastbert.tasks.prediction import Predictor
from fastbert.tasks.recipe import TrainingSettings
from fastbert.tasks.registry import TASKS
from fastbert.tasks.reranking import CrossEncoderSettings, finetune_cross_encoder
from fastbert.tasks.retrieval import BiEncoderSettings, finetune_bi_encoder
from fastbert.tasks.runs import Finetuned
from fastbert.tasks.tables import TaskError, read_rows

__all__ = [
    "TASKS",
    "BiEncoderSettings",
    "CrossEncoderSettings",
    "Finetuned",
    "Predictor",
    "TaskError",
    "TrainingSettings",
    "finetune",
    "finetune_bi_encoder",
    "finetune_cross_encoder",
    "read_rows",
]
