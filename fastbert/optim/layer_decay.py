"""Parameter groups whose learning rate falls from the head down to the embeddings.

Source: Howard and Ruder 2018, "Universal language model fine-tuning", section 3.2; for BERT, Zhang
et al. 2021, "Revisiting few-sample BERT fine-tuning", section 2.
"""

import transformers
from torch import nn

from fastbert.optim.groups import decay_groups


def layer_decay_groups(
    model: transformers.PreTrainedModel, *, lr: float, layer_decay: float, weight_decay: float
) -> list[dict]:
    """Groups as `decay_groups` makes them, cut by depth, each with a learning rate of its own.

    With L layers the head has lr, layer l (from 0) lr · layer_decay^(L - l), and the embeddings
    lr · layer_decay^(L + 1).

    Args:
        model: a transformers model with a head, or without. The layers are the longest ModuleList
            of its base model; what is registered before them counts as embeddings, what comes
            after them (pooler, head) as head.
        lr: of the head. layer_decay: in (0, 1]; 1 gives every group lr.
        weight_decay: of matrices; biases and norms have 0.

    Raises:
        ValueError: lr or layer_decay out of range, a model without layers, and as `decay_groups`.
    """
    if lr < 0:
        raise ValueError(f"lr must be 0 or more, got {lr}")
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must lie in (0, 1], got {layer_decay}")
    depths, num_layers = _depths(model)
    groups: dict[tuple[int, int], dict] = {}
    for kind, group in enumerate(decay_groups(model, weight_decay)):
        for parameter in group["params"]:
            depth = depths[id(parameter)]
            empty = {
                "params": [],
                "weight_decay": group["weight_decay"],
                "lr": lr * layer_decay ** (num_layers + 1 - depth),
            }
            groups.setdefault((depth, kind), empty)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _depths(model: transformers.PreTrainedModel) -> tuple[dict[int, int], int]:
    """Depth of each parameter by identity: 0 embeddings, 1 to L layers, L + 1 the rest."""
    base = model.base_model
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList)]
    layers = max(lists, key=len, default=None)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no list of layers to decay the rate along")
    depths = {
        id(parameter): depth
        for depth, layer in enumerate(layers, 1)
        for parameter in layer.parameters()
    }
    depth = 0
    for parameter in base.parameters():
        if id(parameter) in depths:
            depth = len(layers) + 1
        else:
            depths[id(parameter)] = depth
    for parameter in model.parameters():
        depths.setdefault(id(parameter), len(layers) + 1)
    return depths, len(layers)
