"""Distillation runs: they learn, survive a kill, and end as a folder that transformers loads."""

import copy
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

import fastbert
from fastbert.cli.main import app
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.killing import BATCHES, run_in_process, run_in_processes
from fastbert.testing.models import assert_packed, lively_
from fastbert.testing.runs import learned, run_distillation, weights
from fastbert.train.config import ConfigError, DistillConfig, StudentConfig, config_from
from fastbert.train.distilbert import as_distilbert
from fastbert.train.distillation import Distillation, chosen_layers, distill
from fastbert.train.exporting import export

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distillation.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def teacher(corpora, tmp_path_factory):
    """Folder of a teacher of 4 layers whose predictions are far from even, and its tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(corpora / "train" / "tokenizer")
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=48,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    lively_(model, 4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(settings, teacher):
    """Of a distillation from 4 to 2 layers, else as those of pretraining."""
    model = {"hidden_dropout_prob": 0.05, "attention_probs_dropout_prob": 0.05}
    return {**settings, "model": model, "distillation": {"teacher": str(teacher)}}


def _config(settings) -> DistillConfig:
    return config_from(settings, kind=DistillConfig)


def test_from_teacher_to_transformers(settings, tmp_path):
    """The commands: a falling loss, and the logits of the run."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    with assert_packed(), assert_ran("mlm_distillation_bwd", "cpu"):
        told = CliRunner().invoke(app, ["distill", str(path), "--optimizer.lr", "1e-2"])
    assert told.exit_code == 0, told.output
    assert "finished after 12 steps" in told.output and "perplexity" in told.output
    records = [r for r in learned(settings["output"]) if r["loss"] is not None]
    for record in records:
        parts = 5 * record["soft_loss"] + 2 * record["mlm_loss"] + record["cosine_loss"]
        assert record["loss"] == pytest.approx(parts, rel=1e-5)
    losses = [record["loss"] for record in records]
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])

    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["export", settings["output"], str(out)])
    assert told.exit_code == 0, told.output
    theirs = AutoModelForMaskedLM.from_pretrained(out, attn_implementation="eager")
    assert type(theirs) is transformers.BertForMaskedLM and theirs.config.num_hidden_layers == 2
    settings["optimizer"]["lr"] = 1e-2
    run = Distillation(_config(settings))
    run.resume()
    assert run.steps_done == 12
    inputs = AutoTokenizer.from_pretrained(out)(["bal bem [MASK] dol"], return_tensors="pt")
    ours = fastbert.BertForMaskedLM.forward(run.model.eval(), **inputs).logits
    torch.testing.assert_close(ours, theirs(**inputs).logits)


def test_distilbert_has_the_same_logits():
    """In float64, of token type 0, to rounding: one sum in another order."""
    config = small_bert_config()
    bert = transformers.BertForMaskedLM(config)
    lively_(bert, 0)
    bert = bert.double().eval()
    distilbert = as_distilbert(bert)
    ids = torch.randint(1, config.vocab_size, (3, 17))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        expected = bert(ids, attention_mask=mask).logits
        actual = distilbert(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=0, atol=1e-12)
    assert distilbert.vocab_projector.weight is distilbert.distilbert.get_input_embeddings().weight


def test_export_as_distilbert(settings, tmp_path):
    """Begun from chosen layers, written by the command, loaded by transformers."""
    settings["model"] |= {"family": "distilbert", "layers": [0, 2, 3]}
    settings["phases"] = settings["phases"][:1]
    distill(_config(settings))
    out = tmp_path / "out"
    export(settings["output"], out)
    theirs = AutoModelForMaskedLM.from_pretrained(out)
    assert type(theirs) is transformers.DistilBertForMaskedLM
    assert theirs.config.n_layers == 3 and theirs.config.dropout == 0.05
    run = Distillation(_config(settings))
    run.resume()
    inputs = AutoTokenizer.from_pretrained(out)(["bal bem [MASK] dol"], return_tensors="pt")
    ours = fastbert.BertForMaskedLM.forward(run.model.eval(), **inputs).logits
    inputs.pop("token_type_ids", None)
    torch.testing.assert_close(ours, theirs.eval()(**inputs).logits)


def test_killed_and_resumed(settings, tmp_path):
    """In a save, then between the batches of a step: bitwise, with dropout and the teacher read
    anew."""
    whole = {**settings, "output": str(tmp_path / "whole")}
    assert run_in_process(run_distillation, whole) == 0
    for chosen in ({"kill_before": 10}, {"kill_before": 7, "operations": BATCHES}):
        assert run_in_process(run_distillation, settings, **chosen) == -signal.SIGKILL
    assert run_in_process(run_distillation, settings) == 0
    assert learned(settings["output"]) == learned(whole["output"])
    assert weights(settings["output"]) == weights(whole["output"])


@pytest.mark.slow
def test_processes(settings, tmp_path):
    """Weights whole or in parts in two processes: the same losses, in fp32 without dropout."""
    settings["model"] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings["phases"] = [{**settings["phases"][0], "steps": 4}]
    records = []
    for mode in ("ddp", "fsdp"):
        run = {**settings, "output": str(tmp_path / mode), "parallel": {"mode": mode}}
        assert run_in_processes(run_distillation, run, size=2) == [0, 0]
        records.append([r for r in learned(run["output"]) if r["loss"] is not None])
    assert len(records[0]) == len(records[1]) == 4
    for whole, parts in zip(*records, strict=True):
        for name in ("loss", "grad_norm", "soft_loss", "mlm_loss", "cosine_loss"):
            assert parts[name] == pytest.approx(whole[name], rel=1e-4), name


def test_teacher_stays_as_it_was(settings, teacher):
    """No weight of it moves, and none is in the checkpoints."""
    run = Distillation(_config(settings))
    taught = run.model.teaching.teacher
    assert not any(module.training for module in taught.modules())
    before = copy.deepcopy(taught.state_dict())
    run.run()
    for name, value in taught.state_dict().items():
        assert_bitwise_equal(value, before[name], name)
    assert run.state()["model"].keys() == run.model.state_dict().keys()
    size = sum(p.numel() for p in run.model.parameters())
    assert size < sum(p.numel() for p in taught.parameters())


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("distillation", {"teacher": ""}, "distillation.teacher is not set; give"),
        ("distillation", {"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ("distillation", {"soft_weight": -1.0}, "soft_weight must be 0 or more, got -1.0"),
        ("distillation", {"soft_weight": 0.0, "cosine_weight": 0.0}, "use fastbert pretrain"),
        ("distillation", {"teacher": "nowhere"}, "there is no folder .nowhere., it is not in"),
        ("distillation", {"teacher": "no/where/"}, "teacher: there is no folder 'no/where/'"),
        ("model", {"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ("model", {"num_hidden_layers": 5}, "num_hidden_layers 5: the teacher has 4 layers"),
        ("model", {"layers": []}, "model.layers is empty"),
        ("model", {"layers": [0, 4]}, "the teacher has layers 0 to 3, not 4"),
        ("model", {"layers": [0, 1], "num_hidden_layers": 3}, "names 2; drop one of the two"),
        ("data", {"sequences": "next_sentence"}, "which distillation leaves out; use packed"),
        (
            "phases",
            [{"steps": 3, "max_length": 96}],
            "max_position_embeddings 48, the run needs 96",
        ),
        (None, {"last_layer_subset": True}, "last_layer_subset leaves out hidden states"),
    ],
)
def test_settings_that_cannot_be(settings, section, values, message):
    if section is None:
        settings |= values
    elif section == "phases":
        settings["phases"] = [{**settings["phases"][0], **values[0]}]
    else:
        settings[section] = {**settings[section], **values}
    if "teacher" not in values or values["teacher"] != "nowhere":
        settings["schedule"] = {"warmup_steps": 1}
    with pytest.raises(ConfigError, match=message):
        Distillation(_config(settings))


def test_teachers_that_cannot_teach(settings, teacher, corpora, tmp_path):
    def refused(message: str, **changes) -> None:
        settings["distillation"]["teacher"] = str(tmp_path / "other")
        with pytest.raises(ConfigError, match=message):
            Distillation(_config({**settings, **changes}))

    config = transformers.BertConfig.from_pretrained(teacher)
    transformers.BertModel(config).save_pretrained(tmp_path / "other")
    refused("is no BertForMaskedLM with all its weights")
    config.hidden_act = "relu"
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "other")
    refused("has hidden_act relu; the fused losses know gelu")
    config.hidden_act, config.layer_norm_eps = "gelu", 1e-5
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "other")
    refused("layer_norm_eps is 1e-05", model={"family": "distilbert"})
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["dorp"])
    tokenizer.save_pretrained(tmp_path / "other")
    refused("has another tokenizer than the corpus")


def test_layers_by_default():
    assert chosen_layers(StudentConfig(), 12) == [0, 2, 4, 7, 9, 11]
    assert chosen_layers(StudentConfig(num_hidden_layers=3), 12) == [0, 6, 11]
    assert chosen_layers(StudentConfig(layers=(5, 5)), 12) == [5, 5]
    assert chosen_layers(StudentConfig(), 1) == [0]


def test_page(settings, teacher, corpora, tmp_path, monkeypatch):
    """The blocks of docs/distillation.md run, on a small teacher for a few steps."""
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    monkeypatch.chdir(tmp_path)
    for name, folder in (("teacher", teacher), *((n, corpora / n) for n in ("train", "heldout"))):
        os.symlink(folder, "corpus" if name == "train" else name)
    Path("distill.yaml").write_text(blocks["yaml"])
    small = "--model.layers 0 3 --phases.0.steps 2 --phases.0.max-length 24"
    small += " --phases.0.tokens-per-step 256 --phases.0.tokens-per-batch 256"
    small += " --schedule.warmup-steps 1 --evaluation.batches 1"
    for line in blocks["sh"].splitlines():
        program, *arguments = shlex.split(line)
        assert program == "fastbert"
        if arguments[0] == "distill":
            arguments += small.split()
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 0, told.output
    student = AutoModelForMaskedLM.from_pretrained("student")
    assert type(student) is transformers.DistilBertForMaskedLM


def test_command_lists_its_settings():
    told = CliRunner().invoke(app, ["distill", "--help"])
    assert told.exit_code == 0
    for part in ("--distillation.temperature", "--model.layers", "--model.family", "--phases.0"):
        assert part in told.output
    assert "--model.hidden-size" not in told.output
    told = CliRunner().invoke(app, ["distill", os.devnull])
    assert told.exit_code == 1 and "distillation.teacher is not set" in told.output
