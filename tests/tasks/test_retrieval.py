"""A bi-encoder and a cross-encoder are trained, kept, and used by sentence-transformers."""

import numpy as np
import pytest

from fastbert.tasks import TaskError, TrainingSettings
from fastbert.tasks.reranking import CrossEncoderSettings, finetune_cross_encoder
from fastbert.tasks.retrieval import BiEncoderSettings, finetune_bi_encoder
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
            settings=BiEncoderSettings(max_length=16),
            training=TrainingSettings(**QUICK),
        )
    assert result.metrics["accuracy@1"] > 0.8
    assert {"mrr@10", "ndcg@10", "recall@10"} <= result.metrics.keys()
    best = max(epoch["ndcg@10"] for epoch in result.history)
    assert result.metrics["ndcg@10"] == pytest.approx(best)
    assert "](learning.png)" in (tmp_path / "model" / "README.md").read_text()
    assert (tmp_path / "model" / "learning.png").is_file()
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert model.max_seq_length == 16
    found = _searched(model, judged)
    assert found == pytest.approx({name: result.metrics[name] for name in found})


def _searched(model, rows, more=()):
    """Recall, MRR and nDCG from their definitions: of the best ten, with gains of 1."""
    passages = list(dict.fromkeys([*(row["positive"] for row in rows), *more]))
    queries = list(dict.fromkeys(row["query"] for row in rows))
    vectors = [model.encode(texts).astype(np.float64) for texts in (queries, passages)]
    vectors = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors]
    best = np.argsort(-vectors[0] @ vectors[1].T, axis=1, kind="stable")[:, :10]
    recalls, reciprocals, gains = [], [], []
    for query, order in zip(queries, best, strict=True):
        relevant = {row["positive"] for row in rows if row["query"] == query}
        ranks = [rank for rank, index in enumerate(order, 1) if passages[index] in relevant]
        recalls.append(len(ranks) / len(relevant))
        reciprocals.append(1 / ranks[0] if ranks else 0)
        ideal = sum(1 / np.log2(rank + 1) for rank in range(1, min(len(relevant), 10) + 1))
        gains.append(sum(1 / np.log2(rank + 1) for rank in ranks) / ideal)
    return {
        "recall@10": np.mean(recalls),
        "mrr@10": np.mean(reciprocals),
        "ndcg@10": np.mean(gains),
    }


def test_search_with_several_passages_and_hard_negatives(checkpoint, pairs, tmp_path):
    """Sixteen queries and two right passages of each, after hardly any training."""
    rows = [
        {"query": f"{w} {n} ?", "positive": f"{w} {n} {side}", "wrong": f"{n} {w}"}
        for w in WORDS
        for n in ("here", "there")
        for side in ("left", "right")
    ]
    result = finetune_bi_encoder(
        checkpoint,
        rows,
        rows,
        output=tmp_path / "model",
        settings=BiEncoderSettings(max_length=16, negative="wrong"),
        training=TrainingSettings(epochs=1, batch_size=8),
    )
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    found = _searched(model, rows, [row["wrong"] for row in rows])
    assert found == pytest.approx({name: result.metrics[name] for name in found})


@pytest.mark.slow
def test_chunks_change_memory_not_gradients(checkpoint, pairs, tmp_path):
    losses = []
    for chunk in (None, 3):
        result = finetune_bi_encoder(
            checkpoint,
            pairs[:16],
            pairs[16:24],
            output=tmp_path / str(chunk),
            settings=BiEncoderSettings(max_length=16, chunk=chunk),
            training=TrainingSettings(**{**QUICK, "epochs": 2}),
        )
        losses.append([epoch["train_loss"] for epoch in result.history])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def _ranks(values):
    """Ranks, of equal values their mean."""
    values = np.asarray(values)
    return [(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values]


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
        settings=BiEncoderSettings(score="score", max_length=16),
        training=TrainingSettings(**QUICK),
    )
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    firsts, seconds = (model.encode([r[c] for r in rows[48:]]) for c in ("query", "positive"))
    norms = np.linalg.norm(firsts, axis=1) * np.linalg.norm(seconds, axis=1)
    cosines = (firsts * seconds).sum(1) / norms
    ranks = [_ranks(values) for values in (cosines, [row["score"] for row in rows[48:]])]
    assert np.corrcoef(*ranks)[0, 1] == pytest.approx(result.metrics["spearman"], abs=1e-3)
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


@pytest.mark.parametrize("loss", ["binary", pytest.param("regression", marks=pytest.mark.slow)])
def test_cross_encoder(checkpoint, pairs, loss, tmp_path):
    rows = _scored(pairs)
    with assert_packed():
        result = finetune_cross_encoder(
            checkpoint,
            rows[:48],
            rows[48:],
            output=tmp_path / "model",
            settings=CrossEncoderSettings(second="positive", loss=loss, max_length=32),
            training=TrainingSettings(**QUICK),
        )
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    assert {"spearman", "pearson"} <= result.metrics.keys()
    model = sentence_transformers.CrossEncoder(str(tmp_path / "model"), device="cpu")
    scores = model.predict([(r["query"], r["positive"]) for r in rows[48:]])
    truth = [r["score"] for r in rows[48:]]
    assert np.corrcoef(scores, truth)[0, 1] == pytest.approx(result.metrics["pearson"], abs=1e-4)
    if loss == "regression":
        error = np.mean((scores - np.array(truth)) ** 2)
        assert error < np.mean(np.square(truth))


def test_cross_encoder_learns_an_order(checkpoint, tmp_path):
    """Of four passages the one that repeats the word comes first, the one beside it second."""
    rows = [
        {"query": word, "passage": passage, "score": score}
        for index, word in enumerate(WORDS)
        for passage, score in (
            (f"the {word}", 2),
            (f"{word} and {WORDS[index - 1]}", 1),
            (f"the {WORDS[index - 1]}", 0),
            (WORDS[index - 2], "0"),
        )
    ]
    with assert_packed():
        result = finetune_cross_encoder(
            checkpoint,
            rows,
            rows,
            output=tmp_path / "model",
            settings=CrossEncoderSettings(loss="listwise", max_length=16),
            training=TrainingSettings(**{**QUICK, "epochs": 4}),
        )
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    model = sentence_transformers.CrossEncoder(str(tmp_path / "model"), device="cpu")
    scores = model.predict([(r["query"], r["passage"]) for r in rows]).reshape(-1, 4)
    gains, reciprocals = [], []
    for order in np.argsort(-scores, axis=1):
        ranks = [rank for rank, index in enumerate(order, 1) if index < 2]
        gains.append(sum(1 / np.log2(r + 1) for r in ranks) / (1 + 1 / np.log2(3)))
        reciprocals.append(1 / ranks[0])
    assert result.metrics["ndcg@10"] == pytest.approx(np.mean(gains))
    assert result.metrics["mrr@10"] == pytest.approx(np.mean(reciprocals))


def test_overlong_texts_are_told_or_refused(checkpoint, pairs, tmp_path, caplog):
    rows = [
        {**row, "score": index % 2, "positive": row["positive"] + " again and again"}
        for index, row in enumerate(pairs[:12])
    ]
    for function, kind, count in (
        (finetune_bi_encoder, BiEncoderSettings, "train: 8 of 8 texts have more than 8 tokens"),
        (finetune_cross_encoder, CrossEncoderSettings, "train: 8 of 8 texts have more than 8"),
    ):
        options = {"second": "positive", "max_length": 8}
        with pytest.raises(TaskError, match=f"{count}.* raise max_length"):
            function(
                checkpoint,
                rows[:8],
                rows[8:],
                output=tmp_path / "refused",
                settings=kind(overlong="refuse", **options),
            )
    function(
        checkpoint,
        rows[:8],
        rows[8:],
        output=tmp_path / "cut",
        settings=kind(**options),
        training=TrainingSettings(epochs=1),
    )
    assert "train: 8 of 8 texts have more than 8 tokens (up to 17) and are truncated" in caplog.text


def test_refusals(checkpoint, pairs, tmp_path):
    def refused(message, rows=pairs, kind=BiEncoderSettings, **settings):
        bi = kind is BiEncoderSettings
        with pytest.raises(TaskError, match=message):
            (finetune_bi_encoder if bi else finetune_cross_encoder)(
                checkpoint, rows, output=tmp_path / "a", settings=kind(**settings)
            )

    scored = [{**row, "passage": row["positive"], "score": "3"} for row in pairs]
    refused("train, row 1: no column 'title'", second="title")
    refused("no column 'wrong'.*by --negative", negative="wrong")
    refused(r"'score' must be a number in \[-1, 1\], got '3'", scored, score="score")
    refused(r"'score' must be a number in \[0, 1\], got '3'", scored, CrossEncoderSettings)
    bad = [{**row, "score": "much"} for row in scored]
    for loss, wanted in (("regression", "a number"), ("listwise", r"a number in \[0, inf\]")):
        refused(f"must be {wanted}, got 'much'", bad, CrossEncoderSettings, loss=loss)
    listwise = {"kind": CrossEncoderSettings, "loss": "listwise"}
    refused("all training rows have the score 3.0, so there is nothing", scored, **listwise)
    scored = [{**row, "score": 3 + number % 2} for number, row in enumerate(scored)]
    refused("there is no order to judge", scored, **listwise)
    refused("loss must be one of", kind=CrossEncoderSettings, loss="hinge")
    refused("overlong must be one of", overlong="stride")
    refused("chunk must be at least 1", chunk=0)
    refused("chunk has no meaning beside a score", chunk=2, score="score")
    assert not list(tmp_path.iterdir())
