"""benchmarks/gpu/timings.py compares with the peers that are installed, by the same calls."""

import torch

from benchmarks.gpu import timings

HALF = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
STATE = torch.tensor([1, 2])


def rivals(cases) -> dict[str, set[str]]:
    others = {timings.OURS, timings.OURS_IN_CUDA, "torch"}
    return {name: set(functions) - others for name, functions, *_ in cases}


def test_attention_is_timed_against_those_that_can(flash_attn):
    found = rivals(timings._attention_cases(False, HALF, STATE))
    for way in ("forward", "backward"):
        every = {"flash_attn", "flash_attn_3", "flash_attn_4"}
        assert found[f"attention 2x9 dropout 0.0 {way}"] == every
        assert found[f"attention 2x9 dropout 0.1 {way}"] == {"flash_attn"}
    assert {call["softmax_scale"] for call in flash_attn} == {16**-0.5}
    assert {call.get("dropout_p", 0.0) for call in flash_attn} == {0.0, 0.1}


def test_norm_is_timed_against_apex(apex):
    found = rivals(timings._norm_cases(8, 32, HALF, STATE))
    assert found == {f"add_layer_norm 8x32 {way}": {"apex"} for way in ("forward", "backward")}
    assert len(apex) == 1


def test_nothing_is_timed_that_is_not_there():
    assert set().union(*rivals(timings._norm_cases(8, 32, HALF, STATE)).values()) == set()
