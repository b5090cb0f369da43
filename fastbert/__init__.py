"""fastbert: BERT encoders with fused kernels, without work on padding, equal to the reference.

`fastbert.BertModel` and its heads replace transformers' classes of the same names;
`fastbert.accelerate(model)` does it to a model that is already built.
"""

from fastbert.lazy import exports

__version__ = "0.1.0"

_MODEL_AND_TASKS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
_EXPORTS = {
    "Embedder": "fastbert.embedder",
    "GraphedForward": "fastbert.graphed_forward",
    "accelerate": "fastbert.models.accelerate",
    "freeze": "fastbert.models.freeze",
    "quantize": "fastbert.models.quantize",
    "refresh": "fastbert.cache",
    "register_attention": "fastbert.models.attention_interface",
    "register_auto_classes": "fastbert.models.auto_classes",
    "use_backend": "fastbert.ops",
    **dict.fromkeys(
        (
            "BertModel",
            "BertForMaskedLM",
            "BertForPreTraining",
            "BertForNextSentencePrediction",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
            "BertForMultipleChoice",
        ),
        "fastbert.models.bert",
    ),
    **dict.fromkeys(
        (
            "ModernBertModel",
            "ModernBertForMaskedLM",
            "ModernBertForSequenceClassification",
            "ModernBertForTokenClassification",
            "ModernBertForQuestionAnswering",
            "ModernBertForMultipleChoice",
        ),
        "fastbert.models.modernbert",
    ),
    **{
        f"{prefix}{name}": "fastbert.models.roberta"
        for prefix in ("Roberta", "XLMRoberta", "Camembert")
        for name in _MODEL_AND_TASKS
    },
    **{f"Electra{name}": "fastbert.models.electra" for name in _MODEL_AND_TASKS},
    "ElectraForPreTraining": "fastbert.models.electra",
    **{f"DistilBert{name}": "fastbert.models.distilbert" for name in _MODEL_AND_TASKS},
    **{f"Albert{name}": "fastbert.models.albert" for name in _MODEL_AND_TASKS},
    "AlbertForPreTraining": "fastbert.models.albert",
    **dict.fromkeys(
        (
            "DebertaModel",
            "DebertaForMaskedLM",
            "DebertaForSequenceClassification",
            "DebertaForTokenClassification",
            "DebertaForQuestionAnswering",
        ),
        "fastbert.models.deberta",
    ),
    **dict.fromkeys(
        (
            "DebertaV2Model",
            "DebertaV2ForMaskedLM",
            "DebertaV2ForSequenceClassification",
            "DebertaV2ForTokenClassification",
            "DebertaV2ForQuestionAnswering",
            "DebertaV2ForMultipleChoice",
        ),
        "fastbert.models.deberta_v2",
    ),
    **{
        f"{prefix}{name}": "fastbert.models.deberta_pretraining"
        for prefix in ("Deberta", "DebertaV2")
        for name in ("ForEnhancedMaskedLM", "ForPreTraining")
    },
    **dict.fromkeys(
        ("DataCollatorForLanguageModeling", "DataCollatorForWholeWordMask"),
        "fastbert.data.collators",
    ),
}

__all__ = ["__version__", *_EXPORTS]
__getattr__, __dir__ = exports(__name__, _EXPORTS)
