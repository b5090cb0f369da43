"""Ids and labels outside their table on devices that must not be waited for.

On a CPU they raise before any kernel runs. On a GPU looking at them would stall the host in every
forward, and an unchecked one kills the process with a device-side assertion. There they are
clamped, a flag on the device remembers it, and the next moment the host reads from that device
anyway, in `fastbert.padding`, raises.
"""

import torch

_flags: dict[torch.device, torch.Tensor] = {}


def must_not_wait(tensor: torch.Tensor) -> bool:
    """Whether reading `tensor` would stall the host."""
    return tensor.device.type != "cpu"


def flag_of(device: torch.device) -> torch.Tensor:
    """The device's flag, int64 `()`, for whoever may have to set it."""
    if device not in _flags:
        _flags[device] = torch.zeros((), dtype=torch.int64, device=device)
    return _flags[device]


def flag_for(ids: torch.Tensor) -> torch.Tensor | None:
    """The flag of the ids' device for a kernel to set; None where they have been checked."""
    return flag_of(ids.device) if must_not_wait(ids) else None


def clamped(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """`ids` within [0, rows), the device's flag set where one was not."""
    flag = flag_of(ids.device)
    flag |= ((ids < 0) | (ids >= rows)).any()
    return ids.clamp(0, rows - 1)


def pending(device: torch.device) -> torch.Tensor | None:
    """The device's flag, for a caller that is about to read from it; None if nothing set it up."""
    return _flags.get(device)


def raise_pending(device: torch.device) -> None:
    """Clears the flag and raises.

    Raises:
        IndexError: always.
    """
    # In place: a captured graph goes on writing to this tensor.
    _flags[device].zero_()
    raise IndexError(
        f"an earlier forward on {device} had input_ids, token_type_ids, position_ids or labels "
        "outside their tables; its results are wrong. Check the tokenizer against the model's "
        "config, or run that batch on a CPU, where the id is named"
    )
