"""The average of the weights: its formula, in evaluation, exported."""

from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fastbert.cli.main import app
from fastbert.testing.runs import learned
from fastbert.train.batches import Place
from fastbert.train.config import ConfigError, config_from
from fastbert.train.evaluation import evaluate
from fastbert.train.exporting import export
from fastbert.train.pretraining import Pretraining

DECAY = 0.75


@pytest.fixture
def settings(settings):
    """Four steps, each with a checkpoint."""
    settings["phases"] = [{**settings["phases"][0], "steps": 4}]
    settings["checkpoint"] = {"every": 1, "keep": 4}
    settings["average_decay"] = DECAY
    return settings


def test_average_follows_its_formula_and_leaves_the_weights(settings, tmp_path):
    """Of the weights that each step's checkpoint holds; the run is that without averages."""
    run = Pretraining(config_from(settings))
    expected = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.run()
    for step in range(1, 5):
        export(settings["output"], tmp_path / f"step-{step}", f"step-{step}")
        weights = load_file(tmp_path / f"step-{step}" / "model.safetensors")
        for name, average in expected.items():
            average.lerp_(weights[name], 1 - DECAY)
    arguments = ["export", settings["output"], str(tmp_path / "average"), "--average"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    averages = load_file(tmp_path / "average" / "model.safetensors")
    for name, average in expected.items():
        torch.testing.assert_close(averages[name], average, rtol=1e-6, atol=1e-7, msg=name)
    assert not torch.equal(averages[name], weights[name])

    records = learned(settings["output"])
    settings |= {"output": settings["output"] + "-without", "average_decay": None}
    Pretraining(config_from(settings)).run()
    assert learned(settings["output"]) == records
    with pytest.raises(ConfigError, match="no average_decay; leave out average"):
        export(settings["output"], tmp_path / "none", average=True)


def test_evaluation_of_the_average(settings):
    """Its held-out loss; the weights are as before behind it."""
    records, losses = [], []
    for average in (False, True):
        settings["output"] = f"{settings['output']}-{average}"
        settings["evaluation"] = {"every": 2, "batches": 2, "average": average}
        run = Pretraining(config_from(settings))
        losses.append(run.run().heldout.loss)
        records.append([r for r in learned(settings["output"]) if r["loss"] is not None])
    assert records[0] == records[1]
    stream = run._stream(0, run.heldout, Place())
    batches = list(islice(stream, 2))
    assert evaluate(run.model, batches).loss == losses[0] != losses[1]
    with run.average.in_use():
        assert evaluate(run.model, batches).loss == losses[1]
    assert evaluate(run.model, batches).loss == losses[0]
