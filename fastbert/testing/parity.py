"""A whole model against transformers' on the same weights, by the protocol of `compare`."""

import contextlib
import copy
from collections.abc import Iterable, Mapping

import torch

from fastbert import dispatch
from fastbert.testing.compare import assert_close_to_oracle, compare_gradients
from fastbert.testing.counters import assert_ran
from fastbert.testing.dropout import stream_attention_dropout
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
        ops: ops that must have run on the packed rows, each by one backend.
        packed: whether packed rows are expected, or transformers' own forward.
        autocast: runs both under autocast to this.
    """
    mask = inputs["attention_mask"].view(-1, inputs["attention_mask"].shape[-1])
    oracle_model = copy.deepcopy(theirs).double()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        with contextlib.ExitStack() as assertions:
            if packed:
                for context in (assert_packed(counter), *map(assert_ran, ops)):
                    assertions.enter_context(context)
            before = dispatch.counters()
            actual = ours(**inputs)
            if not packed:
                assert (dispatch.counters() - before)[counter, "padded"] == 1
        same = theirs(**inputs)
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


def check_dropout_parity(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    inputs: Mapping[str, object],
    rng_state: torch.Tensor,
    *,
    counter: str = "bert_model",
) -> None:
    """Fails unless loss and every gradient are transformers' under the masks of our stream.

    Args:
        ours: a model with dropout, in training. theirs: transformers' with the same weights, and
            `StreamDropout`s in place of its dropouts but those of attention probabilities.
        inputs: keyword arguments of both, of a batch without padding; with labels.
        rng_state: `(2,)` int64, of the stream.
        counter: what our model's forwards are counted under.
    """
    with assert_packed(counter):
        mine = ours(**inputs, rng_state=rng_state)
    with stream_attention_dropout(rng_state, theirs.config.num_hidden_layers):
        expected = theirs(**inputs)
    torch.testing.assert_close(mine.loss, expected.loss, rtol=1e-5, atol=1e-5)
    mine.loss.backward()
    expected.loss.backward()
    oracle = {name: gradient.double() for name, gradient in gradients(theirs).items()}
    compare_gradients(gradients(ours), oracle, gradients(theirs), op="model")


def _fields(outputs, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named float outputs at real positions (everything, where an output has no positions)."""
    named = {}
    for key, value in outputs.items():
        if torch.is_tensor(value):
            per_token = value.dim() > 1 and value.shape[:2] == mask.shape
            named[key] = value[mask != 0] if per_token else value
    return named
