"""The files the sides of a comparison load, made once: models in each library's form, references.

FOLDER/encoder/       transformers' checkpoint, random weights from a fixed seed
FOLDER/fp32.onnx      sdpa attention, as ONNX Runtime's own optimizer fuses the rest
FOLDER/fused.onnx     eager attention, whose pattern that optimizer fuses too: faster at few
                      tokens, slower at many
FOLDER/int8.onnx, int8-fused.onnx  the same, dynamically quantised channel by channel
FOLDER/fp32.xml       OpenVINO's
FOLDER/int8.xml       weights and activations in int8 by NNCF
FOLDER/BATCH.pt       float64 hidden states of the real tokens
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn

from ..models.twins import padded
from ..shapes import SEED

# Batch and length while exporting and calibrating: neither is 1 nor equals a size of the model.
_EXAMPLE = ([23, 17, 9], 23)


def prepare(folder: Path, settings: dict, files: set[str], batches: list) -> None:
    """Makes what is missing."""
    if not (folder / "encoder").is_dir():
        torch.manual_seed(SEED)
        config = transformers.BertConfig(**settings)
        model = transformers.BertModel(config, add_pooling_layer=False)
        _appear(folder / "encoder", model.save_pretrained)
    for file in sorted(files):
        if not (folder / file).exists():
            print(f"making {folder.name}/{file}", flush=True)
            _MAKERS[file](folder, settings)
    for batch in batches:
        path = reference_path(folder, batch)
        if not path.exists():
            _appear(path, lambda new, batch=batch: torch.save(_reference(folder, batch), new))


def reference_path(folder: Path, batch: tuple[list[int], int]) -> Path:
    """Where the float64 states of a batch lie; it is named by its sizes."""
    lengths, longest = batch
    return folder / f"{len(lengths)}x{longest}-{sum(lengths)}.pt"


def _appear(path: Path, write: Callable[[Path], object]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"new-{os.getpid()}-{path.name}")
    write(new)
    new.rename(path)


def _encoder(folder: Path, attention: str = "sdpa") -> nn.Module:
    return transformers.BertModel.from_pretrained(
        folder / "encoder", attn_implementation=attention, add_pooling_layer=False
    ).eval()


def _reference(folder: Path, batch: tuple[list[int], int]) -> torch.Tensor:
    """`(T, C)` float64, each sequence alone, so that nothing is computed on padding."""
    model = _encoder(folder).double()
    ids = padded(batch, model.config.vocab_size)["input_ids"]
    with torch.no_grad():
        rows = [
            model(row[None, :length]).last_hidden_state[0]
            for row, length in zip(ids, batch[0], strict=True)
        ]
    return torch.cat(rows)


class _Rows(nn.Module):
    """The hidden states alone, as an exported graph returns them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _export(folder: Path, attention: str) -> Path:
    """ONNX as torch writes it, any batch and length."""
    path = folder / f"exported-{attention}.onnx"
    if path.exists():
        return path
    model = _encoder(folder, attention)
    inputs = padded(_EXAMPLE, model.config.vocab_size)
    names = [*inputs, "rows"]

    def write(new: Path) -> None:
        with warnings.catch_warnings(), torch.no_grad():
            # The exporter by tracing: ONNX Runtime's optimizer knows its patterns.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Rows(model),
                tuple(inputs.values()),
                str(new),
                input_names=names[:2],
                output_names=names[2:],
                dynamic_axes={name: {0: "batch", 1: "length"} for name in names},
                opset_version=17,
                dynamo=False,
            )

    _appear(path, write)
    return path


def _make_onnx(folder: Path, settings: dict, attention: str, path: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    if path.exists():
        return
    model = optimize_model(
        str(_export(folder, attention)),
        model_type="bert",
        num_heads=settings["num_attention_heads"],
        hidden_size=settings["hidden_size"],
    )
    _appear(path, lambda new: model.save_model_to_file(str(new)))


def _make_onnx_fp32(folder: Path, settings: dict) -> None:
    _make_onnx(folder, settings, "sdpa", folder / "fp32.onnx")


def _make_onnx_fused(folder: Path, settings: dict) -> None:
    _make_onnx(folder, settings, "eager", folder / "fused.onnx")


def _make_onnx_int8(folder: Path, settings: dict) -> None:
    _make_onnx_fp32(folder, settings)
    _quantise(folder / "fp32.onnx", folder / "int8.onnx")


def _make_onnx_int8_fused(folder: Path, settings: dict) -> None:
    _make_onnx_fused(folder, settings)
    _quantise(folder / "fused.onnx", folder / "int8-fused.onnx")


def _quantise(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    _appear(
        target,
        lambda new: quantize_dynamic(
            str(source),
            str(new),
            weight_type=QuantType.QInt8,
            per_channel=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        ),
    )


def _make_openvino_fp32(folder: Path, settings: dict) -> None:
    import openvino

    model = openvino.Core().read_model(_export(folder, "sdpa"))
    _save_openvino(model, folder / "fp32.xml")


def _make_openvino_int8(folder: Path, settings: dict) -> None:
    import nncf
    import openvino

    model = openvino.Core().read_model(_export(folder, "sdpa"))
    example = {k: v.numpy() for k, v in padded(_EXAMPLE, settings["vocab_size"]).items()}
    quantised = nncf.quantize(
        model, nncf.Dataset([example]), model_type=nncf.ModelType.TRANSFORMER, subset_size=1
    )
    _save_openvino(quantised, folder / "int8.xml")


def _save_openvino(model, path: Path) -> None:
    """The weights lie beside it under the same stem, so they come first."""
    import openvino

    new = path.with_stem(f"new-{os.getpid()}-{path.stem}")
    openvino.save_model(model, new, compress_to_fp16=False)
    new.with_suffix(".bin").rename(path.with_suffix(".bin"))
    new.rename(path)


_MAKERS = {
    "fp32.onnx": _make_onnx_fp32,
    "fused.onnx": _make_onnx_fused,
    "int8.onnx": _make_onnx_int8,
    "int8-fused.onnx": _make_onnx_int8_fused,
    "fp32.xml": _make_openvino_fp32,
    "int8.xml": _make_openvino_int8,
}
