"""The model of scaling: its page is what it prints, and its parts add up."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from fastbert.train.building import training_flops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scaling():
    folder = str(ROOT / "benchmarks" / "gpu")
    spec = importlib.util.spec_from_file_location("scaling", f"{folder}/scaling.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    try:
        # Dataclasses look their module up.
        sys.modules["scaling"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        del sys.modules["scaling"]
    return module


def _bert_large():
    return transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )


def test_page_is_what_the_script_prints(scaling):
    assert (ROOT / "docs" / "scaling.md").read_text() == scaling.page() + "\n"


def test_parameters_are_those_of_the_model(scaling):
    with torch.device("meta"):
        model = transformers.BertForPreTraining(_bert_large())
    assert sum(p.numel() for p in model.parameters()) == scaling.P


def test_compute_is_at_least_that_of_the_operations(scaling):
    """At the share of the roof that is assumed; half as much again is memory and recomputation."""
    lengths = np.full(32, 512)
    flops = training_flops(_bert_large(), lengths, round(0.15 * lengths.sum()))
    least = flops / scaling.FLOPS_A_SECOND / scaling.REACHED
    one = scaling.compute(int(lengths.sum()))
    assert least <= one.forward + one.backward <= 1.5 * least


def test_a_collective_moves_its_bytes(scaling):
    """Seven eighths of them within a machine, an eighth across: never less than bandwidth takes."""
    size = 1e9
    assert scaling.scatter(size, 1) == 0
    assert scaling.scatter(size, 8) == pytest.approx(size * 7 / 8 / scaling.WITHIN, rel=0.01)
    across = scaling.scatter(size, 1024) - scaling.scatter(size, 8)
    assert across == pytest.approx(size / 8 * 127 / 128 / scaling.ACROSS, rel=0.05)


@pytest.mark.parametrize("n", [2, 8, 64, 1024])
def test_more_to_exchange_takes_no_less(scaling, n):
    tokens = 512 * n
    fp32, bf16 = scaling.ddp(tokens, n, 4), scaling.ddp(tokens, n, 2)
    one = scaling.compute(512)
    assert fp32 > bf16 > one.forward + one.backward
    assert scaling.zero1(tokens, n) > one.forward + one.backward
    assert scaling.fsdp2(tokens, n) > one.forward + one.backward
