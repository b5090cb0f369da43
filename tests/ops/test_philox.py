"""The dropout stream in every backend against the frozen file and each other."""

import json
import math
from pathlib import Path

import pytest
import torch

from fastbert.dispatch import OPS, not_supported_reasons, use_backend
from fastbert.ops.philox import row_keep_mask, row_keep_mask_op, score_keep_mask, score_keep_mask_op
from fastbert.reference.philox import (
    SITE_EMBEDDING,
    dropout_scale,
    dropout_threshold,
    layer_site,
    philox4x32,
    row_keep_mask_reference,
    score_keep_mask_reference,
)
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran

OP = "philox"
GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden", "dropout_stream.json").read_text())
# Published with the generator, in Random123's file of known answers.
PUBLISHED = {
    ("zeros", 7): "5f6fb709 0d893f64 4f121f81 4f730a48",
    ("ones", 7): "5207ddc2 45165e59 4d8ee751 8c52f662",
    ("pi", 7): "4dfccaba 190a87f0 c47362ba b6b5242a",
    ("zeros", 10): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ("ones", 10): "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ("pi", 10): "d16cfe09 94fdcceb 5001e420 24126ea1",
}
RNG = torch.tensor([1234, 5])


def _bits(mask):
    text = "".join("1" if kept else "0" for kept in mask.flatten().tolist())
    return f"{int(text, 2):x}"


@pytest.mark.parametrize("entry", GOLDEN["philox"], ids=lambda e: f"{e['name']}-{e['rounds']}")
def test_philox_known_answers(entry):
    counter = tuple(torch.tensor(word) for word in entry["counter"])
    key = tuple(torch.tensor(word) for word in entry["key"])
    words = [f"{int(w):08x}" for w in philox4x32(counter, key, entry["rounds"])]
    assert words == entry["words"]
    assert " ".join(words) == PUBLISHED[entry["name"], entry["rounds"]]


@pytest.mark.parametrize("entry", GOLDEN["rows"], ids=lambda e: f"{e['state']}-{e['shape']}")
def test_philox_rows_are_frozen(backend, entry):
    with assert_ran("row_keep_mask", backend.name):
        mask = row_keep_mask_op(
            torch.tensor(entry["state"]), *entry["shape"], entry["threshold"], entry["site"]
        )
    assert _bits(mask) == entry["keep"]


@pytest.mark.parametrize("entry", GOLDEN["scores"], ids=lambda e: f"{e['state']}-{e['shape']}")
def test_philox_scores_are_frozen(backend, entry):
    with assert_ran("score_keep_mask", backend.name):
        mask = score_keep_mask_op(
            torch.tensor(entry["state"]),
            torch.tensor([entry["sequence"]]),
            *entry["shape"],
            entry["threshold"],
            entry["site"],
        )
    assert _bits(mask) == entry["keep"]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 8), (100, 9), (33, 768)], ids=str)
def test_philox_rows_match_reference(backend, shape):
    state = torch.randint(-(2**62), 2**62, (2,))
    for threshold in (0, 1, 6554, 65535, 65536):
        assert_bitwise_equal(
            row_keep_mask_op(state, *shape, threshold, 11),
            row_keep_mask_reference(state, *shape, threshold, 11),
            "row mask",
        )


@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (1, 16), (15, 17), (65, 130), (128, 128)], ids=str
)
def test_philox_scores_match_reference(backend, shape):
    state = torch.randint(-(2**62), 2**62, (2,))
    sequences = torch.tensor([4, 0, 1_000_000])
    for threshold in (0, 1, 6554, 65536):
        assert_bitwise_equal(
            score_keep_mask_op(state, sequences, 2, *shape, threshold, 16),
            score_keep_mask_reference(state, sequences, 2, *shape, threshold, 16),
            "score mask",
        )


def test_philox_in_chunks(monkeypatch):
    """The reference cuts long inputs into pieces; the stream does not notice."""
    from fastbert.reference import philox as module

    whole = row_keep_mask_reference(RNG, 40, 50, 20_000, 3)
    scores = score_keep_mask_reference(RNG, torch.arange(5), 3, 20, 30, 20_000, 0)
    monkeypatch.setattr(module, "CALLS_PER_CHUNK", 40)
    assert_bitwise_equal(row_keep_mask_reference(RNG, 40, 50, 20_000, 3), whole, "rows")
    assert_bitwise_equal(
        score_keep_mask_reference(RNG, torch.arange(5), 3, 20, 30, 20_000, 0), scores, "scores"
    )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_philox_keeps_the_stated_fraction(p):
    """Within five standard deviations of the binomial law, rows, scores and every column."""
    kept = 1 - dropout_threshold(p) / 65536
    state = torch.randint(-(2**62), 2**62, (2,))
    rows = row_keep_mask(state, 1000, 512, dropout_p=p, site=1)
    scores = score_keep_mask(state, torch.arange(20), 4, 96, 64, dropout_p=p, site=0)
    for mask in (rows, scores):
        spread = math.sqrt(kept * (1 - kept) / mask.numel())
        assert abs(mask.double().mean().item() - kept) < 5 * spread
    columns = rows.double().mean(0) - kept
    assert columns.abs().max() < 5.5 * math.sqrt(kept * (1 - kept) / rows.shape[0])


def test_philox_neighbours_are_independent():
    mask = row_keep_mask(RNG, 2000, 256, dropout_p=0.5, site=1).double() - 0.5
    bound = 5 * 0.25 / math.sqrt(mask[:, 1:].numel())
    for shifted, base in (
        (mask[:, 1:], mask[:, :-1]),
        (mask[1:], mask[:-1]),
        (mask[:, 8:], mask[:, :-8]),
    ):
        assert (shifted * base).mean().abs() < bound


def test_philox_sites_seeds_and_offsets_differ():
    base = row_keep_mask(RNG, 8, 64, dropout_p=0.5, site=1)
    for other in (
        row_keep_mask(RNG, 8, 64, dropout_p=0.5, site=2),
        row_keep_mask(RNG + torch.tensor([1, 0]), 8, 64, dropout_p=0.5, site=1),
        row_keep_mask(RNG + torch.tensor([2**32, 0]), 8, 64, dropout_p=0.5, site=1),
        row_keep_mask(RNG + torch.tensor([0, 1]), 8, 64, dropout_p=0.5, site=1),
    ):
        assert not torch.equal(base, other)
    wrapped = row_keep_mask(RNG + torch.tensor([0, 2**32]), 8, 64, dropout_p=0.5, site=1)
    assert_bitwise_equal(base, wrapped, "the offset word is the offset modulo 2^32")


def test_philox_thresholds_and_scales():
    assert [dropout_threshold(p) for p in (0.0, 0.1, 0.5, 1.0, 2**-18, 2**-17)] == [
        0,
        6554,
        32768,
        65536,
        0,
        1,
    ]
    assert dropout_scale(0) == 1.0
    assert dropout_scale(32768) == 2.0
    assert dropout_scale(65536) == 0.0
    assert dropout_scale(6554) == torch.tensor(65536 / 58982, dtype=torch.float32).item()
    for wrong in (-1e-9, 1.0000001, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="dropout_p"):
            dropout_threshold(wrong)


def test_philox_sites_do_not_collide():
    sites = [layer_site(layer, place) for layer in range(1000) for place in range(8)]
    assert len({*sites, SITE_EMBEDDING}) == len(sites) + 1
    assert layer_site(0, 1) == 1
    assert layer_site(11, 2) == 90


def test_philox_opcheck(backend):
    torch.library.opcheck(row_keep_mask_op, (RNG, 5, 9, 20_000, 1))
    torch.library.opcheck(score_keep_mask_op, (RNG, torch.arange(2), 2, 5, 9, 20_000, 1))


def test_philox_bad_input_raises(backend):
    with pytest.raises(ValueError, match="131072"):
        score_keep_mask(RNG, torch.arange(1), 1, 131_073, 1, dropout_p=0.1, site=0)
    with pytest.raises(ValueError, match="262144"):
        score_keep_mask(RNG, torch.arange(1), 1, 1, 262_145, dropout_p=0.1, site=0)
    with pytest.raises(ValueError, match="int64"):
        row_keep_mask(RNG.float(), 2, 2, dropout_p=0.1, site=0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        row_keep_mask(torch.zeros(3, dtype=torch.int64), 2, 2, dropout_p=0.1, site=0)


@pytest.mark.slow
def test_philox_int64_offsets():
    """More than 2^31 elements: the last rows, from calls whose number has a high word."""
    rows = 2**28 + 5
    with use_backend(philox="cpu" if "cpu" in _built() else "reference"):
        mask = row_keep_mask_op(RNG, rows, 8, 20_000, 3)
    calls = torch.arange(rows - 5, rows)
    words = philox4x32(
        (calls & 0xFFFFFFFF, calls >> 32, torch.tensor(3), RNG[1]), (RNG[0], RNG[0] >> 32)
    )
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], 1)
    assert_bitwise_equal(mask[-5:], halves >= 20_000, "last rows")


def _built():
    device = torch.device("cpu")
    return [b for b in ("cpu",) if not not_supported_reasons(OPS["row_keep_mask"], b, device, ())]
