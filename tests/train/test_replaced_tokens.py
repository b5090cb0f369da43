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
from fastbert.models.replaced_tokens import ReplacedTokensModel
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.inputs import small_config
from fastbert.testing.killing import BATCHES, run_in_process, run_in_processes
from fastbert.testing.models import assert_packed
from fastbert.testing.runs import learned, run, weights
from fastbert.train.config import ConfigError, config_from
from fastbert.train.exporting import export
from fastbert.train.pretraining import Pretraining, pretrain
from fastbert.train.replaced_tokens import ReplacedTokenPretraining

COUNTERS = {
    "electra": "electra_model",
    "deberta-v2": "deberta_v2_model",
    "deberta": "deberta_model",
}


@pytest.fixture
def settings(settings):
    """Of a discriminator with two heads and a generator with one, else as those of pretraining."""
    settings["objective"] = "replaced_tokens"
    settings["generator"] = {"size": 0.5, "num_hidden_layers": 1}
    settings["model"]["embedding_size"] = 16
    settings["data"]["masking"] = {"mask_share": 1.0, "random_share": 0.0}
    return settings


@pytest.mark.parametrize(
    ("family", "embeddings"),
    [
        ("electra", "shared"),
        ("electra", "disentangled"),
        ("deberta-v2", "shared"),
        ("deberta-v2", "disentangled"),
        ("deberta", "separate"),
    ],
)
def test_from_corpus_to_transformers(settings, family, embeddings, tmp_path):
    """The commands: falling losses, and the logits of the run."""
    settings["generator"]["embeddings"] = embeddings
    settings["model"]["family"] = family
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    with assert_packed(COUNTERS[family]):
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
    generator = transformers.AutoModelForMaskedLM.from_pretrained(out / "generator").eval()
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.hidden_size, config.embedding_size) == (32, 16)
    assert (generator.config.hidden_size, generator.config.num_hidden_layers) == (16, 1)
    assert generator.config.architectures == [type(generator).__name__]
    if family == "electra":
        theirs = transformers.AutoModelForPreTraining.from_pretrained(out).eval()
        assert type(theirs) is transformers.ElectraForPreTraining
    else:
        # transformers has the model alone, and knows no mask decoder.
        theirs = transformers.AutoModel.from_pretrained(out).eval()
        prefix = "DebertaV2" if family == "deberta-v2" else "Deberta"
        assert type(theirs) is getattr(transformers, f"{prefix}Model")
        enhanced = getattr(fastbert, f"{prefix}ForEnhancedMaskedLM")
        generator = enhanced.from_pretrained(out / "generator").eval()
    settings["optimizer"]["lr"] = 1e-2
    trained = ReplacedTokenPretraining(config_from(settings))
    trained.resume()
    assert trained.steps_done == 12
    ours = trained.model.discriminator
    for folder, model, expected in (
        (out, ours if family == "electra" else ours.base_model, theirs),
        (out / "generator", trained.model.generator, generator),
    ):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(["bal bem [MASK] dol"], return_tensors="pt")
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**inputs)[0], expected(**inputs)[0])
    again = type(ours).from_pretrained(out).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, again(**inputs).logits)


@pytest.mark.parametrize("family", ["electra", "deberta-v2"])
def test_killed_and_resumed(settings, family, tmp_path):
    """In a save, then between the batches of a step: bitwise, with dropout and samples."""
    settings["model"]["family"] = family
    settings["generator"]["embeddings"] = "shared" if family == "electra" else "disentangled"
    whole = {**settings, "output": str(tmp_path / "whole")}
    assert run_in_process(run, whole) == 0
    for chosen in ({"kill_before": 10}, {"kill_before": 7, "operations": BATCHES}):
        assert run_in_process(run, settings, **chosen) == -signal.SIGKILL
    assert run_in_process(run, settings) == 0
    assert learned(settings["output"]) == learned(whole["output"])
    assert weights(settings["output"]) == weights(whole["output"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["electra", "deberta-v2"])
@pytest.mark.parametrize("embeddings", ["shared", "disentangled"])
def test_processes(settings, embeddings, family, tmp_path):
    """Weights whole or in parts in two processes: the same losses, in fp32 without dropout."""
    settings["model"]["family"] = family
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


@pytest.mark.parametrize("family", ["electra", "deberta-v2"])
def test_share_of_the_device_and_bf16(settings, family):
    """In bf16 with activation checkpointing, and the share of `log.peak_tflops` is told."""
    settings["model"]["family"] = family
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
    del old["objective"], old["generator"], old["model"]["embedding_size"], old["model"]["family"]
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
        ({"model": {"init_from": "some/where/"}}, "model.init_from: there is no folder 'some/wh"),
        (
            {"generator": {"init_from": "some/where/"}},
            "generator.size is decided by generator.init",
        ),
        ({"generator": {"init_from": "some/where/"}}, "generator.init_from: there is no folder"),
        ({"model": {"family": "bert"}}, "model.family: Input should be 'electra', 'deberta-v2' or"),
        ({"model": {"position_buckets": 8}}, "position_buckets belongs to model.family deberta-v2"),
        (
            {"model": {"family": "deberta-v2", "position_buckets": 93}},
            "position_buckets must lie in 2 to 92 beside model.max_position_embeddings 48, got 93",
        ),
        (
            {"model": {"init_from": "x", "position_buckets": 8}},
            "model.position_buckets is decided by model.init_from",
        ),
        (
            {"model": {"family": "electra"}, "generator": {"enhanced_mask_decoder": True}},
            "generator.enhanced_mask_decoder is DeBERTa's; drop it or model.family",
        ),
        (
            {"generator": {"enhanced_mask_decoder": True}},
            "enhanced_mask_decoder is DeBERTa's, electra has none; leave it out",
        ),
        (
            {"objective": "masked_lm", "model": {"family": "deberta-v2"}},
            "model.family belongs to objective replaced_tokens; drop it",
        ),
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


# --- from checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def exported(settings, tmp_path):
    """A function that trains a pair for a step and gives the folder with both models."""

    def make(name: str, **model) -> Path:
        chosen = {
            **settings,
            "output": str(tmp_path / f"run {name}"),
            "model": {**settings["model"], **model},
            "phases": [{**settings["phases"][0], "steps": 1}],
            "schedule": {"warmup_steps": 0},
            "evaluation": {"every": 10},
        }
        pretrain(config_from(chosen))
        export(chosen["output"], tmp_path / name)
        return tmp_path / name

    return make


def _begun(settings, **changes) -> ReplacedTokensModel:
    """The pair that a run with these settings begins with."""
    merged = {k: {**settings[k], **v} for k, v in changes.items()}
    return ReplacedTokenPretraining(config_from({**settings, **merged})).model


@pytest.mark.parametrize("family", ["electra", "deberta-v2", "deberta"])
def test_a_run_begins_with_checkpoints(settings, exported, family):
    """Of both models, or of one; the run then goes on and ends as a folder like any other."""
    folder = exported("first", family=family)
    generator = {"init_from": str(folder / "generator"), "size": 0.25, "num_hidden_layers": None}
    both = {"model": {"init_from": str(folder)}, "generator": generator}
    model = _begun(settings, **both)
    kinds = [type(part) for part in model.parts]
    folders = (folder / "generator", folder)
    for part, kind, path in zip(model.parts, kinds, folders, strict=True):
        expected = kind.from_pretrained(path).state_dict()
        for name, value in part.state_dict().items():
            assert torch.equal(value, expected[name]), name

    alone = _begun(settings, model=both["model"])
    assert alone.generator.config.hidden_size == 16
    assert torch.equal(
        alone.generator.get_input_embeddings().weight, model.generator.get_input_embeddings().weight
    )
    beside = _begun(settings, generator=generator)
    assert type(beside.discriminator) is kinds[1]
    weights = [m.generator.get_input_embeddings().weight for m in (beside, model)]
    assert torch.equal(*weights)

    settings["generator"] |= generator
    settings["model"] |= both["model"]
    settings["phases"] = [{**settings["phases"][0], "steps": 4}]
    assert pretrain(config_from(settings)).finished
    export(settings["output"], folder.parent / "second")
    kinds[1].from_pretrained(folder.parent / "second")


def test_a_run_begins_with_a_masked_lm_model(settings, corpora, tmp_path):
    """Its head is left, the discriminator's is new."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpora / "train" / "tokenizer")
    config = small_config("DebertaV2", vocab_size=len(tokenizer), max_position_embeddings=48)
    transformers.DebertaV2ForMaskedLM(config).save_pretrained(tmp_path / "lm")
    model = _begun(settings, model={"init_from": str(tmp_path / "lm")})
    assert type(model.generator) is fastbert.DebertaV2ForEnhancedMaskedLM
    expected = transformers.DebertaV2Model.from_pretrained(tmp_path / "lm")
    for name, value in expected.state_dict().items():
        assert torch.equal(model.discriminator.deberta.state_dict()[name], value), name
    assert model.generator.config.embedding_size == model.config.hidden_size == 64
    assert model.config.hidden_dropout_prob == 0.1


def test_checkpoints_that_do_not_fit(settings, exported, corpora, tmp_path):
    """The tokenizer, the settings, or each other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpora / "train" / "tokenizer")
    size = len(tokenizer)

    def saved(family: str, name: str, **overrides) -> str:
        sizes = {"vocab_size": size, "max_position_embeddings": 48, **overrides}
        model = getattr(transformers, f"{family}ForMaskedLM")(small_config(family, **sizes))
        model.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    begun = {"size": 0.25, "num_hidden_layers": None}
    bert, small = saved("Bert", "bert"), saved("DebertaV2", "small", vocab_size=99)
    deberta = saved("DebertaV2", "deberta")
    large = saved("DebertaV2", "large", vocab_size=size + 7)
    short = saved("DebertaV2", "short", max_position_embeddings=24)
    cases = [
        ({"model": {"init_from": bert}}, "model.init_from .*is a bert; replaced_tokens trains el"),
        ({"model": {"init_from": small}}, f"small has vocab_size 99, the run needs {size}"),
        ({"model": {"init_from": short}}, "short has max_position_embeddings 24, the run needs 48"),
        (
            {"model": {"init_from": deberta, "family": "electra"}},
            "deberta is a deberta-v2, but model.family is electra; drop that",
        ),
        (
            {"model": {"init_from": deberta}, "generator": {**begun, "init_from": large}},
            f"vocab_size is {size + 7} and the discriminator's {size}; use models of one tokenizer",
        ),
        (
            {"generator": {**begun, "init_from": deberta}},
            "embeddings are 64 wide and the discriminator's 16, which shared embeddings cannot be",
        ),
        (
            {
                "model": {"init_from": deberta},
                "generator": {**begun, "init_from": saved("DebertaV2", "other")},
            },
            r"model.init_from and generator.init_from: embeddings are to be shared, but weight",
        ),
        (
            {"model": {"init_from": deberta}, "generator": {"size": 0.45}},
            "generator.size 0.45 of model.init_from gives hidden_size 29 and 2 heads",
        ),
    ]
    electra = {"generator": {**begun, "init_from": saved("Electra", "electra")}}
    cases.append(({"model": {"init_from": deberta}, **electra}, "model_type is electra and the di"))
    for changes, message in cases:
        with pytest.raises(ConfigError, match=message):
            _begun(settings, **changes)


def test_distillation_has_no_objective(settings, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({k: settings[k] for k in ("output", "data", "objective")}))
    told = CliRunner().invoke(app, ["distill", str(path)])
    assert told.exit_code == 1 and "objective and generator are of fastbert pretrain" in told.output
