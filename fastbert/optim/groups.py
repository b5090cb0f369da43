"""Which parameters decay: matrices do, biases and the norms' weights do not.

Source: BERT, Devlin et al. 2019, whose published training leaves out biases and LayerNorm.
"""

from torch import nn

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups for an optimizer: those that decay, and biases and norms, which do not.

    A parameter shared by two modules appears once; frozen ones are left out.

    Args:
        model: its trainable parameters.
        weight_decay: of the first group; the second has 0.

    Raises:
        ValueError: negative weight_decay, no trainable parameter.
    """
    if weight_decay < 0:
        raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
    of_norms = {
        id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)
    }
    decaying, plain = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_plain = id(parameter) in of_norms or name.rpartition(".")[2] == "bias"
        (plain if is_plain else decaying).append(parameter)
    if not decaying and not plain:
        raise ValueError("the model has no trainable parameter")
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
