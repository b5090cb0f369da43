"""DDP, ZeRO-1 and FSDP2: what runs fused, what is sent, and checkpoints of other processes."""

import json
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves

from fastbert.data import Corpus
from fastbert.testing.killing import (
    BATCHES,
    fill_disk,
    run_in_process,
    run_in_processes,
    somewhere,
)
from fastbert.testing.runs import learned, run, run_and_write_state, run_counted, weights
from fastbert.train.batches import BatchStream, Place
from fastbert.train.config import DataConfig, Phase

LAYERS = 2


@pytest.fixture
def settings(settings):
    """Six steps of one phase; two processes have two batches each in a step, four have one."""
    settings["phases"] = [
        {"steps": 6, "max_length": 24, "tokens_per_step": 1024, "tokens_per_batch": 256}
    ]
    settings["checkpoint"]["every"] = 3
    settings["schedule"]["warmup_steps"] = 1
    settings["evaluation"]["every"] = 100
    return settings


def _counts(settings, tmp_path, mode: str, batches: int) -> dict:
    settings["output"] = str(tmp_path / f"{mode}-{batches}")
    settings["parallel"] = {"mode": mode}
    settings["phases"][0] |= {"steps": 2, "tokens_per_step": 512 * batches}
    path = tmp_path / "counts.json"
    assert run_in_processes(run_counted, settings, str(path), size=2) == [0, 0]
    return json.loads(path.read_text())


def test_sharded_layers_are_fused_and_gradients_sent_once_a_step(settings, tmp_path):
    """Weights that are sharded between layers are whole in them: the ops called are DDP's. However
    many batches are accumulated, each module's gradient is sent once a step."""
    del settings["data"]["heldout"]
    counts = {
        (mode, batches): _counts(settings, tmp_path, mode, batches)
        for mode, batches in (("ddp", 1), ("ddp", 2), ("zero1", 2), ("fsdp", 2))
    }
    fused = counts["ddp", 2]["ops"]
    assert fused["bert_model packed"] == 2 * 2
    assert fused["attention_packed_qkv_bwd cpu"] == fused["gelu_mlp_bwd cpu"] == 2 * 2 * LAYERS
    assert counts["zero1", 2]["ops"] == counts["fsdp", 2]["ops"] == fused

    sent = {key: value["sent"] for key, value in counts.items()}
    assert sent["ddp", 1] == sent["ddp", 2]
    modules = LAYERS + 1
    for key in (("zero1", 2), ("fsdp", 2)):
        assert sent[key]["_reduce_scatter_base_"] == 2 * modules
    # Once a step; and for each pass, but for the model's own weights, which stay for the backward.
    assert sent["zero1", 2]["_allgather_base_"] == 2 * modules
    assert sent["fsdp", 2]["_allgather_base_"] == 2 * 2 * (modules + LAYERS)


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_recomputed_layers_change_nothing(settings, mode):
    """With dropout, to the bit."""
    settings["parallel"] = {"mode": mode}
    outcomes = []
    for again in (False, True):
        settings |= {
            "output": f"{settings['output']}-{again}",
            "activation_checkpointing": again,
        }
        assert run_in_processes(run, settings, size=2) == [0, 0]
        outcomes.append((learned(settings["output"]), weights(settings["output"])))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("mode", "precision", "optimizer"),
    [
        ("ddp", "fp32", "lamb"),
        ("fsdp", "bf16", "stable_adamw"),
        pytest.param("zero1", "fp16", "adamw", marks=pytest.mark.slow),
    ],
)
def test_gradients_in_bf16(settings, mode, precision, optimizer):
    """Close to those sent in fp32, and not the same."""
    settings["model"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings["optimizer"]["name"], settings["precision"] = optimizer, precision
    del settings["data"]["heldout"]
    losses = {}
    for dtype in ("fp32", "bf16"):
        settings["output"] = f"{settings['output']}-{dtype}"
        settings["parallel"] = {"mode": mode, "reduce_dtype": dtype}
        assert run_in_processes(run, settings, size=2) == [0, 0]
        losses[dtype] = [r["loss"] for r in learned(settings["output"])]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-3)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ddp", 2), ("ddp", 1)),
        (("fsdp", 2), ("fsdp", 1)),
        pytest.param(("ddp", 1), ("ddp", 2), marks=pytest.mark.slow),
        pytest.param(("fsdp", 2), ("fsdp", 4), marks=pytest.mark.slow),
        pytest.param(("zero1", 4), ("ddp", 2), marks=pytest.mark.slow),
        pytest.param(("ddp", 2), ("fsdp", 4), marks=pytest.mark.slow),
    ],
)
def test_other_processes_go_on(settings, tmp_path, first, second):
    """They read the last state, which was written in other parts, to the bit; and go on from the
    one before to the end."""
    settings["average_decay"] = 0.9
    settings["optimizer"]["name"] = "lamb"
    del settings["data"]["heldout"]
    records, states = [], []
    for (mode, number), go_on_from in ((first, None), (second, "step-3")):
        settings["parallel"] = {"mode": mode}
        path = tmp_path / f"state-{number}.pt"
        arguments = (settings, str(path), go_on_from)
        codes = run_in_processes(run_and_write_state, *arguments, size=number)
        assert codes == [0] * number
        states.append(tree_leaves(torch.load(path)))
        records.append(learned(settings["output"]))
    expected, ours = states
    assert len(ours) == len(expected) > 100
    assert all(map(_is_same, ours, expected))

    before, after = records
    assert len(before) == len(after) == 6
    assert after[:3] == before[:3]
    assert after[3:] != before[3:]
    assert [r["lr"] for r in after] == [r["lr"] for r in before]
    # Of the same epoch and behind the same sequences, so much the same.
    assert after[-1]["loss"] == pytest.approx(before[-1]["loss"], rel=0.02)


def _is_same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def _sequences(batch) -> list[tuple]:
    """The sequences of a batch, masks and labels included."""
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return [(*ids[a:b].tolist(), *labels[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


def test_other_processes_meet_the_rest_of_the_epoch(corpora):
    """Every sequence once, whichever processes meet it, with the masks it would have had."""
    from transformers import AutoTokenizer

    folder = corpora / "train"
    corpus, tokenizer = Corpus.open(folder), AutoTokenizer.from_pretrained(folder / "tokenizer")
    phase = Phase(steps=100, max_length=24, tokens_per_step=1024, tokens_per_batch=256)

    def epoch(place: Place, num_ranks: int, steps: int | None = None):
        """Sequences of the rest of the epoch, or of some steps, and the place behind them."""
        met = []
        for rank in range(num_ranks):
            stream = BatchStream(
                corpus,
                tokenizer,
                DataConfig(),
                phase,
                num_steps=100,
                seed=0,
                place=place,
                rank=rank,
                num_ranks=num_ranks,
            )
            for number, batch in enumerate(stream):
                is_behind = steps is not None and number == steps * stream.accumulation
                if batch.place.epoch > 0 or is_behind:
                    break
                met += _sequences(batch)
                last = batch.place
        return met, last

    whole, _ = epoch(Place(), 1)
    for before, after in ((2, 1), (1, 2), (2, 4)):
        begun, place = epoch(Place(), before, steps=2)
        assert place.sampler is not None
        rest, _ = epoch(place.among(after, before), after)
        # A shard's last sequences, fewer than the processes, are left out in any case.
        missing = len(corpus) * (max(before, after) - 1)
        assert len(set(begun) & set(rest)) == 0
        assert len(begun) + len(rest) >= len(whole) - missing
        assert not set(begun + rest) - set(whole)
        assert place.among(after, before).batches == 2 * 1024 // (256 * after)


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_killed_between_accumulated_batches(settings, mode):
    """One of two processes, in the second batch of the fifth step; then both again."""
    settings |= {"parallel": {"mode": mode}}
    outcomes = []
    for name in ("whole", "killed"):
        settings["output"] = f"{settings['output']}-{name}"
        if name == "killed":
            options = {"kill_before": 9, "operations": BATCHES}
            codes = run_in_processes(run, settings, size=2, rank1=options)
            assert codes[1] == -signal.SIGKILL and codes[0] != 0
        assert run_in_processes(run, settings, size=2) == [0, 0]
        outcomes.append((learned(settings["output"]), weights(settings["output"])))
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "optimizer"), [("ddp", "adamw"), ("fsdp", "lamb")])
def test_gradients_that_are_not_finite_change_nothing(settings, mode, optimizer):
    """An absurd rate: all processes skip the same steps, keep finite weights and stop."""
    settings |= {"parallel": {"mode": mode}, "max_skipped": 2}
    settings["optimizer"] |= {"name": optimizer, "lr": 1e30, "max_grad_norm": None}
    settings["schedule"]["warmup_steps"] = 0
    settings["checkpoint"]["every"] = 1
    assert run_in_processes(run, settings, size=2) == [1, 1]
    records = learned(settings["output"])
    assert [r["skipped"] for r in records][-2:] == [True, True]
    for rank in range(2):
        batches = list((Path(settings["output"]) / "nonfinite" / f"rank-{rank}").iterdir())
        assert len(batches) == 2
    tensors = safetensors.torch.load(weights(settings["output"]))
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.slow
def test_killed_before_processes_meet(settings):
    """The one left waits for the other, which held the store, until it is ended; then both."""
    settings |= {"parallel": {"mode": "ddp"}}
    codes = run_in_processes(run, settings, size=2, rank0={"kill_after": 0.0})
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert run_in_processes(run, settings, size=2) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_twenty_in_a_row(settings, mode):
    """One of two processes killed anywhere, then both again: always the same."""
    settings |= {"parallel": {"mode": mode}, "average_decay": 0.9}
    folder = settings["output"]
    settings["output"] = f"{folder}-whole"
    assert run_in_processes(run, settings, size=2) == [0, 0]
    expected = learned(settings["output"]), weights(settings["output"], average=True)
    killed = 0
    for attempt in range(20):
        settings["output"] = f"{folder}-{attempt}"
        options = {f"rank{attempt % 2}": somewhere(attempt)}
        if run_in_processes(run, settings, size=2, **options) != [0, 0]:
            killed += 1
            assert run_in_processes(run, settings, size=2) == [0, 0]
        outcome = learned(settings["output"]), weights(settings["output"], average=True)
        assert outcome == expected, attempt
    assert killed >= 6


def test_full_disk_stops_all_processes(settings):
    """None waits for the one that cannot write; the checkpoint before stays and is gone on from."""
    options = {"kill_before": 13, "fault": fill_disk}
    assert run_in_processes(run, settings, size=2, rank0=options) == [1, 1]
    folder = Path(settings["output"]) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-3"]
    assert run_in_processes(run, settings, size=2) == [0, 0]
    assert run_in_process(run, settings) == 0
