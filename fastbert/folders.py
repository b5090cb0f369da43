"""Folders of models and tokenizers, told from names on the hub before anything is looked up."""

import os
from pathlib import Path

# What a checkpoint has, and files any of which is it.
_TOKENIZER = "tokenizer (tokenizer.json, vocab.txt, ...)"
_CHECKPOINT = {
    "configuration (config.json)": ("config.json", "adapter_config.json"),
    "weights (model.safetensors)": ("*.safetensors", "*.bin"),
    _TOKENIZER: ("tokenizer*.json", "vocab*", "*.model"),
}


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


def check_checkpoint(
    argument: str, value, *, owner: str | None = None, tokenizer: bool = True
) -> None:
    """What a command begins with is a folder with a checkpoint in it, or a model of the hub.

    Of a folder without one transformers speaks of tokenizer libraries, and of a name that is none
    it asks a hub that cannot be reached for minutes.

    Args:
        argument, value: as of `check_folder`.
        owner: on the hub, of names without one, for a library that adds it.
        tokenizer: whether one is needed.

    Raises:
        FileNotFoundError: a folder that lacks something, a name that neither the cache nor the hub
            knows, or that the hub cannot be asked about.
    """
    check_folder(argument, value)
    folder = Path(value)
    if not folder.exists():
        _check_hub_names(argument, [value] if owner is None else [value, f"{owner}/{value}"])
        return
    # Modules of sentence-transformers may have folders of their own.
    if (folder / "modules.json").is_file():
        return
    missing = [
        what
        for what, names in _CHECKPOINT.items()
        if (tokenizer or what != _TOKENIZER) and not any(any(folder.glob(n)) for n in names)
    ]
    if not missing:
        return
    remedy = "name a folder that save_pretrained of a model and of its tokenizer wrote"
    if (folder / "config.yaml").is_file():
        remedy = f"`fastbert export {folder} FOLDER` writes the checkpoint of a run"
    raise FileNotFoundError(f"{argument}: {folder} holds no {' and no '.join(missing)}; {remedy}")


def _check_hub_names(argument: str, names: list[str]) -> None:
    """One of the names is in the cache, or the hub knows it; asked once, where from_pretrained
    asks again and again."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if any(isinstance(try_to_load_from_cache(name, "config.json"), str) for name in names):
        return
    for name in names:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
            return
        except RepositoryNotFoundError:
            why = "the hub has no model of that name (private ones need `hf auth login`)"
        except HfHubHTTPError:
            # It answered; from_pretrained tells what is amiss.
            return
        except OfflineModeIsEnabled:
            why = "the hub is not asked while HF_HUB_OFFLINE is set"
            break
        except Exception as error:  # the hub's client has changed what it raises here
            why = f"the hub cannot be reached ({error})"
            break
    raise FileNotFoundError(
        f"{argument}: there is no folder {names[0]!r}, it is not in the hub's cache, and {why}; "
        "name the folder of a checkpoint, or a model of the hub as OWNER/NAME"
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
