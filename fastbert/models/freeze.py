"""`freeze(model)`: packed weights in the place of the originals, for serving on a CPU."""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fastbert.cache import CachesWeights, DroppedWeight, FrozenWeights
from fastbert.encoder_inference import linears_of, plain_parameters
from fastbert.models.freed_memory import give_back, place_of
from fastbert.models.layers import PostNormLayer
from fastbert.models.packed_model import PackedModel
from fastbert.models.post_norm import PostNormModel
from fastbert.ops.encoder import pack_layers

Pack = Callable[[Sequence[torch.Tensor], torch.dtype], list[torch.Tensor]]

replacing = threading.Lock()
"""Held while weights are replaced: of two threads that pack a layer one would find them gone."""


def freeze(model: nn.Module) -> nn.Module:
    """Drops the weights of every fastbert encoder inside `model` once they are packed, in place.

    Without it a model in use holds its parameters and a packed copy of the layers' weights; a
    frozen one holds the packed copy, and the parameters that no matmul of a layer reads
    (embeddings, biases, norms, pooler, head). Its forward gives the same bits, without looking
    whether weights changed: only rows with infinities or magnitudes beyond 2^60 meet, under
    `torch.set_float32_matmul_precision("high")`, weights of 16 bits.

    A frozen model is for inference by the C++ kernels, in the dtype and under the instruction set
    and float32 matmul precision it was frozen with. What needs the weights raises
    NotImplementedError: `train()`, `state_dict()` and saving, loading, pickling, a change of dtype
    or device, an optimizer over them, forwards that call the layers (hidden states, attentions,
    autocast, hooks, torch.compile). The encoder's parameters need no gradient any more, and its
    outputs carry none, so that torch refuses a backward through it alone ("does not require grad");
    embeddings can be resized, and copies by `copy.deepcopy` share the packed weights.
    `num_parameters()` counts the model's weights as before, `get_memory_footprint()` the bytes that
    are held now.

    Threads may freeze a model at once, which is then done once; a forward meanwhile may be refused.

    Args:
        model: in eval mode, on a CPU: a model or head of fastbert with post-norm layers (BERT,
            RoBERTa, XLM-R, CamemBERT, ELECTRA, DistilBERT, ALBERT), or anything that holds one (a
            SentenceTransformer).

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: it holds no model of fastbert, or one that the C++ kernels cannot run as a
            whole, as they cannot run DeBERTa and ModernBERT; the message says why. Nothing was
            changed then.
    """
    with replacing:
        replace_weights(model, encoders_of("freeze", model), pack_layers)
    return model


def encoders_of(name: str, model: nn.Module) -> list[PostNormModel]:
    """The models of fastbert inside `model`, where one op runs all layers of each.

    Raises:
        TypeError, ValueError: as `freeze` does, in the name of the function `name`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: model must be a torch.nn.Module, got {type(model).__name__}")
    encoders = [m for m in model.modules() if isinstance(m, PackedModel)]
    if not encoders:
        raise ValueError(
            f"{name}: {type(model).__name__} holds no model of fastbert; call "
            "fastbert.accelerate(model) before"
        )
    for encoder in encoders:
        reason = _why_not(encoder)
        if reason is not None:
            raise ValueError(
                f"{name}: {type(encoder).__name__} cannot run as a whole on the CPU: {reason}; "
                "change that, or use the model as it is"
            )
    return encoders


def replace_weights(model: nn.Module, encoders: Sequence[PostNormModel], pack: Pack) -> None:
    """Drops the weights of the encoders' layers for what `pack` makes of a layer's, once for each
    layer that still has them."""
    places = [place for encoder in encoders for place in _drop_weights(encoder, pack)]
    for module in model.modules():
        holds_one = isinstance(module, CachesWeights) and any(
            m in encoders for m in module.modules()
        )
        if holds_one and module.weight_cache.frozen is None:
            module.weight_cache.frozen = FrozenWeights()
    give_back(places)


def _why_not(encoder: PackedModel) -> str | None:
    if not isinstance(encoder, PostNormModel):
        return "no op runs all of its layers (one does for BERT, RoBERTa and their kin)"
    if any(module.training for module in encoder.modules()):
        return "it is in training mode; call eval() before"
    reason = encoder.why_container_not_packed() or encoder.why_layers_are_called()
    if reason is not None:
        return reason
    caches = [layer.weight_cache for layer in encoder.packed_layers()]
    return plain_parameters(encoder.specs(), caches, _rows_like(encoder))[1]


def _rows_like(encoder: PostNormModel) -> torch.Tensor:
    """No rows, of what the layers get."""
    size = (0, encoder.config.hidden_size)
    return torch.empty(size, dtype=encoder.dtype, device=encoder.device)


def _drop_weights(encoder: PostNormModel, pack: Pack) -> list[tuple[int, int]]:
    """Layer by layer, so that no more than one layer's weights exist twice; says where they
    were."""
    places = []
    # What was prepared holds weights, and what they were packed into.
    encoder.weight_cache.clear()
    for layer in dict.fromkeys(encoder.packed_layers()):
        if layer.weight_cache.frozen is None:
            places += _drop_weights_of(layer, encoder.dtype, pack)
    encoder.requires_grad_(False)
    return places


def _drop_weights_of(layer: PostNormLayer, dtype: torch.dtype, pack: Pack) -> list[tuple[int, int]]:
    linears = linears_of(layer.spec(0))
    layer.weight_cache.clear()
    # Else what the cache held would stay, and be taken for a smaller copy.
    torch.ops.fastbert.empty_pool()
    packed = pack([linear.weight for linear in linears], dtype)
    places = [place_of(linear.weight) for linear in linears]
    for linear in linears:
        shape = torch.empty_like(linear.weight, device="meta")
        linear.weight = DroppedWeight(shape, requires_grad=False)
    dropped = tuple(linear.weight for linear in linears)
    layer.weight_cache.frozen = FrozenWeights(tuple(packed), dropped)
    return places
