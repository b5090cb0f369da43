"""From raw text to a model that transformers loads, by the commands; the loop against plain
steps."""

import copy
import json
import math
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

import fastbert
from fastbert.cli.main import app
from fastbert.data import prepare, train_tokenizer
from fastbert.padding import query_rows
from fastbert.testing.models import assert_packed
from fastbert.testing.runs import learned
from fastbert.train import GraphedStep, building, pretraining
from fastbert.train.config import ConfigError, config_from, read_config
from fastbert.train.evaluation import evaluate
from fastbert.train.exporting import export
from fastbert.train.journal import METRICS, describe, keep_records, read_records
from fastbert.train.plotting import curves_of, plot
from fastbert.train.pretraining import Pretraining, pretrain


def _invoke(*arguments) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def _pretrain(*arguments, code: int = 0) -> str:
    """The command by which a run is made; tyro exits by itself."""
    result = CliRunner().invoke(app, ["pretrain", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_last_layer_subset_trains_alike(settings, tmp_path):
    """Losses and weights of whole runs without dropout, in fp32."""
    settings["model"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    losses = {}
    for flag in (False, True):
        run = tmp_path / str(flag)
        config = config_from({**settings, "output": str(run), "last_layer_subset": flag})
        with mock.patch("fastbert.models.post_norm.query_rows", wraps=query_rows) as limited:
            assert pretrain(config).finished
        assert limited.called == flag
        losses[flag] = [r["loss"] for r in read_records(run / METRICS) if "loss" in r]
    assert len(losses[True]) == 12
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_from_text_to_transformers(corpora, tmp_path):
    """Tokenizer, corpus, 20 steps in two goes, export: transformers has the run's logits."""
    text = corpora / "train.txt"
    _invoke("tokenizer", "train", text, "-o", tmp_path / "tok", "--vocab-size", "150")
    _invoke(
        *("data", "prepare", text, "-t", tmp_path / "tok"),
        *("-o", tmp_path / "corpus", "--workers", 1),
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
output: {tmp_path / "run"}
data: {{corpus: {tmp_path / "corpus"}, heldout: {tmp_path / "corpus"}}}
model: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64}}
phases: [{{steps: 20, max_length: 32, tokens_per_step: 256, tokens_per_batch: 256}}]
schedule: {{warmup_steps: 2}}
precision: fp32
optimizer: {{lr: 1e-3}}
checkpoint: {{every: 10, keep: 5}}
evaluation: {{every: 10, batches: 2}}
"""
    )
    with assert_packed():
        told = _pretrain(config, "--log.tensorboard", "--log.peak-tflops", "0.1")
    assert "finished after 20 steps" in told
    assert "perplexity" in told
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    whole = read_records(tmp_path / "run" / METRICS)
    # From step 10 once more, by the option that a damaged checkpoint would call for.
    _pretrain(config, "--checkpoint.resume-from", "step-10")
    again = read_records(tmp_path / "run" / METRICS)
    assert [r.get("loss") for r in again] == [r.get("loss") for r in whole]
    assert all(r["mfu"] > 0 for r in whole if "loss" in r)

    assert "step-20" in _invoke("export", tmp_path / "run", tmp_path / "out")
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    run = Pretraining(read_config(config))
    run.resume()
    inputs = tokenizer(["bal bem [MASK] dol", "fen"], padding=True, return_tensors="pt")
    ours = run.model.eval()(**inputs).logits
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[mask], theirs.eval()(**inputs).logits[mask])

    _invoke("plot", tmp_path / "run", "-o", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_pairs_keep_their_head(settings, tmp_path):
    """Next sentences: both heads train, and both are exported."""
    settings["data"]["sequences"] = "next_sentence"
    before = Pretraining(config_from(settings)).model.state_dict()
    pretrain(config_from(settings))
    export(settings["output"], tmp_path / "out")
    model, info = transformers.BertForPreTraining.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name in ("cls.seq_relationship.weight", "cls.predictions.bias"):
        assert not torch.equal(model.state_dict()[name], before[name]), name


def test_run_goes_on_from_a_checkpoint_of_transformers(settings, tmp_path):
    pretrain(config_from(settings))
    export(settings["output"], tmp_path / "out")
    second = {**settings, "output": str(tmp_path / "second")}
    second["model"] = {"init_from": str(tmp_path / "out"), "hidden_dropout_prob": 0.0}
    run = Pretraining(config_from(second))
    assert run.model.config.hidden_size == 32
    assert run.model.config.hidden_dropout_prob == 0.0
    exported = fastbert.BertForMaskedLM.from_pretrained(tmp_path / "out")
    for mine, other in zip(run.model.parameters(), exported.parameters(), strict=True):
        assert torch.equal(mine, other)
    second["phases"] = [{**settings["phases"][1], "max_length": 64}]
    with pytest.raises(ConfigError, match="max_position_embeddings 48, the run needs 64"):
        Pretraining(config_from(second))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "stable_adamw"])
def test_every_precision_and_optimizer_learns(settings, precision, optimizer):
    settings |= {"precision": precision, "optimizer": {"name": optimizer, "lr": 5e-3}}
    del settings["data"]["heldout"]
    summary = pretrain(config_from(settings))
    losses = [r["loss"] for r in read_records(Path(settings["output"]) / METRICS)]
    assert summary.finished and summary.steps == 12 and summary.heldout is None
    assert summary.num_tokens > 0 and math.isfinite(summary.loss)
    assert sum(losses[-3:]) < sum(losses[:3])


def test_loop_equals_plain_training(settings):
    """transformers' model, torch's AdamW and the loop everybody writes, on the same batches."""
    settings["model"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings["phases"] = settings["phases"][:1]
    run = Pretraining(config_from(settings))
    theirs = transformers.BertForMaskedLM(copy.deepcopy(run.model.config)).train()
    theirs.load_state_dict(run.model.state_dict())
    run.run()
    ours = [r for r in read_records(Path(settings["output"]) / METRICS) if "loss" in r]
    groups = building.decay_groups(theirs, 0.01)
    optimizer = torch.optim.AdamW(groups, lr=2e-3, eps=1e-6)
    stream = iter(run._stream(0, run.corpus, pretraining.Place()))
    for record in ours:
        batches = [_padded(next(stream)) for _ in range(2)]
        counts = [(batch["labels"] != -100).sum() for batch in batches]
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = record["lr"]
        optimizer.zero_grad()
        losses = [theirs(**b).loss * n for b, n in zip(batches, counts, strict=True)]
        loss = sum(losses) / sum(counts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def _padded(batch) -> dict[str, torch.Tensor]:
    """A packed batch as rows of the longest length."""
    lengths = batch.lengths.tolist()
    names = {"input_ids": 0, "token_type_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            batch.inputs[name][0, : sum(lengths)].split(lengths), True, padding_value=value
        )
        for name, value in names.items()
    }


def test_checkpointed_activations_change_nothing(settings):
    """Bitwise, with dropout; and less is kept for the backward pass."""
    outcomes, kept = [], []
    for checkpointing in (False, True):
        settings |= {
            "activation_checkpointing": checkpointing,
            "output": settings["output"] + "_",
        }
        run = Pretraining(config_from(settings))
        batch = next(iter(run._stream(0, run.corpus, pretraining.Place()))).inputs
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            loss = run.model(**batch, rng_state=torch.tensor([1, 2])).loss
        loss.backward()
        kept.append(sum(sizes))
        run.run()
        outcomes.append(learned(settings["output"]))
    assert outcomes[0] == outcomes[1]
    assert kept[1] < 0.6 * kept[0]


def late_step(lag: int):
    return lambda *args, **options: GraphedStep(*args, **{**options, "lag": lag})


def test_reports_that_come_late_change_nothing(settings, monkeypatch):
    """As on a GPU, where a step's report is read two steps later: over phases and saves."""
    outcomes = []
    for lag in (0, 2):
        monkeypatch.setattr(pretraining, "GraphedStep", late_step(lag))
        settings["output"] += "_"
        assert pretrain(config_from(settings)).steps == 12
        outcomes.append(learned(settings["output"]))
    assert [r["step"] for r in outcomes[0] if r["loss"] is not None] == list(range(1, 13))
    assert outcomes[0] == outcomes[1]


def test_evaluation_equals_the_model(settings):
    """Loss, accuracy and perplexity against transformers' logits of all positions."""
    run = Pretraining(config_from(settings))
    batch = next(iter(run._stream(0, run.heldout, pretraining.Place())))
    result = evaluate(run.model, [batch])
    assert run.model.training
    theirs = transformers.BertForMaskedLM(copy.deepcopy(run.model.config)).eval()
    theirs.load_state_dict(run.model.state_dict())
    padded = _padded(batch)
    with torch.no_grad():
        outputs = theirs(**padded)
    chosen = padded["labels"] != -100
    guessed = outputs.logits.argmax(-1)[chosen] == padded["labels"][chosen]
    assert result.num_labels == int(chosen.sum()) == batch.num_labels
    assert result.loss == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert result.accuracy == pytest.approx(guessed.float().mean().item())
    assert result.perplexity == pytest.approx(math.exp(outputs.loss.item()), rel=1e-4)
    with pytest.raises(ValueError, match="no label"):
        evaluate(run.model, [])


def test_flops_are_counted():
    """Against torch's counter, on one full sequence of a model whose every token is predicted."""
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = transformers.BertForMaskedLM(config)
    ids = torch.randint(50, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    lengths = torch.tensor([24]).numpy()
    assert building.training_flops(config, lengths, 24) == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )


def test_other_tokenizer_is_refused(settings, corpora, tmp_path):
    other = train_tokenizer(["a b c d"], vocab_size=30, min_frequency=1)
    prepare([corpora / "heldout.txt"], other, tmp_path / "c", workers=1, progress=False)
    settings["data"]["heldout"] = str(tmp_path / "c")
    with pytest.raises(ConfigError, match="prepared with another tokenizer"):
        Pretraining(config_from(settings))


def test_command_names_faults(tmp_path):
    help_text = _pretrain("--help")
    for part in ("tiny_cpu", "--optimizer.lr", "--data.masking.rate", "--phases.0.steps"):
        assert part in help_text
    told = _pretrain(code=2).splitlines()
    assert told[0] == "Usage: fastbert pretrain CONFIG [options]"
    assert "CONFIG is missing: a YAML file or one of bert_base, " in told[-1] and len(told) == 3
    told = _pretrain("tiny_cpu", "--output", tmp_path, code=1)
    assert "data.corpus is not set; give --data.corpus FOLDER" in told
    told = _pretrain("tiny_cpu", "--output", tmp_path, "--data.corpus", tmp_path, code=1)
    assert "fastbert data prepare" in told
    config = tmp_path / "config.yaml"
    config.write_text("optimzer: {}")
    assert "unknown key optimzer; did you mean optimizer?" in _pretrain(config, code=1)
    config.unlink()
    _pretrain("tiny_cpu", "--optimizer.lrr", "1", code=2)
    for arguments, message in (
        (("export", tmp_path, tmp_path / "out"), "is not a run"),
        (("plot", tmp_path, "-o", tmp_path / "c.png"), "has no step"),
        (("plot", tmp_path, "-o", tmp_path / "c.pdf"), "must end in .png"),
    ):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


def test_records_behind_a_checkpoint_go(tmp_path):
    path = tmp_path / METRICS
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lo')
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    keep_records(path, 2)
    assert path.read_text() == "\n".join(lines[:2]) + "\n"
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        read_records(path)
    keep_records(tmp_path / "none.jsonl", 2)


def test_progress_line_tells_what_is_known():
    values = {"loss": 2.5, "lr": 1e-4, "tokens_per_second": 12345.6, "padding_share": 0.031}
    assert describe(values) == "loss 2.500, lr 0.0001, 12,346 tokens/s, padding 3%"
    assert "held-out accuracy 41.0%, " in describe({**values, "heldout_accuracy": 0.41})
    assert "MFU 38%" in describe({**values, "mfu": 0.38})


def test_wandb_gets_what_is_logged(settings, monkeypatch):
    """Its three calls, and the remedy where it is missing."""
    settings["log"]["wandb_project"] = "berts"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        pretrain(config_from(settings))
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    pretrain(config_from(settings))
    assert wandb.init.call_args.kwargs["project"] == "berts"
    assert wandb.init.call_args.kwargs["config"]["optimizer"]["lr"] == 2e-3
    logged = wandb.init.return_value.log.call_args_list
    losses = {c.kwargs["step"]: c.args[0]["loss"] for c in logged if "loss" in c.args[0]}
    records = [r for r in learned(settings["output"]) if r["loss"] is not None]
    assert losses == {r["step"]: r["loss"] for r in records}
    wandb.init.return_value.finish.assert_called_once_with(exit_code=0)


def test_curves_are_averaged(tmp_path):
    lines = [
        {"step": s, "loss": float(s), "tokens_per_second": 100.0 + s % 2} for s in range(1, 101)
    ]
    lines.append({"step": 100, "heldout_loss": 7.0})
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = curves_of(tmp_path)
    assert curves["loss"][0].tolist() == curves["loss"][1].tolist()
    assert curves["loss"][1][:2].tolist() == [1.5, 3.5]
    assert set(curves["tokens_per_second"][1]) == {100.5}
    assert [v.tolist() for v in curves["heldout_loss"]] == [[100.0], [7.0]]
    plot([tmp_path], tmp_path / "curves.png")
