"""What a sentence-transformers folder holds besides its encoder, computed on packed rows.

`modules.json` names the modules in their order: Transformer, Pooling, then any of Dense, LayerNorm,
Normalize and Dropout (which does nothing in inference).

Letters: B texts, T packed rows, C hidden, M poolings, F the width of a vector.
"""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from fastbert.folders import check_checkpoint
from fastbert.ops.linear import linear

# The order in which the flags of an older configuration are put side by side.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLINGS = tuple(_FLAGS.values())
_VECTORS = "sentence_embedding"


# --- poolings -------------------------------------------------------------------------------------


def pool(
    rows: torch.Tensor, lengths: torch.Tensor, poolings: Sequence[str], *, skipped: int = 0
) -> torch.Tensor:
    """One vector of each text's rows; several poolings are put side by side.

    Of a text of n rows, m of them left out at its start: `mean` is the sum of the others over
    n - m, `mean_sqrt_len_tokens` over its root, `weightedmean` weights row i (from 1) by i, `max`
    is element by element, `cls` row m + 1, `lasttoken` row n (Reimers and Gurevych 2019, section 3,
    and sentence-transformers' Pooling). Each text's rows are added in their order, so a vector does
    not depend on what else is in the batch.

    Args:
        rows: `(T, C)` fp32, the texts end to end.
        lengths: `(B,)` int64 on the device of rows, each above `skipped`, T in all.
        poolings: M of POOLINGS.
        skipped: m, tokens of a prompt that are left out.

    Returns:
        `(B, M * C)` fp32.
    """
    firsts = lengths.cumsum(0) - lengths
    counts = lengths - skipped
    places = None
    if skipped or "weightedmean" in poolings:
        places = torch.arange(len(rows), device=rows.device) - firsts.repeat_interleave(lengths)
    kept = rows
    if skipped:
        kept = rows[places >= skipped]
        places = places[places >= skipped]

    def of(pooling: str) -> torch.Tensor:
        if pooling == "cls":
            return rows[firsts + skipped]
        if pooling == "lasttoken":
            return rows[firsts + lengths - 1]
        if pooling in ("mean", "max"):
            return torch.segment_reduce(kept, pooling, lengths=counts)
        if pooling == "mean_sqrt_len_tokens":
            sums = torch.segment_reduce(kept, "sum", lengths=counts)
            return sums / counts[:, None].to(sums.dtype).sqrt()
        weights = (places + 1).to(rows.dtype)
        sums = torch.segment_reduce(kept * weights[:, None], "sum", lengths=counts)
        return sums / torch.segment_reduce(weights, "sum", lengths=counts)[:, None]

    vectors = [of(pooling) for pooling in poolings]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=1)


# --- modules behind the pooling -------------------------------------------------------------------


class Dense(nn.Module):
    """activation(x Wᵀ + b), plus x or its projection where the folder asks for a residual."""

    def __init__(self, config: dict, weights: dict[str, torch.Tensor], activation: nn.Module):
        super().__init__()
        self.in_features, self.out_features = config["in_features"], config["out_features"]
        self.weight = nn.Parameter(weights["linear.weight"], requires_grad=False)
        bias = weights["linear.bias"] if config.get("bias", True) else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.activation = activation
        self.use_residual = config.get("use_residual", False)
        projection = weights.get("residual.weight")
        self.projection = (
            None if projection is None else nn.Parameter(projection, requires_grad=False)
        )

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """`(B, in_features)` to `(B, out_features)`, fp32."""
        # By fastbert's op, whose rows do not depend on each other.
        made = self.activation(linear(vectors, self.weight, self.bias))
        if not self.use_residual:
            return made
        return made + (vectors if self.projection is None else linear(vectors, self.projection))


class Normalize(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """`(B, F)` to `(B, F)`."""
        return functional.normalize(vectors, dim=-1)


# --- the folder -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentenceFolder:
    """What the folder of a sentence-transformers model says.

    Attributes:
        model: folder of the encoder.
        poolings: what makes a vector of a text's rows, side by side.
        include_prompt: whether a prompt's tokens are pooled.
        modules: what is computed behind the pooling, in order.
        max_seq_length: tokens of a text; None: what the tokenizer and the encoder allow.
        lowercase: whether texts are lowercased before the tokenizer.
        prompts, default_prompt: by name, and the name of the one that is used unasked.
    """

    model: Path
    poolings: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    modules: tuple[nn.Module, ...] = ()
    max_seq_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_folder(folder: Path) -> SentenceFolder:
    """Reads a sentence-transformers folder, or a plain transformers one (mean pooling).

    Raises:
        FileNotFoundError: no such folder, or a module without its weights.
        ValueError: a pooling that does not exist.
        NotImplementedError: a module, or a setting of one, that fastbert does not compute.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(folder)!r}; download the model and give its path"
        )
    if not (folder / "modules.json").is_file():
        check_checkpoint("folder", folder)
        return SentenceFolder(folder)
    found, behind = {"model": folder}, []
    for place, module in enumerate(json.loads((folder / "modules.json").read_text())):
        kind, path = _kind(module["type"]), folder / module["path"]
        if (kind == "Transformer") != (place == 0) or (kind == "Pooling") != (place == 1):
            kind = None
        if kind == "Transformer":
            found |= _read_transformer(path)
        elif kind == "Pooling":
            found |= _read_pooling(path / "config.json")
        elif kind in _READERS:
            behind += _READERS[kind](path)
        else:
            raise NotImplementedError(
                f"module {place} of {folder} is {module['type']}; fastbert.Embedder computes "
                f"sentence-transformers' Transformer, Pooling, then {', '.join(_READERS)}; use "
                "fastbert.accelerate on the SentenceTransformer instead"
            )
    prompts = _json(folder / "config_sentence_transformers.json")
    return SentenceFolder(
        **found,
        modules=tuple(behind),
        prompts=prompts.get("prompts") or {},
        default_prompt=prompts.get("default_prompt_name"),
    )


def _kind(name: str) -> str | None:
    """The class a module's type names, if it is sentence-transformers' own."""
    return name.rsplit(".", 1)[-1] if name.startswith("sentence_transformers.") else None


def _read_transformer(path: Path) -> dict:
    config = _json(path / "sentence_bert_config.json")
    return {
        "model": path,
        "max_seq_length": config.get("max_seq_length"),
        "lowercase": config.get("do_lower_case", False),
    }


def _read_pooling(path: Path) -> dict:
    config = _json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        mode = [name for flag, name in _FLAGS.items() if config.get(flag)] or "mean"
    poolings = (mode,) if isinstance(mode, str) else tuple(mode)
    check_poolings(f"the pooling of {path}", poolings)
    return {"poolings": poolings, "include_prompt": config.get("include_prompt", True)}


def check_poolings(name: str, poolings: Sequence[str]) -> None:
    """Raises ValueError unless there is at least one, and each is known."""
    if not poolings or not set(poolings) <= set(POOLINGS):
        raise ValueError(
            f"{name} must be one of {', '.join(POOLINGS)}, or several of them, got "
            f"{', '.join(map(str, poolings)) or 'none'}"
        )


def _read_dense(path: Path) -> list[nn.Module]:
    config = _json(path / "config.json")
    _check_names(path, config)
    return [Dense(config, _weights(path), _activation(path, config))]


def _activation(path: Path, config: dict) -> nn.Module:
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = getattr(nn, name.rsplit(".", 1)[-1], None) if name.startswith("torch.nn.") else None
    if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
        raise NotImplementedError(
            f"the activation_function of {path} is {name!r}, which is no module of torch.nn; use "
            "fastbert.accelerate on the SentenceTransformer instead"
        )
    return kind()


def _read_layer_norm(path: Path) -> list[nn.Module]:
    config, weights = _json(path / "config.json"), _weights(path)
    norm = nn.LayerNorm(config["dimension"])
    norm.load_state_dict({name.removeprefix("norm."): value for name, value in weights.items()})
    return [norm]


def _read_normalize(path: Path) -> list[nn.Module]:
    _check_names(path, _json(path / "config.json"))
    return [Normalize()]


_READERS = {
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
    "Dropout": lambda path: [],
}


def _check_names(path: Path, config: dict) -> None:
    """A module may read and write other features than the vectors; ours are the vectors alone."""
    for key in ("module_input_name", "module_output_name"):
        name = config.get(key) or _VECTORS
        if name != _VECTORS:
            raise NotImplementedError(
                f"{key} of {path} is {name!r}; fastbert.Embedder computes modules on {_VECTORS!r} "
                "alone; use fastbert.accelerate on the SentenceTransformer instead"
            )


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """fp32 tensors by name."""
    if (path / "model.safetensors").is_file():
        from safetensors.torch import load_file

        found = load_file(path / "model.safetensors")
    elif (path / "pytorch_model.bin").is_file():
        found = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise FileNotFoundError(
            f"{path} has neither model.safetensors nor pytorch_model.bin; copy the whole model"
        )
    return {name: value.float() for name, value in found.items()}


def _json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
