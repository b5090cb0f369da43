"""sentence-transformers: a bi-encoder and a cross-encoder trained and used after
`fastbert.accelerate`, as without it. `encode` alone is in tests/models/test_bert_ecosystem.py."""

import copy

import pytest
import torch
import transformers

import fastbert
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed, model_pair

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PAIRS = {
    "anchor": ["a cat", "the old man and the sea", "rain", "two dogs in the park"] * 2,
    "positive": ["a small cat", "a novel by Hemingway", "wet weather", "dogs outside"] * 2,
}


@pytest.fixture
def folder(tmp_path, real_checkpoint):
    """A small model with the real tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_checkpoint)
    config = small_bert_config(vocab_size=len(tokenizer), num_labels=1, **OFF)
    _, model = model_pair("BertForSequenceClassification", config)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def _trained(model, folder):
    st = sentence_transformers
    arguments = st.SentenceTransformerTrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    trainer = st.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(PAIRS),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_bi_encoder_trains_as_without_us(folder, tmp_path):
    theirs = sentence_transformers.SentenceTransformer(folder, device="cpu")
    ours = fastbert.accelerate(copy.deepcopy(theirs))
    with assert_packed():
        measured = _trained(ours, str(tmp_path / "ours"))
    expected = _trained(theirs, str(tmp_path / "theirs"))
    assert len(measured) == 3
    torch.testing.assert_close(torch.tensor(measured), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    sentences = [*PAIRS["anchor"], "a sentence that is a good deal longer than the others", ""]
    with assert_packed():
        embeddings = ours.encode(sentences, convert_to_tensor=True)
    torch.testing.assert_close(
        embeddings, theirs.encode(sentences, convert_to_tensor=True), rtol=0, atol=2e-3
    )
    ours.save_pretrained(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(
        again.encode(sentences, convert_to_tensor=True), embeddings, rtol=0, atol=1e-5
    )


def test_cross_encoder_predicts_trains_and_ranks(folder, tmp_path):
    st = sentence_transformers
    theirs = st.CrossEncoder(folder, num_labels=1, device="cpu")
    ours = st.CrossEncoder(folder, num_labels=1, device="cpu")
    fastbert.accelerate(ours)
    pairs = list(zip(PAIRS["anchor"], PAIRS["positive"], strict=True))
    with assert_packed():
        scores = ours.predict(pairs)
    torch.testing.assert_close(
        torch.as_tensor(scores), torch.as_tensor(theirs.predict(pairs)), rtol=0, atol=1e-5
    )
    with assert_packed():
        ranking = ours.rank("rain", PAIRS["positive"][:4])
    expected = theirs.rank("rain", PAIRS["positive"][:4])
    assert [r["corpus_id"] for r in ranking] == [r["corpus_id"] for r in expected]

    rows = datasets.Dataset.from_dict({**PAIRS, "label": [1.0, 0.0] * 4})
    arguments = st.cross_encoder.CrossEncoderTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    measured = []
    for model in (ours, theirs):
        trainer = st.cross_encoder.CrossEncoderTrainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            loss=st.cross_encoder.losses.BinaryCrossEntropyLoss(model),
        )
        trainer.train()
        measured.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
    assert len(measured[0]) == 2
    torch.testing.assert_close(
        torch.tensor(measured[0]), torch.tensor(measured[1]), rtol=0, atol=1e-3
    )
