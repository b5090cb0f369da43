"""Fine-tuning: tasks, the training of a model on one, and its use on files.

`finetune` trains, `Predictor` answers; `fastbert finetune`, `evaluate` and `predict` call them.
`finetune_bi_encoder` and `finetune_cross_encoder` are for sentence-transformers.
"""

from fastbert.lazy import exports

# The help of commands needs neither torch nor transformers, which take seconds.
_EXPORTS = {
    "TASKS": ".registry",
    "BiEncoderSettings": ".retrieval",
    "CrossEncoderSettings": ".reranking",
    "Finetuned": ".runs",
    "Predictor": ".prediction",
    "TaskError": ".tables",
    "TrainingSettings": ".recipe",
    "finetune": ".finetuning",
    "finetune_bi_encoder": ".retrieval",
    "finetune_cross_encoder": ".reranking",
    "read_rows": ".tables",
}

__all__ = list(_EXPORTS)
__getattr__, __dir__ = exports(__name__, _EXPORTS)
