"""`accelerate(model)`: a built transformers model turned into ours in place."""

import transformers
from torch import nn

from fastbert import dispatch
from fastbert.models.signature import transformers_signature

CONVERSIONS: dict[type, type] = {}
"""transformers' class to ours; each family's adapter adds its own."""


def register_conversions(*classes: type) -> None:
    """Maps the transformers class each of `classes` derives from to it."""
    for ours in classes:
        theirs = next(c for c in ours.__mro__ if c.__module__.startswith("transformers."))
        CONVERSIONS[theirs] = ours


def register_family(layer: type, *models: type) -> None:
    """Registers a family: its layer, and its model and heads, which take their arguments as
    transformers' classes of the same names do."""
    for ours in models:
        theirs = getattr(transformers, ours.__name__)
        ours.forward = transformers_signature(theirs)(ours.forward)
    register_conversions(layer, *models)


def load_families() -> None:
    """Imports every family's adapter, which registers its conversions."""
    import fastbert.models.albert
    import fastbert.models.bert
    import fastbert.models.deberta
    import fastbert.models.deberta_v2
    import fastbert.models.distilbert
    import fastbert.models.electra
    import fastbert.models.modernbert
    import fastbert.models.roberta  # noqa: F401


def accelerate(model: nn.Module) -> nn.Module:
    """Gives every transformers encoder inside `model` fastbert's forward, in place.

    Parameters, buffers, hooks and the module tree stay the same objects; only the classes of the
    modules we know change, by exact type, so a user's own subclass keeps its forward, and the log
    says so. Works on a bare model and on anything that holds one (a SentenceTransformer, a PEFT
    model, a Trainer's).

    Args:
        model: any module.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: it holds no model fastbert knows.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}; pass the "
            "model itself, not a pipeline or a path"
        )
    load_families()
    swap_classes(model)
    models = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    derived = sorted({type(m).__name__ for m in models if _is_derived(m)})
    if derived:
        reason = f"{', '.join(derived)} derives from a class fastbert knows and keeps its forward"
        dispatch.log_once("accelerate", "packed rows", reason)
    if not any(type(m) in CONVERSIONS.values() for m in models):
        known = sorted(
            c.__name__ for c in CONVERSIONS if issubclass(c, transformers.PreTrainedModel)
        )
        raise ValueError(
            f"accelerate: {type(model).__name__} holds no model fastbert knows; known are "
            f"{', '.join(known)}, not classes derived from them. fastbert.register_attention() "
            "gives other encoders its attention"
        )
    return model


def _is_derived(model: nn.Module) -> bool:
    """Whether a user's class stands between `model` and the class fastbert would replace."""
    kinds = type(model).__mro__
    return any(c in kinds for c in CONVERSIONS) and not any(
        c in kinds for c in CONVERSIONS.values()
    )


def swap_classes(model: nn.Module) -> None:
    """Changes the class of each known module."""
    for module in model.modules():
        ours = CONVERSIONS.get(type(module))
        if ours is not None:
            module.__class__ = ours
            if isinstance(module, transformers.PreTrainedModel):
                _record_outputs_of(module)


def _record_outputs_of(model: transformers.PreTrainedModel) -> None:
    """transformers looks up what a model can record by the name of its class."""
    from transformers.utils import output_capturing

    output_capturing._CAN_RECORD_REGISTRY[model] = model._can_record_outputs
