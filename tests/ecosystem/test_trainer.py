"""transformers' Trainer from start to finish: dynamic padding, evaluation, best checkpoint, early
stopping, resuming and prediction, with our model as with transformers'.

Single steps under accumulation and in bf16 are in tests/models/test_bert_ecosystem.py.
"""

import numpy as np
import pytest
import torch
import transformers

from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed, model_pair

datasets = pytest.importorskip("datasets")

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = {"good": 1, "fine": 1, "bad": 0, "poor": 0}


@pytest.fixture(scope="module")
def tokenizer(real_checkpoint):
    return transformers.AutoTokenizer.from_pretrained(real_checkpoint)


@pytest.fixture(scope="module")
def rows(tokenizer):
    generator = np.random.default_rng(0)
    texts, labels = [], []
    for _ in range(64):
        word = generator.choice(list(WORDS))
        filling = ["the film was"] * generator.integers(1, 5)
        texts.append(" ".join([*filling, word]))
        labels.append(WORDS[word])
    tokenised = tokenizer(texts)
    return datasets.Dataset.from_dict({**tokenised, "labels": labels})


def _trainer(model, tokenizer, rows, folder, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        seed=3,
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows.select(range(24)),
        processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(1) == p.label_ids).mean()},
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=3)],
    )


def _losses(trainer):
    return torch.tensor([e["loss"] for e in trainer.state.log_history if "loss" in e])


def test_training_evaluation_and_prediction_as_on_transformers(tokenizer, rows, tmp_path):
    config = small_bert_config(vocab_size=len(tokenizer), num_labels=2, **OFF)
    ours, theirs = model_pair("BertForSequenceClassification", config)
    mine = _trainer(ours, tokenizer, rows, tmp_path / "ours")
    reference = _trainer(theirs, tokenizer, rows, tmp_path / "theirs")
    with assert_packed():
        mine.train()
        metrics = mine.evaluate()
        predictions = mine.predict(rows.select(range(10)))
    reference.train()
    torch.testing.assert_close(_losses(mine), _losses(reference), rtol=2e-2, atol=2e-3)
    assert len(_losses(mine)) == 24
    assert metrics["eval_accuracy"] == reference.evaluate()["eval_accuracy"]
    assert predictions.predictions.shape == (10, 2)
    assert mine.state.best_model_checkpoint is not None


def test_resuming_gives_the_run_that_was_not_stopped(tokenizer, rows, tmp_path):
    """With dropout on: its stream comes from torch's generator, whose state is in checkpoints."""
    config = small_bert_config(vocab_size=len(tokenizer), num_labels=2)
    runs = []
    for name, resume in (("whole", False), ("resumed", True)):
        ours, _ = model_pair("BertForSequenceClassification", config)
        trainer = _trainer(ours, tokenizer, rows, tmp_path / "run" if resume else tmp_path / name)
        if resume:
            trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
        else:
            trainer.train()
        runs.append((_losses(trainer), trainer.model.state_dict()))
    (whole, weights), (resumed, again) = runs
    assert torch.equal(whole, resumed)
    for key, value in weights.items():
        assert torch.equal(value, again[key]), key
