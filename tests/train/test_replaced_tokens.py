"""Runs of replaced-token detection: they learn, survive a kill, and end as folders that
transformers loads."""

import signal
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from typer.testing import CliRunner

import fastbert
from fastbert.cli.main import app
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.killing import BATCHES, run_in_process, run_in_processes
from fastbert.testing.models import assert_packed
from fastbert.testing.runs import learned, run, weights
from fastbert.train.config import ConfigError, config_from
from fastbert.train.exporting import export
from fastbert.train.pretraining import Pretraining, pretrain
from fastbert.train.replaced_tokens import ReplacedTokenPretraining


@pytest.fixture
def settings(settings):
    """Of a discriminator with two heads and a generator with one, else as those of pretraining."""
    settings["objective"] = "replaced_tokens"
    settings["generator"] = {"size": 0.5, "num_hidden_layers": 1}
    settings["model"]["embedding_size"] = 16
    settings["data"]["masking"] = {"mask_share": 1.0, "random_share": 0.0}
    return settings


@pytest.mark.parametrize("embeddings", ["shared", "disentangled"])
def test_from_corpus_to_transformers(settings, embeddings, tmp_path):
    """The commands: falling losses, and the logits of the run."""
    settings["generator"]["embeddings"] = embeddings
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    with assert_packed("electra_model"):
        told = CliRunner().invoke(app, ["pretrain", str(path), "--optimizer.lr", "1e-2"])
    assert told.exit_code == 0, told.output
    assert "finished after 12 steps" in told.output and "found" in told.output
    records = [r for r in learned(settings["output"]) if r["loss"] is not None]
    for record in records:
        parts = record["mlm_loss"] + 50 * record["detection_loss"]
        assert record["loss"] == pytest.approx(parts, rel=1e-5)
    for name in ("mlm_loss", "detection_loss"):
        losses = [record[name] for record in records]
        assert sum(losses[-3:]) < 0.97 * sum(losses[:3]), name
    evaluations = [r for r in learned(settings["output"]) if r["heldout_loss"] is not None]
    assert len(evaluations) == 2 and all(0 <= r["heldout_recall"] <= 1 for r in evaluations)

    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["export", settings["output"], str(out)])
    assert told.exit_code == 0, told.output
    theirs = transformers.AutoModelForPreTraining.from_pretrained(out).eval()
    generator = transformers.AutoModelForMaskedLM.from_pretrained(out / "generator").eval()
    assert type(theirs) is transformers.ElectraForPreTraining
    assert (theirs.config.hidden_size, theirs.config.embedding_size) == (32, 16)
    assert (generator.config.hidden_size, generator.config.num_hidden_layers) == (16, 1)
    settings["optimizer"]["lr"] = 1e-2
    trained = ReplacedTokenPretraining(config_from(settings))
    trained.resume()
    assert trained.steps_done == 12
    for folder, model, expected in (
        (out, trained.model.discriminator, theirs),
        (out / "generator", trained.model.generator, generator),
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(["bal bem [MASK] dol"], return_tensors="pt")
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**inputs).logits, expected(**inputs).logits)


def test_killed_and_resumed(settings, tmp_path):
    """In a save, then between the batches of a step: bitwise, with dropout and samples."""
    whole = {**settings, "output": str(tmp_path / "whole")}
    assert run_in_process(run, whole) == 0
    for chosen in ({"kill_before": 10}, {"kill_before": 7, "operations": BATCHES}):
        assert run_in_process(run, settings, **chosen) == -signal.SIGKILL
    assert run_in_process(run, settings) == 0
    assert learned(settings["output"]) == learned(whole["output"])
    assert weights(settings["output"]) == weights(whole["output"])


@pytest.mark.slow
@pytest.mark.parametrize("embeddings", ["shared", "disentangled"])
def test_processes(settings, embeddings, tmp_path):
    """Weights whole or in parts in two processes: the same losses, in fp32 without dropout."""
    settings["model"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings["generator"]["embeddings"] = embeddings
    settings["phases"] = [{**settings["phases"][0], "steps": 4}]
    records = []
    for mode in ("ddp", "fsdp"):
        chosen = {**settings, "output": str(tmp_path / mode), "parallel": {"mode": mode}}
        assert run_in_processes(run, chosen, size=2) == [0, 0]
        records.append([r for r in learned(chosen["output"]) if r["loss"] is not None])
    assert len(records[0]) == len(records[1]) == 4
    for whole, parts in zip(*records, strict=True):
        for name in ("loss", "grad_norm", "mlm_loss", "detection_loss"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4), name


def test_average_is_exported(settings, tmp_path):
    """Under names that both models share."""
    settings["average_decay"] = 0.5
    settings["evaluation"]["average"] = True
    pretrain(config_from(settings))
    export(settings["output"], tmp_path / "out", average=True)
    trained = ReplacedTokenPretraining(config_from(settings))
    trained.resume()
    table = "generator.electra.embeddings.word_embeddings.weight"
    model = fastbert.ElectraForPreTraining.from_pretrained(tmp_path / "out")
    words = model.electra.embeddings.word_embeddings.weight
    assert_bitwise_equal(words.data, trained.average.state_dict()[table], table)


def test_share_of_the_device_and_bf16(settings):
    """In bf16 with activation checkpointing, and the share of `log.peak_tflops` is told."""
    settings |= {"precision": "bf16", "activation_checkpointing": True}
    settings["log"]["peak_tflops"] = 1.0
    settings["phases"] = settings["phases"][:1]
    summary = pretrain(config_from(settings))
    assert summary.finished and summary.skipped == 0
    lines = (Path(settings["output"]) / "metrics.jsonl").read_text()
    assert '"mfu"' in lines


def test_a_run_from_before_the_objectives_goes_on(settings):
    """Its config.yaml has none; the defaults are meant."""
    del settings["objective"], settings["generator"], settings["model"]["embedding_size"]
    Pretraining(config_from(settings)).run()
    path = Path(settings["output"]) / "config.yaml"
    old = yaml.safe_load(path.read_text())
    del old["objective"], old["generator"], old["model"]["embedding_size"]
    path.write_text(yaml.safe_dump(old))
    assert pretrain(config_from(settings)).steps == 12
    with pytest.raises(ConfigError, match="objective: masked_lm there, replaced_tokens now"):
        pretrain(config_from({**settings, "objective": "replaced_tokens"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": {"size": 0.0}}, r"generator.size must lie in \(0, 1\], got 0.0"),
        ({"generator": {"num_hidden_layers": 0}}, "generator.num_hidden_layers must be at least 1"),
        ({"generator": {"detection_weight": -1.0}}, "detection_weight must be 0 or more, got -1.0"),
        ({"generator": {"size": 0.9, "embeddings": "none"}}, "generator.embeddings"),
        ({"model": {"hidden_size": 50, "num_attention_heads": 5}}, "size 0.5 gives hidden_size 25"),
        ({"model": {"embedding_size": 0}}, "model.embedding_size must be at least 1, got 0"),
        ({"model": {"init_from": "somewhere"}}, "model.init_from cannot begin replaced_tokens"),
        ({"data": {"sequences": "next_sentence"}}, "which replaced_tokens leaves out; use packed"),
        ({"last_layer_subset": True}, "last_layer_subset leaves out tokens"),
        ({"objective": "masked_lm"}, "model.embedding_size belongs to objective replaced_tokens"),
        ({"objective": "masked_lm"}, "generator belongs to objective replaced_tokens"),
    ],
)
def test_settings_that_cannot_be(settings, changes, message):
    for section, values in changes.items():
        merged = {**settings.get(section, {}), **values} if isinstance(values, dict) else values
        settings[section] = merged
    with pytest.raises(ConfigError, match=message):
        ReplacedTokenPretraining(config_from(settings))


def test_distillation_has_no_objective(settings, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({k: settings[k] for k in ("output", "data", "objective")}))
    told = CliRunner().invoke(app, ["distill", str(path)])
    assert told.exit_code == 1 and "objective and generator are of fastbert pretrain" in told.output
