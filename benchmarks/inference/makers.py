"""One function a side: loads the model and gives `prepare(inputs) -> call`, and `call()` is timed.

`inputs` are input_ids and attention_mask `(B, S)`; a call gives hidden states `(B, S, C)`, or None
where there is nothing to compare. Each runs in a process of its own, so settings are global.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from fastbert.models.bert import BertModel
from fastbert.models.quantize import quantize

from .cases import matrices, weight_elements

Call = Callable[[], object]
Prepare = Callable[[dict], Call]


def transformers_model(folder: Path, settings: dict, *, attention: str, dtype: str) -> Prepare:
    """transformers' own model in its dtype."""
    model = transformers.BertModel.from_pretrained(
        folder / "encoder",
        attn_implementation=attention,
        dtype=getattr(torch, dtype),
        add_pooling_layer=False,
    ).eval()
    return _of_model(model)


def compiled(folder: Path, settings: dict, *, freezing: bool, dtype: str) -> Prepare:
    """torch.compile of transformers' sdpa model for each shape; frozen: weights are constants."""
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.freezing = freezing
    torch._dynamo.config.recompile_limit = 64
    model = transformers.BertModel.from_pretrained(
        folder / "encoder", dtype=getattr(torch, dtype), add_pooling_layer=False
    ).eval()
    return _of_model(torch.compile(model, dynamic=False))


def fastbert_model(
    folder: Path, settings: dict, *, dtype: str, precision: str, quantized: str | None
) -> Prepare:
    """fastbert's model; fp32 products at the precision named, or layers in int8."""
    torch.set_float32_matmul_precision(precision)
    model = BertModel.from_pretrained(
        folder / "encoder", dtype=getattr(torch, dtype), add_pooling_layer=False
    ).eval()
    return _of_model(model if quantized is None else quantize(model, quantized))


def _of_model(model) -> Prepare:
    def prepare(inputs: dict) -> Call:
        def call():
            with torch.no_grad():
                return model(**inputs).last_hidden_state

        return call

    return prepare


def onnxruntime_model(folder: Path, settings: dict, *, file: str) -> Prepare:
    """ONNX Runtime on as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # A waiting thread that spins would take the core of whoever is timed next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        str(folder / file), options, providers=["CPUExecutionProvider"]
    )

    def prepare(inputs: dict) -> Call:
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return lambda: session.run(None, arrays)[0]

    return prepare


def openvino_model(folder: Path, settings: dict, *, precision: str, file: str) -> Prepare:
    """OpenVINO for latency, any shape, on as many threads as torch uses."""
    import openvino

    model = openvino.Core().compile_model(
        str(folder / file),
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        },
    )
    request = model.create_infer_request()

    def prepare(inputs: dict) -> Call:
        arrays = {name: value.numpy() for name, value in inputs.items()}
        return lambda: request.infer(arrays, share_inputs=True, share_outputs=True)[0]

    return prepare


def floor(folder: Path, settings: dict, *, dtype: str) -> Prepare:
    """The bare products of the real tokens, by oneDNN's linear on weights that it has reordered."""
    kind = getattr(torch, dtype)

    def prepare(inputs: dict) -> Call:
        rows = int(inputs["attention_mask"].sum())
        products = []
        for inner, columns in matrices(settings):
            x = torch.randn(rows, inner).to(kind)
            # A copy for every layer: in a model no weight is in cache from the layer before.
            weights = [
                torch.ops.mkldnn._reorder_linear_weight(torch.randn(columns, inner).to(kind), rows)
                for _ in range(settings["num_hidden_layers"])
            ]
            products.append((x, weights))

        def call():
            with torch.no_grad():
                for layer in range(settings["num_hidden_layers"]):
                    for x, weights in products:
                        torch.ops.mkldnn._linear_pointwise(x, weights[layer], None, "none", [], "")

        return call

    return prepare


def streaming(folder: Path, settings: dict, *, dtype: str) -> Prepare:
    """Reading as many bytes as the layers' matrices have, once."""
    size = weight_elements(settings) * getattr(torch, dtype).itemsize
    memory = torch.ones(size // 4)

    def prepare(inputs: dict) -> Call:
        def call():
            memory.sum()

        return call

    return prepare
