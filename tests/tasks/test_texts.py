"""`fastbert fill-mask`, `rerank` and `similarity` give what others give for the same folder."""

import csv
import json

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

from fastbert.cli.main import app
from fastbert.tasks import TaskError
from fastbert.tasks.filling import FillMask, FillMaskSettings
from fastbert.tasks.ranking import Reranker, RerankSettings
from fastbert.testing.inputs import small_bert_config
from fastbert.testing.models import assert_packed

pytest.importorskip("tyro")
sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["the [MASK] fell", "a [MASK] and a [MASK] went to the old house by the sea", "[MASK]"]
PASSAGES = ["a river", "the old king of the long river and the sea", "bread"]
SENTENCES = [("a dog runs", "a dog is running"), ("a dog runs", "the stock fell"), ("", "x")]


def _run(*arguments, text=None, ok=True):
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=text)
    assert (result.exit_code == 0) is ok, result.output
    return result


def _objects(told):
    return [json.loads(line) for line in told.stdout.splitlines()]


def _lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def _kept(model_class, tokenizer, folder, **options):
    config = small_bert_config(
        vocab_size=len(tokenizer), num_hidden_layers=2, initializer_range=0.2, **options
    )
    transformers.set_seed(0)
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def masked(tokenizer, tmp_path_factory):
    return _kept(transformers.BertForMaskedLM, tokenizer, tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def crossed(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("crossed")
    return _kept(transformers.BertForSequenceClassification, tokenizer, folder, num_labels=1)


def test_fill_mask_as_the_pipeline(masked):
    with assert_packed():
        answers = _objects(_run("fill-mask", masked, "-", text=_lines({"text": t} for t in TEXTS)))
    pipe = transformers.pipeline("fill-mask", model=masked, device="cpu")
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = pipe(text)
        expected = [expected] if isinstance(expected[0], dict) else expected
        assert len(answer["masks"]) == len(expected) == text.count("[MASK]")
        for ours, theirs in zip(answer["masks"], expected, strict=True):
            assert [c["token"] for c in ours] == [c["token_str"] for c in theirs]
            scores = [[c["score"] for c in cs] for cs in (ours, theirs)]
            np.testing.assert_allclose(*scores, rtol=1e-4)
        best = iter(mask[0]["token"] for mask in answer["masks"])
        filled = "".join(next(best) if p == "[MASK]" else p for p in _split(text))
        assert answer["filled"] == filled


def _split(text):
    return [p for part in text.split("[MASK]") for p in (part, "[MASK]")][:-1]


def test_fill_mask_prints_a_table(masked, tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text("body\nthe ___ fell\n")
    options = ("--text", "body", "--mask", "___", "--top", 2, "--table")
    lines = _run("fill-mask", masked, path, *options).stdout.splitlines()
    assert lines[0].split("\t") == ["row", "mask", "token", "score"]
    assert [line.split("\t")[:2] for line in lines[1:]] == [["1", "1"]] * 2
    scores = [float(line.split("\t")[3]) for line in lines[1:]]
    assert scores[0] >= scores[1] > 0


def test_fill_mask_in_long_texts(masked, caplog):
    """A window's candidates are those of the window alone; a cut mask is told."""
    words = [f"{'sea' if n % 2 else 'king'}" for n in range(30)]
    words[21] = "[MASK]"
    row = {"text": " ".join(words)}
    settings = {"max_length": 16, "stride": 6}
    strided = FillMask(masked, FillMaskSettings(overlong="stride", **settings))
    (answer,) = strided.fill([row])
    # Windows of 14 words that share 6: of the two with the mask, 8 to 21 and 16 to 29, the latter.
    expected = strided.fill([{"text": " ".join(words[16:])}])
    for ours, theirs in zip(answer["masks"][0], expected[0]["masks"][0], strict=True):
        assert ours["token"] == theirs["token"]
        assert ours["score"] == pytest.approx(theirs["score"], rel=1e-5)
    assert answer["filled"] == row["text"].replace("[MASK]", answer["masks"][0][0]["token"])
    assert "1 of 1 rows have more than 16 tokens (up to 32) and are cut" in caplog.text
    with pytest.raises(TaskError, match="row 1: 1 of 1 masks stand behind the first 16 tokens"):
        FillMask(masked, FillMaskSettings(**settings)).fill([row])
    with pytest.raises(TaskError, match="has 32 tokens, at most 16 are taken"):
        FillMask(masked, FillMaskSettings(overlong="refuse", **settings)).fill([row])


def test_rerank_as_a_cross_encoder(crossed, tmp_path):
    queries = ["who rules ?", "what flows ?"]
    lists = [{"query": query, "passages": PASSAGES} for query in queries]
    with assert_packed():
        answers = _objects(_run("rerank", crossed, "-", text=_lines(lists)))
    model = sentence_transformers.CrossEncoder(crossed, device="cpu")
    for query, answer in zip(queries, answers, strict=True):
        scores = model.predict([(query, passage) for passage in PASSAGES])
        assert answer["query"] == query
        assert [one["index"] for one in answer["ranking"]] == np.argsort(-scores).tolist()
        for one in answer["ranking"]:
            assert one["passage"] == PASSAGES[one["index"]]
            assert one["score"] == pytest.approx(float(scores[one["index"]]), abs=1e-5)

    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "text"])
        writer.writerows((query, passage) for passage in PASSAGES for query in queries)
    options = ("--query", "question", "--passages", "text")
    assert _objects(_run("rerank", crossed, path, *options)) == answers
    told = _run("rerank", crossed, path, *options, "--top", 1, "--table").stdout.splitlines()
    assert told[0].split("\t") == ["query", "rank", "score", "passage"]
    best = [a["ranking"][0]["passage"] for a in answers]
    assert [line.split("\t")[3] for line in told[1:]] == best


def test_rerank_has_the_activation_of_the_folder(crossed, tmp_path):
    model = sentence_transformers.CrossEncoder(
        crossed, device="cpu", activation_fn=transformers.activations.nn.Identity()
    )
    model.save_pretrained(str(tmp_path / "plain"))
    pairs = [("who ?", passage) for passage in PASSAGES]
    scores = Reranker(tmp_path / "plain").scores(pairs)
    np.testing.assert_allclose(scores, model.predict(pairs), atol=1e-5)
    as_probabilities = Reranker(crossed).scores(pairs)
    np.testing.assert_allclose(as_probabilities, 1 / (1 + np.exp(-scores)), atol=1e-6)


def test_rerank_long_passages(crossed):
    """The best of a passage's windows counts."""
    words = [f"{'sea' if n % 2 else 'king'}" for n in range(18)]
    long, query = " ".join(words), "who"
    options = {"max_length": 16, "stride": 6}
    reranker = Reranker(crossed, RerankSettings(overlong="stride", **options))
    (score,) = reranker.scores([(query, long)])
    # Twelve words have room beside the query; windows share six.
    windows = [(query, " ".join(words[first : first + 12])) for first in (0, 6)]
    assert score == pytest.approx(reranker.scores(windows).max(), abs=1e-6)
    with pytest.raises(TaskError, match=r"pairs, pair 1 has \d+ tokens, at most 16 are taken"):
        Reranker(crossed, RerankSettings(overlong="refuse", **options)).scores([(query, long)])


def test_similarity_is_the_cosine(real_checkpoint, tmp_path):
    rows = [
        {"sentence1": one, "sentence2": two, "score": score}
        for (one, two), score in zip(SENTENCES, (5.0, 1.0, 0.0), strict=True)
    ]
    answers = _objects(_run("similarity", real_checkpoint, "-", text=_lines(rows)))
    model = sentence_transformers.SentenceTransformer(real_checkpoint, device="cpu")
    firsts, seconds = (model.encode([p[i] for p in SENTENCES]) for i in (0, 1))
    expected = model.similarity_pairwise(firsts, seconds).tolist()
    np.testing.assert_allclose([a["similarity"] for a in answers], expected, atol=1e-5)
    told = _run("similarity", real_checkpoint, "-", "--table", text=_lines(rows))
    assert told.stdout.splitlines()[0] == "similarity"
    told = _run("similarity", real_checkpoint, "-", "--score", "score", "--json", text=_lines(rows))
    metrics = json.loads(told.stdout)
    assert metrics["pearson"] == pytest.approx(np.corrcoef(expected, [5, 1, 0])[0, 1], abs=1e-5)
    ranks = np.argsort(np.argsort(expected))
    assert metrics["spearman"] == pytest.approx(np.corrcoef(ranks, [2, 1, 0])[0, 1])


def test_similarity_of_long_texts(real_checkpoint, caplog):
    long = " ".join(["the king went to the sea"] * 4)
    text = _lines([{"sentence1": long, "sentence2": "the king went to the sea"}])
    answers = {
        overlong: _objects(
            _run(
                *("similarity", real_checkpoint, "-", "--max-length", 16),
                *("--overlong", overlong, "--stride", 4),
                text=text,
            )
        )
        for overlong in ("truncate", "stride")
    }
    assert answers["truncate"] != answers["stride"]
    assert "1 of 2 texts, up to number 1, have more than 16 tokens and are cut" in caplog.text
    assert "and are encoded in overlapping windows" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (("fill-mask", "MASKED"), {"body": "a [MASK]"}, "row 1: no column 'text'; it has body"),
        (("fill-mask", "MASKED"), {"text": "a <mask>"}, "row 1: no [MASK] in 'a <mask>'"),
        (("fill-mask", "MASKED", "--top", "0"), {"text": "[MASK]"}, "top must be at least 1"),
        (("fill-mask", "PLAIN"), {"text": "[MASK]"}, "has no weights for cls.predictions"),
        (("rerank", "PLAIN"), {"query": "a", "passages": ["b"]}, "has no weights for classifier"),
        (("rerank", "CROSSED"), {"query": "a", "passages": [1]}, "must be a text or a list of"),
        (("rerank", "CROSSED", "--passages", "p"), {"query": "a"}, "no column 'p'"),
        (("similarity", "PLAIN"), {"sentence1": "a"}, "no column 'sentence2'"),
        (
            ("similarity", "PLAIN", "--overlong", "refuse", "--max-length", "4"),
            {"sentence1": "one two three", "sentence2": "a"},
            "has 5 tokens, max_seq_length is 4",
        ),
        (
            ("similarity", "PLAIN", "--score", "score"),
            {"sentence1": "a", "sentence2": "b", "score": "high"},
            "'score' must be a number, got 'high'",
        ),
    ],
)
def test_what_a_caller_can_mend_is_one_line(masked, crossed, checkpoint, arguments, text, message):
    places = {"MASKED": masked, "CROSSED": crossed, "PLAIN": checkpoint}
    command, model, *options = (places.get(a, a) for a in arguments)
    told = _run(command, model, "-", *options, text=_lines([text]), ok=False)
    assert message in told.stderr
    assert "Traceback" not in told.stderr
