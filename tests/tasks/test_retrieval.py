"""A bi-encoder and a cross-encoder are trained, kept, and used by sentence-transformers."""

import numpy as np
import pytest
import torch

from fastbert.tasks import TaskError, TrainingSettings
from fastbert.tasks.retrieval import PairSettings, finetune_bi_encoder, finetune_cross_encoder
from fastbert.testing.models import assert_packed

sentence_transformers = pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

WORDS = ["river", "mountain", "engine", "poem", "winter", "bread", "king", "ship"]
QUICK = {"epochs": 3, "batch_size": 8, "learning_rate": 2e-3, "layer_decay": 1.0}


@pytest.fixture(scope="module")
def pairs():
    """A question and the passage that holds its word."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(64):
        word = WORDS[index % len(WORDS)]
        filling = " ".join(generator.choice(["some", "many", "few", "old"], 3))
        rows.append({"query": f"where is the {word} ?", "positive": f"{filling} {word} is here"})
    return rows


def test_bi_encoder_learns_to_search(checkpoint, pairs, tmp_path):
    judged = [{"query": f"where is the {w} ?", "positive": f"old {w} is here"} for w in WORDS]
    with assert_packed():
        result = finetune_bi_encoder(
            checkpoint,
            pairs,
            judged,
            output=tmp_path / "model",
            settings=PairSettings(max_length=16),
            training=TrainingSettings(**QUICK),
        )
    assert result.metrics["accuracy@1"] > 0.8
    assert {"mrr@10", "ndcg@10", "recall@10"} <= result.metrics.keys()
    best = max(epoch["ndcg@10"] for epoch in result.history)
    assert result.metrics["ndcg@10"] == pytest.approx(best)
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert model.max_seq_length == 16
    queries, passages = (model.encode([r[c] for r in judged]) for c in ("query", "positive"))
    found = model.similarity(queries, passages).argmax(1)
    right = (found == torch.arange(len(WORDS))).float().mean().item()
    assert right == pytest.approx(result.metrics["accuracy@1"])


@pytest.mark.slow
def test_chunks_change_memory_not_gradients(checkpoint, pairs, tmp_path):
    losses = []
    for chunk in (None, 3):
        result = finetune_bi_encoder(
            checkpoint,
            pairs[:16],
            pairs[16:24],
            output=tmp_path / str(chunk),
            settings=PairSettings(max_length=16, chunk=chunk),
            training=TrainingSettings(**{**QUICK, "epochs": 2}),
        )
        losses.append([epoch["train_loss"] for epoch in result.history])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def _scored(pairs):
    return [
        {"query": r["query"], "positive": pairs[(i + (i % 3 == 0)) % 64]["positive"], "score": s}
        for i, (r, s) in enumerate(zip(pairs, [0.0, 1.0, 1.0] * 22, strict=False))
    ]


@pytest.mark.slow
def test_bi_encoder_fits_cosines(checkpoint, pairs, tmp_path):
    rows = _scored(pairs)
    result = finetune_bi_encoder(
        checkpoint,
        rows[:48],
        rows[48:],
        output=tmp_path / "model",
        settings=PairSettings(score="score", max_length=16),
        training=TrainingSettings(**QUICK),
    )
    assert -1 <= result.metrics["spearman"] <= 1
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


def test_cross_encoder(checkpoint, pairs, tmp_path):
    rows = _scored(pairs)
    with assert_packed():
        result = finetune_cross_encoder(
            checkpoint,
            rows[:48],
            rows[48:],
            output=tmp_path / "model",
            settings=PairSettings(score="score", max_length=32),
            training=TrainingSettings(**QUICK),
        )
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert {"spearman", "pearson"} <= result.metrics.keys()
    model = sentence_transformers.CrossEncoder(str(tmp_path / "model"), device="cpu")
    scores = model.predict([(r["query"], r["positive"]) for r in rows[48:]])
    truth = [r["score"] for r in rows[48:]]
    assert np.corrcoef(scores, truth)[0, 1] == pytest.approx(result.metrics["pearson"], abs=1e-4)


def test_refusals(checkpoint, pairs, tmp_path):
    with pytest.raises(TaskError, match="train, row 1: no column 'title'"):
        finetune_bi_encoder(
            checkpoint, pairs, output=tmp_path / "a", settings=PairSettings(second="title")
        )
    scored = [{**row, "score": "3"} for row in pairs]
    for function, low in ((finetune_bi_encoder, "-1"), (finetune_cross_encoder, "0")):
        with pytest.raises(TaskError, match=rf"'score' must lie in \[{low}, 1\], got '3'"):
            function(
                checkpoint, scored, output=tmp_path / "a", settings=PairSettings(score="score")
            )
    with pytest.raises(TaskError, match="is trained on scores"):
        finetune_cross_encoder(checkpoint, pairs, output=tmp_path / "a", settings=PairSettings())
