"""`AutoModel` and its kin giving fastbert's classes, where somebody asks for it."""

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from fastbert.models.accelerate import CONVERSIONS, load_families


def register_auto_classes() -> list[str]:
    """Makes `AutoModel`, `AutoModelForMaskedLM` and so on give fastbert's classes in this process.

    For every configuration whose class there is one that fastbert replaces; others stay. Libraries
    that load through `AutoModel...` (pipelines, sentence-transformers, training scripts) then need
    no change. Models that exist already are not touched (`fastbert.accelerate` does that). It is a
    setting of the process, never made by itself; calling it again changes nothing.

    Returns:
        What is replaced now, as "AutoModel: BertModel".
    """
    load_families()
    replaced = []
    for auto in _auto_classes():
        for theirs, ours in CONVERSIONS.items():
            config = getattr(theirs, "config_class", None)
            if config is None or auto._model_mapping.get(config, None) not in (theirs, ours):
                continue
            auto.register(config, ours, exist_ok=True)
            replaced.append(f"{auto.__name__}: {ours.__name__}")
    return sorted(replaced)


def _auto_classes() -> list[type]:
    names = (name for name in vars(modeling_auto) if name.startswith("AutoModel"))
    classes = (getattr(transformers, name, None) for name in names)
    return [
        c
        for c in classes
        if isinstance(c, type)
        and issubclass(c, _BaseAutoModelClass)
        and c._model_mapping is not None
    ]
