"""`quantize(model)`: int8 in the place of the layers' weights, for serving on a CPU."""

import functools

import torch
from torch import nn

from fastbert.encoder_inference import linears_of
from fastbert.models.freeze import encoders_of, replace_weights, replacing
from fastbert.models.layers import PostNormLayer
from fastbert.models.post_norm import PostNormModel
from fastbert.ops.encoder import quantize_layers
from fastbert.ops.linear import check_quantization


def quantize(model: nn.Module, mode: str) -> nn.Module:
    """Replaces the layers' weights of every fastbert encoder inside `model` by int8, in place.

    Embeddings, biases, norms, pooler and head stay as they are, and attention is computed in the
    model's dtype.

    - `dynamic`: the input of each Linear is quantised as it is read, by a unit of each token's, and
      so are its weights, by a unit of each output's; a token's two largest elements are multiplied
      as they are. The fastest, on machines with int8 products (AMX, AVX512_VNNI).
    - `weight_only`: the weights alone, by a unit for each 64 of an output's; the products are
      bf16's (fp32's where the machine has none), whatever the model's dtype. The more precise, for
      its memory: a quarter of fp32 weights.

    Either way a sentence's outputs are the same bits alone and in any batch.
    `fastbert.reference.quantized_linear` has the arithmetic.

    A quantised model is for inference only and refuses what a frozen one does (`fastbert.freeze`,
    whose rules hold here, but for the float32 matmul precision and the instruction set, which may
    change). There is nothing to save: quantise again after loading, which takes a second.

    Args:
        model: as for `freeze`, and not frozen or quantised before.
        mode: `weight_only` or `dynamic`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: unknown mode, a model that `freeze` would refuse, one whose weights are gone
            already, or weights that are no numbers. Nothing was changed then.
    """
    check_quantization("quantize", mode)
    with replacing:
        encoders = encoders_of("quantize", model)
        for encoder in encoders:
            for layer in encoder.packed_layers():
                _check_layer(encoder, layer)
        replace_weights(model, encoders, functools.partial(_quantized, mode=mode))
    return model


def _check_layer(encoder: PostNormModel, layer: PostNormLayer) -> None:
    if layer.weight_cache.frozen is not None:
        raise ValueError(
            f"quantize: {type(encoder).__name__} is frozen or quantised already, its weights are "
            "gone; load the model again"
        )
    spec = layer.spec(0)
    if not all(bool(linear.weight.detach().isfinite().all()) for linear in linears_of(spec)):
        raise ValueError(
            f"quantize: {type(encoder).__name__} has weights that are infinite or NaN, which no "
            "scale holds; mend the checkpoint"
        )


def _quantized(weights: list[torch.Tensor], dtype: torch.dtype, *, mode: str) -> list[torch.Tensor]:
    return quantize_layers(weights, mode)
