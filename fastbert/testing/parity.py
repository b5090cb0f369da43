"""A whole model against transformers' on the same weights, by the protocol of `compare`."""

import copy
from collections.abc import Iterable, Mapping

import torch

from fastbert import dispatch
from fastbert.testing.compare import assert_close_to_oracle, compare_gradients
from fastbert.testing.models import assert_packed, gradients


def check_parity(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    inputs: Mapping[str, object],
    *,
    counter: str = "bert_model",
    ops: Iterable[str] = (),
    packed: bool = True,
    autocast: torch.dtype | None = None,
) -> None:
    """Fails unless every output at real positions, the loss and every gradient are as close to
    transformers in float64 as the rule of two demands, and the path it names ran.

    Args:
        ours, theirs: models with the same weights, in the same mode.
        inputs: keyword arguments of both; with an attention_mask.
        counter: what our model's forwards are counted under.
        ops: ops that must have run on the packed rows.
        packed: whether packed rows are expected, or transformers' own forward.
        autocast: runs both under autocast to this.
    """
    mask = inputs["attention_mask"].view(-1, inputs["attention_mask"].shape[-1])
    oracle_model = copy.deepcopy(theirs).double()
    before = dispatch.counters()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        if packed:
            with assert_packed(counter):
                actual = ours(**inputs)
        else:
            actual = ours(**inputs)
            assert (dispatch.counters() - before)[counter, "padded"] == 1
        same = theirs(**inputs)
    ran = {op for op, _ in dispatch.counters() - before}
    if packed and set(ops) - ran:
        raise AssertionError(f"{sorted(set(ops) - ran)} did not run, but {sorted(ran)}")
    oracle = oracle_model(**inputs)
    expected, plain = _fields(oracle, mask), _fields(same, mask)
    found = _fields(actual, mask)
    assert expected.keys() == found.keys()
    for name, value in found.items():
        # Our loss is fp32 inside a narrower model too.
        value = value.to(plain[name].dtype) if name == "loss" else value
        assert_close_to_oracle(
            value, expected[name], plain[name], name, op="model", compute_dtype=autocast
        )
    if actual.get("loss") is None:
        return
    for outputs in (actual, same, oracle):
        outputs.loss.backward()
    compare_gradients(
        gradients(ours),
        gradients(oracle_model),
        gradients(theirs),
        op="model",
        compute_dtype=autocast,
    )


def _fields(outputs, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named float outputs at real positions (everything, where an output has no positions)."""
    named = {}
    for key, value in outputs.items():
        if torch.is_tensor(value):
            per_token = value.dim() > 1 and value.shape[:2] == mask.shape
            named[key] = value[mask != 0] if per_token else value
    return named
