"""Pairs of models with equal weights, ours and transformers', and batches to compare them on."""

import copy

import torch
import transformers

import fastbert
from fastbert import dispatch

TASKS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
FAMILIES = {
    "Bert": (*TASKS, "ForPreTraining", "ForNextSentencePrediction"),
    "ModernBert": TASKS,
    "Roberta": TASKS,
    "XLMRoberta": TASKS,
    "Camembert": TASKS,
    "Electra": (*TASKS, "ForPreTraining"),
    "DistilBert": TASKS,
    "Albert": (*TASKS, "ForPreTraining"),
    "Deberta": tuple(task for task in TASKS if task != "ForMultipleChoice"),
    "DebertaV2": TASKS,
}
"""Prefixes of the class names, and what stands behind them."""
BESIDE_TRANSFORMERS = dict.fromkeys(
    ("Deberta", "DebertaV2"), ("ForEnhancedMaskedLM", "ForPreTraining")
)
"""The same of classes that transformers has no counterpart of."""
HEADS = tuple(f"Bert{task}" for task in FAMILIES["Bert"])
MODERNBERT_HEADS = tuple(f"ModernBert{task}" for task in FAMILIES["ModernBert"])
DEBERTA_HEADS = tuple(f"Deberta{task}" for task in FAMILIES["Deberta"])
DEBERTA_V2_HEADS = tuple(f"DebertaV2{task}" for task in FAMILIES["DebertaV2"])


def family_of(name: str) -> str:
    """The key of FAMILIES for the class `name`."""
    return next(f for f in FAMILIES if name.removeprefix(f) in ("Model", *heads_of(f)))


def heads_of(family: str) -> tuple[str, ...]:
    """What stands behind the prefix in the names of all heads of a family."""
    return FAMILIES[family] + BESIDE_TRANSFORMERS.get(family, ())


def lively_(model: torch.nn.Module, seed: int) -> None:
    """Moves biases and LayerNorm weights off 0 and 1, where a fault in them would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "token_type" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.2 * noise.to(parameter.dtype))


def model_pair(
    name: str,
    config: transformers.PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str = "eager",
    **kwargs,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """`fastbert.<name>` and transformers' class of that name, same weights.

    Args:
        name: class name.
        config: its configuration.
        dtype: of both models.
        seed: of the weights.
        attention: transformers' implementation.
        kwargs: passed to both constructors.

    Returns:
        ours, theirs; both in eval.
    """
    torch.manual_seed(seed)
    config._attn_implementation = attention
    if name.endswith("ForQuestionAnswering") or name == "AlbertForPreTraining":
        config.num_labels = 2
    theirs = getattr(transformers, name)(copy.deepcopy(config), **kwargs)
    lively_(theirs, seed + 1)
    ours = getattr(fastbert, name)(copy.deepcopy(config), **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(dtype).eval(), theirs.to(dtype).eval()


def head_inputs(
    name: str, batch: dict, config: transformers.PreTrainedConfig, seed: int = 0
) -> dict:
    """`batch` (ids, mask, token types) with the labels the head `name` takes.

    Args:
        name: class name; a model without a head gets no labels.
        batch: `(B, S)` tensors of `fastbert.testing.inputs.padded_batch`.
        config: for the number of labels.
        seed: of the labels.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    size, length = ids.shape

    def classes(high, *shape):
        return torch.randint(high, shape, generator=generator)

    inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "token_type_ids")}
    family, task = family_of(name), name.removeprefix(family_of(name))
    if family in ("ModernBert", "DistilBert"):
        del inputs["token_type_ids"]
    if task == "ForPreTraining" and family in ("Electra", *BESIDE_TRANSFORMERS):
        inputs["labels"] = classes(2, size, length)
    elif task in ("ForMaskedLM", "ForEnhancedMaskedLM", "ForPreTraining"):
        chosen = (torch.rand(ids.shape, generator=generator) < 0.3) & (mask != 0)
        chosen.view(-1)[mask.reshape(-1).nonzero()[0]] = True
        inputs["labels"] = ids.masked_fill(~chosen, -100)
    if name == "BertForPreTraining":
        inputs["next_sentence_label"] = classes(2, size)
    if name == "AlbertForPreTraining":
        inputs["sentence_order_label"] = classes(2, size)
    if task == "ForNextSentencePrediction":
        inputs["labels"] = classes(2, size)
    if task == "ForSequenceClassification":
        inputs["labels"] = classes(config.num_labels, size)
    if task == "ForTokenClassification":
        labels = classes(config.num_labels, size, length)
        inputs["labels"] = labels.masked_fill(mask == 0, -100)
    if task == "ForQuestionAnswering":
        inputs["start_positions"] = classes(length, size)
        inputs["end_positions"] = classes(length, size)
    if task == "ForMultipleChoice":
        inputs = {k: v.view(size // 2, 2, length) for k, v in inputs.items()}
        inputs["labels"] = classes(2, size // 2)
    return inputs


class assert_packed:
    """Fails unless every forward of a `BertModel`, or of the model counted under another name,
    inside the block ran on packed rows."""

    def __init__(self, model: str = "bert_model"):
        self.model = model

    def __enter__(self):
        self.before = dispatch.counters()

    def __exit__(self, kind, error, trace):
        if kind is not None:
            return
        made = dispatch.counters() - self.before
        packed, padded = made[self.model, "packed"], made[self.model, "padded"]
        if padded or not packed:
            raise AssertionError(
                f"expected packed forwards only, got {packed} packed and {padded} padded"
            )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Each trainable parameter's gradient by name."""
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
