"""Folders of models and tokenizers, told from names on the hub before anything is looked up."""

import os
from pathlib import Path


def check_folder(argument: str, value) -> None:
    """What `from_pretrained` takes is a folder here, or may be a name on the hub.

    A mistyped folder is otherwise asked of the hub, whose answer speaks of repositories. It is no
    name on the hub if the hub would refuse it, or if its first part is a folder here.

    Args:
        argument: that holds the value, for messages.
        value: a path or a name; anything else is left to `from_pretrained`.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not isinstance(value, (str, os.PathLike)) or Path(value).exists():
        return
    if _is_hub_name(value):
        return
    raise FileNotFoundError(
        f"{argument}: there is no folder {os.fspath(value)!r}; name the folder of a checkpoint, or "
        "a model of the hub as OWNER/NAME"
    )


def _is_hub_name(value: str | os.PathLike) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not isinstance(value, str):
        return False
    try:
        validate_repo_id(value)
    except HFValidationError:
        return False
    owner, _, name = value.partition("/")
    return not name or not Path(owner).is_dir()
