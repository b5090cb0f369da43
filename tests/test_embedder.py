"""fastbert.Embedder: sentence-transformers' numbers, alone and in any batch; bad input refused."""

import itertools
import json
import shutil
import threading

import numpy as np
import pytest
import torch
import transformers

import fastbert
from fastbert import extension
from fastbert.embedder import positions_of
from fastbert.embedding_workers import shares
from fastbert.sentence_modules import POOLINGS
from fastbert.testing.models import assert_packed

TEXTS = [
    "Yes.",
    "",
    "A sentence of ordinary length, with numbers such as 42, and a (parenthesis).",
    "Long " * 300,
    "The cat sat on the mat.",
]
OLD_FLAGS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}


@pytest.fixture(scope="module")
def embedder(real_checkpoint):
    return fastbert.Embedder(real_checkpoint, tokens_per_batch=64)


@pytest.fixture
def folder(real_checkpoint, tmp_path):
    """A copy of the real model's folder, to change."""
    copy = tmp_path / "model"
    shutil.copytree(real_checkpoint, copy)
    return copy


def _assert_equal_to_theirs(folder, **options):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours = fastbert.Embedder(folder)
    with assert_packed():
        actual = ours.encode(TEXTS, **options)
    expected = theirs.encode(TEXTS, **options)
    assert actual.shape == expected.shape == (len(TEXTS), ours.dimension)
    np.testing.assert_allclose(actual, expected, atol=2e-6, rtol=2e-6)
    return actual


def _write(path, config: dict) -> None:
    path.write_text(json.dumps(config))


# --- sentence-transformers' numbers ---------------------------------------------------------------


@pytest.mark.parametrize("pooling", [*POOLINGS, ("lasttoken", "weightedmean", "mean")], ids=str)
def test_equals_sentence_transformers(folder, pooling):
    """With a prompt whose tokens are not pooled, and without one."""
    config = {"embedding_dimension": 384, "pooling_mode": pooling, "include_prompt": False}
    _write(folder / "1_Pooling" / "config.json", config)
    prompts = {"prompts": {"query": "Given a question, find: "}, "default_prompt_name": "query"}
    _write(folder / "config_sentence_transformers.json", prompts)
    _assert_equal_to_theirs(folder)
    _assert_equal_to_theirs(folder, prompt="")


@pytest.mark.parametrize("pooling", [["cls"], ["max", "mean", "cls"], []])
def test_older_configurations_equal_sentence_transformers(folder, pooling):
    """A flag for each pooling, put side by side in an order of their own; mean without any."""
    config = {f"pooling_mode_{flag}": name in pooling for name, flag in OLD_FLAGS.items()}
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 384, **config})
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    _write(folder / "config_sentence_transformers.json", prompts)
    _assert_equal_to_theirs(folder, prompt_name="query")


@pytest.mark.parametrize(("activation", "residual"), [("Tanh", True), ("Identity", False)])
def test_modules_behind_the_pooling_equal_sentence_transformers(folder, activation, residual):
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize

    encoder, pooling, _ = SentenceTransformer(str(folder), device="cpu")
    act = getattr(torch.nn, activation)()
    behind = [
        Dense(384, 48, activation_function=act, use_residual=residual),
        modules.Dropout(0.5),
        modules.LayerNorm(48),
        Dense(48, 48, bias=False, activation_function=act, use_residual=residual),
        Normalize(),
    ]
    torch.nn.init.normal_(behind[2].norm.weight)
    saved = folder.with_name("saved")
    SentenceTransformer(modules=[encoder, pooling, *behind]).save(str(saved))
    assert _assert_equal_to_theirs(saved).shape[1] == 48


def test_lowercases_as_sentence_transformers(folder):
    """Before the tokenizer, letter by letter: a sigma that ends a word is an ordinary one."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    plain = _assert_equal_to_theirs(folder)
    assert np.array_equal(plain[2], fastbert.Embedder(folder).encode([TEXTS[2].upper()])[0])
    sigmas = fastbert.Embedder(folder).encode(["ΟΔΟΣ", "οδοσ", "οδος"])
    assert np.array_equal(sigmas[0], sigmas[1]) and not np.array_equal(sigmas[0], sigmas[2])


# --- what the arguments change --------------------------------------------------------------------


def test_pooling_and_normalize_over_the_folders(real_checkpoint, embedder):
    both = fastbert.Embedder(real_checkpoint, pooling=("max", "mean"), normalize=False)
    assert both.dimension == 768
    means = both.encode(TEXTS)[:, 384:]
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    np.testing.assert_allclose(embedder.encode(TEXTS), expected, atol=1e-7)
    assert fastbert.Embedder(real_checkpoint, normalize=True).description()["behind"] == [
        "Normalize"
    ]


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
    halves = np.stack(list(embedder.stream(TEXTS, dtype="float16")))
    assert np.array_equal(halves, half.numpy())
    assert embedder.encode([]).shape == (0, 384)


def test_stream_reads_little_ahead_in_the_callers_thread(real_checkpoint):
    bounded = fastbert.Embedder(real_checkpoint, texts_at_once=4)
    read = []

    def endless():
        for number in itertools.count():
            read.append(threading.get_ident())
            yield f"Text {number}."

    for count, _ in enumerate(bounded.stream(endless()), 1):
        assert len(read) <= count + 2 * 4
        if count == 30:
            break
    assert set(read) == {threading.get_ident()}


# --- workers --------------------------------------------------------------------------------------


def test_workers_give_the_same_bits(real_checkpoint):
    texts = [f"{text} {number}" for number in range(5) for text in TEXTS]
    settings = {"max_seq_length": 400, "truncation": "refuse"}
    alone = fastbert.Embedder(real_checkpoint, **settings)
    with fastbert.Embedder(real_checkpoint, workers=2, texts_at_once=4, **settings) as shared:
        expected = alone.encode(texts)
        assert np.array_equal(shared.encode(texts), expected)
        assert np.array_equal(np.stack(list(shared.stream(iter(texts)))), expected)
        with pytest.raises(ValueError, match="text 7 has 502 tokens"):
            shared.encode([*texts[:7], "Long " * 500])
        torch.set_float32_matmul_precision("high")
        try:
            assert np.array_equal(shared.encode(texts), alone.encode(texts))
        finally:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not extension.cpu_isas(), reason="a frozen model runs by C++")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_frozen_encoder_gives_the_same_bits(real_checkpoint, workers):
    torch.set_float32_matmul_precision("high")
    try:
        expected = fastbert.Embedder(real_checkpoint).encode(TEXTS)
        with fastbert.Embedder(real_checkpoint, freeze=True, workers=workers) as frozen:
            assert np.array_equal(frozen.encode(TEXTS), expected)
            assert frozen.model.encoder.layer[0].output.dense.weight.device.type == "meta"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not extension.cpu_isas(), reason="a quantised model runs by C++")
def test_a_quantised_encoder(real_checkpoint):
    exact = fastbert.Embedder(real_checkpoint)
    expected = exact.encode(TEXTS)
    quantised = fastbert.Embedder(real_checkpoint, quantize="dynamic")
    vectors = quantised.encode(TEXTS)
    cosines = (vectors * expected).sum(1)
    assert 0.99 < cosines.min() < 1 - 1e-6
    assert quantised.description()["quantize"] == "dynamic"
    assert "quantize" not in exact.description()
    with fastbert.Embedder(real_checkpoint, quantize="dynamic", workers=2) as shared:
        assert np.array_equal(shared.encode(TEXTS), vectors)
    with pytest.raises(ValueError, match="mode must be 'weight_only' or 'dynamic', got 'int4'"):
        fastbert.Embedder(real_checkpoint, quantize="int4")


def test_cores_are_shared_out():
    assert shares([0, 1, 2, 5, 6, 7, 8], 3) == [[0, 1], [2, 5], [6, 7, 8]]
    assert shares([3, 4], 2) == [[3], [4]]
    assert shares([3], 2) == [[], []]


# --- bad input ------------------------------------------------------------------------------------


def test_bad_input_is_refused(embedder, real_checkpoint):
    with pytest.raises(TypeError, match="list of strings, got NoneType; `stream` takes"):
        embedder.encode(None)
    with pytest.raises(TypeError, match="one string"):
        embedder.encode("text")
    with pytest.raises(TypeError, match="text 1 must be a string, got NoneType"):
        embedder.encode(["a", None])
    with pytest.raises(ValueError, match="prompt_name"):
        embedder.encode(["a"], prompt_name="query")
    with pytest.raises(ValueError, match=r"dtype must be one of .* got 'int8'"):
        next(embedder.stream(["a"], dtype="int8"))
    strict = fastbert.Embedder(real_checkpoint, truncation="refuse")
    with pytest.raises(ValueError, match="text 3 has 302 tokens"):
        strict.encode(TEXTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_length": 513}, "513, the encoder has 512 positions; give max_seq_length=512"),
        ({"max_seq_length": 2}, "more than the 2 special tokens of every text, got 2"),
        ({"pooling": ("mean", "median")}, "pooling must be one of .* got mean, median"),
        ({"pooling": ()}, "pooling must be one of .* got none"),
        ({"truncation": "wrap"}, "truncation must be one of"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"workers": 2, "device": "meta"}, "workers must be 1 on meta, got 2"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(real_checkpoint, settings, message):
    with pytest.raises(ValueError, match=message):
        fastbert.Embedder(real_checkpoint, **settings)


def test_the_folders_length_is_held_to_the_positions(folder):
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 1024})
    with pytest.raises(ValueError, match="max_seq_length is 1024, the encoder has 512 positions"):
        fastbert.Embedder(folder)


def test_positions_of_robertas_begin_behind_the_padding():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"intermediate_size": 8, "vocab_size": 9, "max_position_embeddings": 514}
    roberta = fastbert.RobertaModel(transformers.RobertaConfig(pad_token_id=1, **sizes))
    bert = fastbert.BertModel(transformers.BertConfig(**sizes))
    assert (roberta.first_position, positions_of(roberta)) == (2, 512)
    assert (bert.first_position, positions_of(bert)) == (0, 514)


def test_a_prompt_that_leaves_nothing_is_refused(folder):
    config = {"pooling_mode": "mean", "include_prompt": False, "embedding_dimension": 384}
    _write(folder / "1_Pooling" / "config.json", config)
    # Without [SEP], which would be left of a text that is cut at the prompt's end.
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    _write(folder / "tokenizer.json", tokenizer)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    short = fastbert.Embedder(folder, max_seq_length=4)
    assert short.encode(["a cat"], prompt="one two ").shape == (1, 384)
    with pytest.raises(ValueError, match="text 0 has 4 tokens, of which 4 of the prompt"):
        short.encode(["a cat"], prompt="one two three four ")


DENSE = {"in_features": 384, "out_features": 2}


@pytest.mark.parametrize(
    ("kind", "config", "error", "message"),
    [
        ("sentence_transformers.models.CNN", {}, NotImplementedError, "module 3 .*models.CNN"),
        ("custom.Normalize", {}, NotImplementedError, "module 3 of .* is custom.Normalize"),
        ("sentence_transformers.models.Pooling", {}, NotImplementedError, "module 3 .*Pooling"),
        ("sentence_transformers.models.Dense", DENSE, FileNotFoundError, "model.safetensors"),
        (
            "sentence_transformers.models.Dense",
            {**DENSE, "activation_function": "os.system"},
            NotImplementedError,
            "'os.system', which is no module of torch.nn",
        ),
        (
            "sentence_transformers.models.Normalize",
            {"module_input_name": "token_embeddings"},
            NotImplementedError,
            "module_input_name of .* is 'token_embeddings'",
        ),
    ],
)
def test_unknown_modules_are_refused(folder, kind, config, error, message):
    modules = json.loads((folder / "modules.json").read_text())
    _write(folder / "modules.json", [*modules, {"path": "3_Other", "type": kind}])
    (folder / "3_Other").mkdir()
    _write(folder / "3_Other" / "config.json", config)
    if "activation_function" in config:
        weights = {"linear.weight": torch.zeros(2, 384), "linear.bias": torch.zeros(2)}
        torch.save(weights, folder / "3_Other" / "pytorch_model.bin")
    with pytest.raises(error, match=message):
        fastbert.Embedder(folder)


def test_a_first_module_that_is_no_encoder_is_refused(tmp_path):
    modules = [{"path": "", "type": "sentence_transformers.models.WordEmbeddings"}]
    _write(tmp_path / "modules.json", modules)
    with pytest.raises(NotImplementedError, match="WordEmbeddings"):
        fastbert.Embedder(tmp_path)


def test_modules_that_do_not_fit_are_refused(folder):
    modules = json.loads((folder / "modules.json").read_text())
    dense = {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    _write(folder / "modules.json", [*modules, dense])
    (folder / "3_Dense").mkdir()
    _write(folder / "3_Dense" / "config.json", {**DENSE, "bias": False})
    torch.save({"linear.weight": torch.zeros(2, 384)}, folder / "3_Dense" / "pytorch_model.bin")
    assert fastbert.Embedder(folder).encode(["a"]).shape == (1, 2)
    with pytest.raises(ValueError, match="makes vectors of 768, its Dense takes 384"):
        fastbert.Embedder(folder, pooling=("cls", "mean"))


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
