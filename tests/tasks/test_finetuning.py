"""A model is fine-tuned on every task, kept, and used."""

import json

import numpy as np
import pytest
import torch
import transformers

import fastbert
from fastbert.tasks import Predictor, TaskError, TrainingSettings, finetune
from fastbert.tasks.classification import ClassificationSettings
from fastbert.tasks.multiple_choice import MultipleChoiceSettings
from fastbert.tasks.question_answering import QuestionAnsweringSettings
from fastbert.tasks.runs import rows_of_run
from fastbert.tasks.token_classification import TokenClassificationSettings
from fastbert.testing.models import assert_packed

QUICK = {"epochs": 5, "batch_size": 8, "learning_rate": 3e-3, "layer_decay": 1.0}


def _weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_classification_learns_and_is_kept(checkpoint, reviews, tmp_path):
    output = tmp_path / "model"
    with assert_packed():
        result = finetune(
            "classification",
            checkpoint,
            reviews[:64],
            reviews[64:],
            output=output,
            training=TrainingSettings(**QUICK),
        )
    assert result.metrics["accuracy"] == 1
    assert result.history[0]["train_loss"] > result.history[-1]["train_loss"]
    assert {path.name for path in output.iterdir()} >= {
        *("README.md", "config.json", "fastbert_task.json", "metrics.json", "model.safetensors"),
        "tokenizer.json",
    }
    assert not (output / "checkpoints").exists()

    predictor = Predictor(output)
    assert type(predictor.model) is fastbert.BertForSequenceClassification
    with assert_packed():
        metrics = predictor.evaluate(reviews[64:])
        answers = predictor.predict([{"text": "the film was poor"}, {"text": "lovely"}])
    assert metrics["accuracy"] == 1
    assert [a["label"] for a in answers] == ["negative", "positive"]

    theirs = transformers.pipeline("text-classification", model=str(output), device="cpu")
    (label,) = theirs("the film was poor")
    assert label["label"] == "negative"
    assert label["score"] == pytest.approx(answers[0]["scores"]["negative"], abs=1e-5)

    card = (output / "README.md").read_text()
    assert "| accuracy | 1.0000 |" in card
    assert "`negative`, `positive`" in card
    for picture in ("confusion.png", "calibration.png", "learning.png"):
        assert f"]({picture})" in card
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert checkpoint not in card
    assert json.loads((output / "metrics.json").read_text())["metrics"] == result.metrics


def test_equal_seeds_give_equal_runs_and_the_same_as_transformers(checkpoint, reviews, tmp_path):
    """Dropout is off in this checkpoint, so that both compute the same."""
    losses = {}
    for name, options in {
        "first": {},
        "again": {},
        "other": {"seed": 1},
        "theirs": {"accelerated": False},
    }.items():
        result = finetune(
            "classification",
            checkpoint,
            reviews[:32],
            reviews[32:48],
            output=tmp_path / name,
            training=TrainingSettings(**{**QUICK, "epochs": 2, **options}),
        )
        losses[name] = [epoch["train_loss"] for epoch in result.history]
    assert _weights(tmp_path / "first") == _weights(tmp_path / "again")
    assert losses["first"] == losses["again"]
    assert losses["first"] != losses["other"]
    np.testing.assert_allclose(losses["first"], losses["theirs"], rtol=1e-2)


def test_early_stopping_keeps_the_best_epoch(checkpoint, reviews, tmp_path):
    """With labels drawn by lot nothing improves for long."""
    generator = np.random.default_rng(0)
    rows = [{**row, "label": str(generator.integers(2))} for row in reviews]
    result = finetune(
        "classification",
        checkpoint,
        rows[:64],
        rows[64:],
        output=tmp_path / "model",
        training=TrainingSettings(**{**QUICK, "epochs": 30, "patience": 2}),
    )
    accuracies = [epoch["accuracy"] for epoch in result.history]
    assert len(accuracies) < 30
    assert len(accuracies) == accuracies.index(max(accuracies)) + 3
    assert result.metrics["accuracy"] == max(accuracies)
    assert Predictor(tmp_path / "model").evaluate(rows[64:])["accuracy"] == max(accuracies)


def test_rows_are_held_out_where_none_are_named(checkpoint, reviews, tmp_path, caplog):
    caplog.set_level("INFO", logger="fastbert")
    finetune(
        "classification",
        checkpoint,
        reviews[:40],
        output=tmp_path / "model",
        training=TrainingSettings(**{**QUICK, "epochs": 1}),
    )
    assert "4 of 40 rows are held out" in caplog.text
    assert "Fine-tuned on 36 rows, judged on 4 others" in (tmp_path / "model/README.md").read_text()


def test_rows_that_are_held_out_are_not_trained():
    rows = [{"text": str(number)} for number in range(25)]
    found = rows_of_run(rows, None, None, None, 0)
    assert len(found.held_out) == 2
    assert sorted([*found.kept, *found.judged]) == list(range(25))
    assert [rows.index(row) for row in found.held_out] == list(found.judged)
    assert [rows.index(row) for row in found.train] == list(found.kept)
    assert rows_of_run(rows, None, None, None, 1).judged != found.judged


@pytest.mark.slow
def test_regression_and_several_labels(checkpoint, reviews, tmp_path):
    worth = [{**r, "label": float(r["label"] == "positive")} for r in reviews]
    several = [{**r, "label": [r["label"]] + ["short"] * (len(r["text"]) < 25)} for r in reviews]
    for problem, rows, metric in (
        ("regression", worth, "spearman"),
        ("multi", several, "f1_micro"),
    ):
        result = finetune(
            "classification",
            checkpoint,
            rows[:64],
            rows[64:],
            output=tmp_path / problem,
            settings=ClassificationSettings(problem=problem),
            training=TrainingSettings(**QUICK),
        )
        assert result.metrics[metric] > 0.8
        again = Predictor(tmp_path / problem).evaluate(rows[64:])
        assert again[metric] == pytest.approx(result.metrics[metric])


def test_token_classification(checkpoint, tmp_path):
    """Names after a title are persons; long rows are cut into features."""
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(64):
        words, tags = [], []
        for _ in range(int(generator.integers(2, 12))):
            if generator.random() < 0.4:
                words += ["Mr", str(generator.choice(["Zola", "Smith", "Kant"]))]
                tags += ["O", "B-PER"]
            else:
                words += ["went", "home"]
                tags += ["O", "O"]
        rows.append({"tokens": words, "tags": tags})
    result = finetune(
        "token-classification",
        checkpoint,
        rows[:48],
        rows[48:],
        output=tmp_path / "model",
        settings=TokenClassificationSettings(max_length=12, overlong="stride", stride=3),
        training=TrainingSettings(**QUICK),
    )
    assert result.metrics["f1"] == 1
    predictor = Predictor(tmp_path / "model")
    assert predictor.evaluate(rows[48:])["f1"] == 1
    (answer,) = predictor.predict([{"tokens": "Mr Kant went home"}])
    assert [(e["type"], e["text"]) for e in answer["entities"]] == [("PER", "Kant")]
    assert len(answer["scores"]) == 4 and min(answer["scores"]) > 0.5
    assert (tmp_path / "model" / "confusion.png").is_file()


def test_question_answering(checkpoint, tmp_path):
    """The answer is the one number; some contexts hold none."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(96):
        filling = ["the bill was"] * int(generator.integers(1, 6))
        words = filling + ["paid"] * 2
        number = str(generator.integers(2, 10)) if index % 4 else None
        if number:
            words.insert(int(generator.integers(len(words) + 1)), number)
        context = " ".join(words)
        rows.append(
            {
                "question": "how much ?",
                "context": context,
                "answers": {
                    "text": [number] if number else [],
                    "answer_start": [context.index(number)] if number else [],
                },
            }
        )
    result = finetune(
        "question-answering",
        checkpoint,
        rows[:80],
        rows[80:],
        output=tmp_path / "model",
        settings=QuestionAnsweringSettings(max_length=24, stride=6, no_answer=True),
        training=TrainingSettings(**{**QUICK, "epochs": 8}),
    )
    assert result.metrics["exact_match"] > 85
    predictor = Predictor(tmp_path / "model")
    assert type(predictor.model) is fastbert.BertForQuestionAnswering
    metrics = predictor.evaluate(rows[80:])
    assert metrics["f1"] == pytest.approx(result.metrics["f1"])
    theirs = Predictor(tmp_path / "model", accelerated=False).predict(rows[80:])
    for mine, other in zip(predictor.predict(rows[80:]), theirs, strict=True):
        assert (mine["answer"], mine["start"]) == (other["answer"], other["start"])


@pytest.mark.slow
def test_multiple_choice(checkpoint, reviews, tmp_path):
    """The kind word fits the kind text."""
    rows = [
        {
            "text": row["text"],
            "choices": ["a good one", "a bad one"],
            "label": int(row["label"] == "negative"),
        }
        for row in reviews
    ]
    result = finetune(
        "multiple-choice",
        checkpoint,
        rows[:64],
        rows[64:],
        output=tmp_path / "model",
        settings=MultipleChoiceSettings(max_length=32),
        training=TrainingSettings(**QUICK),
    )
    predictor = Predictor(tmp_path / "model")
    assert predictor.evaluate(rows[64:])["accuracy"] == result.metrics["accuracy"]
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_a_family_without_an_adapter_gets_our_attention(tokenizer, reviews, tmp_path):
    config = transformers.NomicBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        pad_token_id=0,
    )
    transformers.NomicBertModel(config).save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    before = fastbert.dispatch.counters()
    result = finetune(
        "classification",
        str(tmp_path / "checkpoint"),
        reviews[:16],
        reviews[16:24],
        output=tmp_path / "model",
        training=TrainingSettings(**{**QUICK, "epochs": 1}),
    )
    assert result.metrics["loss"] > 0
    made = fastbert.dispatch.counters() - before
    assert made["attention_interface", "fastbert"] > 0


def test_refusals_come_before_training(checkpoint, reviews, tmp_path):
    def run(rows=reviews, evaluation=None, **options):
        settings = ClassificationSettings(**options.pop("settings", {}))
        finetune(
            options.pop("task", "classification"),
            checkpoint,
            rows,
            evaluation,
            output=options.pop("output", tmp_path / "model"),
            settings=settings,
            **options,
        )

    with pytest.raises(TaskError, match="there is no task 'poetry'; there are classification"):
        run(task="poetry")
    with pytest.raises(TaskError, match="settings of multiple-choice must be MultipleChoiceSet"):
        run(task="multiple-choice")
    with pytest.raises(TaskError, match="train, row 1: no column 'body'"):
        run(settings={"text": "body"})
    with pytest.raises(TaskError, match="evaluation, row 1: unknown label 'mixed'"):
        run(evaluation=[{"text": "so so", "label": "mixed"}])
    # Every label occurs once, so that of the first row held out is unknown.
    path = tmp_path / "films.jsonl"
    rows = [{**row, "label": f"label {number}"} for number, row in enumerate(reviews, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = r"films.jsonl \(train\), held out to judge by, row (\d+): unknown label 'label \1'"
    with pytest.raises(TaskError, match=message):
        run(rows=path)
    with pytest.raises(TaskError, match=r"films.jsonl \(train\), row 1: no column 'body'"):
        run(rows=path, settings={"text": "body"})
    with pytest.raises(TaskError, match=r"films.jsonl \(evaluation\), row 1: unknown label"):
        run(evaluation=path)
    with pytest.raises(TaskError, match="all training rows have the label 'positive', so there"):
        run(rows=reviews[1::2])
    # Counted in its file, wherever it is used.
    rows = [
        {**row, "text": row["text"] * (1 + 20 * (number == 80))}
        for number, row in enumerate(reviews)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for given in ({"rows": path}, {"evaluation": path}):
        with pytest.raises(
            TaskError, match=r"films.jsonl \((train|evaluation)\), row 81 has \d+ tok"
        ):
            run(**given, settings={"max_length": 64, "overlong": "refuse"})
    with pytest.raises(TaskError, match="max_length is 9999, but the model takes"):
        run(settings={"max_length": 9999})
    with pytest.raises(TaskError, match="stride is 64, but a feature has 32 tokens"):
        run(settings={"max_length": 32, "overlong": "stride"})
    with pytest.raises(TaskError, match="there are no rows"):
        run(rows=[])
    with pytest.raises(TaskError, match="too few to hold some out"):
        run(rows=reviews[:1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(TaskError, match="holds something else than a run of finetune"):
        run(output=tmp_path / "other")
    with pytest.raises(TaskError, match=r"has no fastbert_task\.json"):
        Predictor(checkpoint)
    with pytest.raises(TaskError, match="tokens, at most 8 are taken"):
        run(settings={"max_length": 8, "overlong": "refuse"})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["films.jsonl", "other"]


@pytest.mark.parametrize(
    "options",
    [{"epochs": 0}, {"batch_size": 0}, {"warmup": 1}, {"patience": 0}, {"accumulation": 0}],
)
def test_training_settings_that_do_not_fit(options):
    (name,) = options
    with pytest.raises(TaskError, match=name):
        TrainingSettings(**options)


def test_the_optimizer_has_rates_by_layer(checkpoint, reviews, tmp_path, monkeypatch):
    """Warm-up reaches every group: after the first tenth each has its own top rate."""
    seen = []
    step = torch.optim.AdamW.step

    def recorded(self, *args, **kwargs):
        seen.append([group["lr"] for group in self.param_groups])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    finetune(
        "classification",
        checkpoint,
        reviews[:80],
        reviews[80:],
        output=tmp_path / "model",
        training=TrainingSettings(epochs=2, batch_size=8, learning_rate=1e-3, layer_decay=0.5),
    )
    assert len(seen) == 20
    assert max(seen[0]) == 0
    assert max(seen[2]) == pytest.approx(1e-3)
    layers = transformers.AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    assert min(seen[2]) == pytest.approx(1e-3 * 0.5 ** (layers + 1))
    assert max(seen[-1]) == pytest.approx(1e-3 / 18)
