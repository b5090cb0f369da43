"""A fine-tuning that was killed goes on, and ends as if it had not been."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers

from fastbert.tasks import TaskError
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.killing import run_in_process
from fastbert.testing.runs import finetune_rows

# Before the second epoch's checkpoint, and in it, when all but Trainer's state is written.
MOMENTS = ("_save_checkpoint", "_save_rng_state")
# Labels drawn by lot: it stops early, and the best epoch is not the last.
TRAINING = {"epochs": 20, "batch_size": 8, "learning_rate": 1e-3, "patience": 2, "seed": 3}


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """A checkpoint with dropout, whose random state has to come back, too."""
    folder = tmp_path_factory.mktemp("base")
    config = small_bert_config(vocab_size=len(tokenizer), num_hidden_layers=1)
    assert config.hidden_dropout_prob > 0
    transformers.set_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rows(reviews):
    generator = np.random.default_rng(0)
    return [{**row, "label": str(generator.integers(2))} for row in reviews[:64]]


@pytest.fixture(scope="module")
def undisturbed(base, rows, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed") / "model"
    finetune_rows("classification", base, rows, str(output), TRAINING)
    return output


def _learned(output):
    record = json.loads((output / "metrics.json").read_text())
    return (output / "model.safetensors").read_bytes(), record


def _interrupted(monkeypatch, moment, *arguments):
    """A run in this process that ends in its second call of a method of Trainer."""
    method, calls = getattr(transformers.Trainer, moment), []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, moment, counted)
        with pytest.raises(KeyboardInterrupt):
            finetune_rows(*arguments)


def _killed(moment, *arguments):
    """A run in a process of its own that is killed there."""
    operations = (f"transformers.trainer:Trainer.{moment}",)
    code = run_in_process(finetune_rows, *arguments, kill_before=1, operations=operations)
    assert code == -signal.SIGKILL


def _goes_on(undisturbed, arguments, caplog):
    output = Path(arguments[-2])
    assert not (output / "model.safetensors").exists()
    finetune_rows(*arguments)
    assert "goes on from checkpoint-6" in caplog.text
    ours, expected = _learned(output), _learned(undisturbed)
    assert ours[0] == expected[0]
    assert ours[1] == expected[1]
    assert 3 <= len(ours[1]["history"]) < TRAINING["epochs"]
    assert not (output / "checkpoints").exists()


def test_equal_weights(base, rows, undisturbed, tmp_path, caplog, monkeypatch):
    arguments = ("classification", base, rows, str(tmp_path / "model"), TRAINING)
    _interrupted(monkeypatch, MOMENTS[1], *arguments)
    with pytest.raises(TaskError) as caught:
        finetune_rows(*arguments[:-1], {**TRAINING, "seed": 4, "learning_rate": 1.0})
    assert str(caught.value).split("\n") == [
        f"{tmp_path / 'model'} holds a run that was stopped, with other settings; run it again as "
        "it was, choose another output, or replace it by --overwrite (overwrite=True in Python):",
        "training.learning_rate: 0.001 there, 1.0 now",
        "training.seed: 3 there, 4 now",
    ]
    with pytest.raises(TaskError, match=r"train_rows: 48 rows, sha256 .* there, 48 rows, sha256"):
        finetune_rows("classification", base, rows[::-1], *arguments[-2:])
    _goes_on(undisturbed, arguments, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_equal_weights_after_a_kill(base, rows, undisturbed, moment, tmp_path, caplog):
    arguments = ("classification", base, rows, str(tmp_path / "model"), TRAINING)
    _killed(moment, *arguments)
    _goes_on(undisturbed, arguments, caplog)


def test_a_run_that_was_killed_while_it_wrote_the_model_goes_on(
    base, rows, undisturbed, tmp_path, monkeypatch, caplog
):
    """The weights are there, but nothing says that they are all that was to be written."""
    arguments = ("classification", base, rows, str(tmp_path / "model"), TRAINING)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fastbert.tasks.finetuning.write_description", killed)
        with pytest.raises(KeyboardInterrupt):
            finetune_rows(*arguments)
    assert (tmp_path / "model" / "model.safetensors").exists()
    finetune_rows(*arguments)
    assert "goes on from checkpoint-" in caplog.text
    assert _learned(tmp_path / "model") == _learned(undisturbed)


def test_a_finished_run_is_not_trained_again(base, rows, undisturbed, monkeypatch, caplog):
    def trained(*_, **__):
        raise AssertionError("it was trained")

    monkeypatch.setattr(transformers.Trainer, "train", trained)
    before = _learned(undisturbed)
    result = finetune_rows("classification", base, rows, str(undisturbed), TRAINING)
    assert (result.metrics, result.history) == (before[1]["metrics"], before[1]["history"])
    assert result.samples_per_second is None
    assert "this run was finished before; --overwrite trains it anew" in caplog.text
    assert _learned(undisturbed) == before


def _changed(base, folder):
    """Other weights in a folder of the same name."""
    model = transformers.BertModel.from_pretrained(base)
    model.pooler.dense.bias.data += 1
    output = folder / "changed" / Path(base).name
    shutil.copytree(base, output)
    model.save_pretrained(output)
    return str(output)


def test_a_finished_run_is_not_replaced_unasked(base, rows, undisturbed, tmp_path):
    output = tmp_path / "model"
    shutil.copytree(undisturbed, output)
    renamed = [{**row, "label": f"class {row['label']}"} for row in rows]
    quick = {**TRAINING, "epochs": 1}

    def run(base=base, rows=rows, training=TRAINING, **options):
        return finetune_rows("classification", base, rows, str(output), training, **options)

    for options, told in (
        ({"training": quick}, ["training.epochs: 20 there, 1 now"]),
        ({"rows": rows[4:]}, ["train_rows: 48 rows, ", "evaluation_rows: 16 rows, "]),
        ({"rows": renamed}, ["labels: ['0', '1'] there, ['class 0', 'class 1'] now"]),
        ({"base": _changed(base, tmp_path)}, [f"checkpoint: {Path(base).name}, sha256 "]),
    ):
        with pytest.raises(TaskError, match=r"holds a finished run, .* by --overwrite") as caught:
            run(**options)
        for line in told:
            assert line in str(caught.value)
    assert _learned(output) == _learned(undisturbed)
    # The same checkpoint elsewhere is the same.
    assert run(base=shutil.copytree(base, tmp_path / "there" / Path(base).name)).seconds is None
    result = run(training=quick, overwrite=True)
    assert len(result.history) == 1
    assert run(training=quick).samples_per_second is None
    assert run(training=quick, overwrite=True).samples_per_second > 0


def test_a_model_of_an_older_version_is_replaced_where_that_is_asked(
    base, rows, undisturbed, tmp_path
):
    output = tmp_path / "model"
    shutil.copytree(undisturbed, output)
    (output / "run.json").unlink()
    (output / "notes.txt").write_text("mine")
    arguments = ("classification", base, rows, str(output), {**TRAINING, "epochs": 1})
    with pytest.raises(TaskError, match=r"an older version fine-tuned, .* by --overwrite"):
        finetune_rows(*arguments)
    assert _learned(output) == _learned(undisturbed)
    assert len(finetune_rows(*arguments, overwrite=True).history) == 1
    assert (output / "notes.txt").read_text() == "mine"
    assert finetune_rows(*arguments).seconds is None


@pytest.mark.parametrize(
    "names",
    [
        ["fastbert_task.json", "model.safetensors"],
        ["metrics.json", "model.safetensors"],
        ["run.json", "README.md"],
        ["checkpoints/thesis.tex"],
        ["fastbert_task.json", "metrics.json", "run.json", "checkpoints/thesis.tex"],
    ],
)
def test_files_of_others_are_not_replaced(base, rows, names, tmp_path):
    output = tmp_path / "model"
    for name in names:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text("{}")
    with pytest.raises(TaskError, match=r"holds something else than .* of finetune"):
        finetune_rows("classification", base, rows, str(output), TRAINING, overwrite=True)
    assert all((output / name).read_text() == "{}" for name in names)


def test_checkpoints_that_were_removed_in_part_are_still_known(base, rows, tmp_path, monkeypatch):
    arguments = ("classification", base, rows, str(tmp_path / "model"), TRAINING)

    def killed(path):
        shutil.rmtree(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fastbert.tasks.resuming.shutil", SimpleNamespace(rmtree=killed))
        with pytest.raises(KeyboardInterrupt):
            finetune_rows(*arguments)
    assert (tmp_path / "model" / "checkpoints" / "run.json").exists()
    assert finetune_rows(*arguments).seconds is None


@pytest.mark.slow
def test_encoders_go_on(base, tmp_path):
    pytest.importorskip("sentence_transformers")
    rows = [{"query": f"{n} ?", "positive": f"it is {n}"} for n in range(32)]
    training = {**TRAINING, "epochs": 3}
    finetune_rows("bi-encoder", base, rows, str(tmp_path / "undisturbed"), training)
    arguments = ("bi-encoder", base, rows, str(tmp_path / "model"), training)
    _killed(MOMENTS[0], *arguments)
    finetune_rows(*arguments)
    assert _learned(tmp_path / "model") == _learned(tmp_path / "undisturbed")
    assert finetune_rows(*arguments).seconds is None
    with pytest.raises(TaskError, match=r"training\.seed: 3 there, 4 now"):
        finetune_rows(*arguments[:-1], {**training, "seed": 4})
