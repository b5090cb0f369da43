"""fastbert.Embedder: sentence-transformers' numbers, alone and in any batch; bad input refused."""

import json
import shutil

import numpy as np
import pytest
import torch

import fastbert
from fastbert.testing.models import assert_packed

TEXTS = [
    "Yes.",
    "",
    "A sentence of ordinary length, with numbers such as 42, and a (parenthesis).",
    "Long " * 300,
    "The cat sat on the mat.",
]


@pytest.fixture(scope="module")
def embedder(real_checkpoint):
    return fastbert.Embedder(real_checkpoint, tokens_per_batch=64)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_equals_sentence_transformers(real_checkpoint, tmp_path, pooling):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = tmp_path / "model"
    shutil.copytree(real_checkpoint, folder)
    path = folder / "1_Pooling" / "config.json"
    modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    config = {f"pooling_mode_{m}": name == pooling for name, m in modes.items()}
    path.write_text(json.dumps({"word_embedding_dimension": 384, **config}))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = fastbert.Embedder(folder)
    for name in (None, "query"):
        with assert_packed():
            actual = ours.encode(TEXTS, prompt_name=name)
        np.testing.assert_allclose(actual, theirs.encode(TEXTS, prompt_name=name), atol=2e-6)


def test_a_text_has_the_same_vector_in_any_batch(embedder):
    together = embedder.encode(TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.array_equal(embedder.encode([text])[0], vector)
    assert np.array_equal(embedder.encode(TEXTS[::-1])[::-1], together)


def test_stream_and_forms_of_output(embedder):
    vectors = embedder.encode(TEXTS)
    assert np.array_equal(np.stack(list(embedder.stream(iter(TEXTS)))), vectors)
    half = embedder.encode(TEXTS, output="torch", dtype="float16")
    assert torch.equal(half, torch.from_numpy(vectors).half())
    assert embedder.encode([]).shape == (0, 384)


def test_bad_input_is_refused(embedder, real_checkpoint):
    with pytest.raises(TypeError, match="one string"):
        embedder.encode("text")
    with pytest.raises(TypeError, match="text 1 must be a string, got NoneType"):
        embedder.encode(["a", None])
    with pytest.raises(ValueError, match="prompt_name"):
        embedder.encode(["a"], prompt_name="query")
    strict = fastbert.Embedder(real_checkpoint, truncation="refuse")
    with pytest.raises(ValueError, match="text 3 has 302 tokens"):
        strict.encode(TEXTS)


def test_unknown_module_is_refused(tmp_path):
    modules = [{"path": "", "type": "sentence_transformers.models.WordEmbeddings"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(NotImplementedError, match="WordEmbeddings"):
        fastbert.Embedder(tmp_path)


def test_windows_of_long_texts(real_checkpoint, caplog):
    """The mean of the windows' vectors, at length 1 as the folder says; short texts as ever."""
    words = ["king", "sea"] * 10
    options = {"max_seq_length": 16, "stride": 4}
    strided = fastbert.Embedder(real_checkpoint, truncation="stride", **options)
    texts = ["short", " ".join(words), "another"]
    vectors = strided.encode(texts)
    # Windows of 14 words that share four.
    windows = strided.encode([" ".join(words[:14]), " ".join(words[10:])])
    mean = windows.mean(0)
    np.testing.assert_allclose(vectors[1], mean / np.linalg.norm(mean), atol=1e-6)
    cut = fastbert.Embedder(real_checkpoint, **options)
    assert np.array_equal(vectors[::2], cut.encode(texts)[::2])
    assert np.array_equal(cut.encode(texts[1:2]), windows[:1])
    assert "1 of 3 texts, up to number 2, have more than 16 tokens and are cut" in caplog.text
    assert "and are encoded in overlapping windows" in caplog.text
    with pytest.raises(ValueError, match="stride must lie between 0 and max_seq_length - 8"):
        fastbert.Embedder(real_checkpoint, truncation="stride", stride=8, max_seq_length=16)
