"""torch.export and ONNX: what leaves is transformers' own graph, for any mask and size.

torch.compile and torch.jit.trace are in tests/models/test_bert_compile.py.
"""

import pytest
import torch

from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import head_inputs, model_pair

NAME = "BertForSequenceClassification"
OTHER_SIZES = (9, 4, 6)
"""Lengths of a batch no exporter has seen."""


def _model_and_inputs():
    config = small_bert_config(num_hidden_layers=1, num_labels=3)
    ours, theirs = model_pair(NAME, config)

    def inputs(lengths, seed):
        found = head_inputs(NAME, padded_batch(lengths, 99, seed=seed), config)
        return {k: v for k, v in found.items() if k != "labels"}

    sizes = {k: {0: "batch", 1: "length"} for k in inputs((7, 3), 1)}
    return ours, theirs, inputs((7, 3), 1), inputs(OTHER_SIZES, 2), sizes


@pytest.mark.slow
def test_exported_program_is_saved_and_loaded(tmp_path):
    ours, theirs, inputs, others, _ = _model_and_inputs()
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2, max=32)
    program = torch.export.export(
        ours, (), inputs, dynamic_shapes={k: {0: batch, 1: length} for k in inputs}
    )
    assert not [n for n in program.graph.nodes if "fastbert" in str(n.target)]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (inputs, others):
        with torch.no_grad():
            actual, expected = loaded(**batch).logits, theirs(**batch).logits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    evaluator = pytest.importorskip("onnx.reference")
    ours, theirs, inputs, others, sizes = _model_and_inputs()
    path = tmp_path / "model.onnx"
    program = torch.onnx.export(
        ours, (), kwargs=inputs, dynamo=True, dynamic_shapes=sizes, verbose=False, optimize=False
    )
    program.save(str(path))
    session = evaluator.ReferenceEvaluator(str(path))
    for batch in (inputs, others):
        (logits, *_) = session.run(None, {k: v.numpy() for k, v in batch.items()})
        with torch.no_grad():
            expected = theirs(**batch).logits
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)
