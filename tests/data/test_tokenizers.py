"""Tokenizers trained here, and the commands that make a tokenizer and a corpus."""

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

from fastbert.cli.main import app
from fastbert.data import (
    Corpus,
    Documents,
    Masking,
    SpecialTokens,
    Vocabulary,
    masked_batch,
    pack_sentences,
    train_tokenizer,
)
from fastbert.data.sequences import cu_seqlens_of
from fastbert.data.tokenizer_training import KINDS
from fastbert.data.vocabulary import word_starts

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "unhappily the unkind king was unmoved by kindness",
    "a kingdom for a horse, said the unhappy king",
    "jumping foxes and lazing dogs make the kingdom happy",
]


@pytest.mark.parametrize("kind", KINDS)
def test_trained_tokenizers(kind, tmp_path):
    train_tokenizer(LINES * 4, kind=kind, vocab_size=320).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.is_fast and len(tokenizer) <= 320 and tokenizer.pad_token_id == 0
    assert tokenizer.model_max_length == 512
    pair = tokenizer(LINES[0], LINES[1])
    tokens = tokenizer.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and tokens.count("[SEP]") == 2
    types = [0] * (tokens.index("[SEP]") + 1)
    assert pair["token_type_ids"] == types + [1] * (len(tokens) - len(types))
    text = tokenizer.decode(pair["input_ids"], skip_special_tokens=True)
    assert text.split() == f"{LINES[0]} {LINES[1]}".split()
    # Upper case and accents are gone.
    assert tokenizer.tokenize("KING caf\u00e9") == tokenizer.tokenize("king cafe")


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", 60), ("bpe", 300), ("unigram", 60)])
def test_vocabulary_tells_words_of_every_kind(kind, size):
    """Words without punctuation: as many as the spaces say."""
    tokenizer = train_tokenizer(LINES * 4, kind=kind, vocab_size=size)
    vocabulary = Vocabulary.of(tokenizer)
    assert not np.isin(vocabulary.ordinary, tokenizer.all_special_ids).any()
    assert len(vocabulary.ordinary) == len(tokenizer) - 5
    rows = [tokenizer(line)["input_ids"] for line in (LINES[0], LINES[1], LINES[3])]
    ids = np.concatenate([np.array(row) for row in rows])
    starts = word_starts(ids, cu_seqlens_of(np.array([len(row) for row in rows])), vocabulary)
    words = sum(len(line.split()) for line in (LINES[0], LINES[1], LINES[3]))
    assert starts.sum() == words + 2 * 3
    assert len(ids) > words + 2 * 3


def test_arguments_that_are_none():
    with pytest.raises(ValueError, match="kind must be one of"):
        train_tokenizer(LINES, kind="letters")
    with pytest.raises(ValueError, match="vocab_size must exceed 5"):
        train_tokenizer(LINES, vocab_size=5)
    with pytest.raises(ValueError, match="no mask token"):
        Vocabulary.of(transformers.PreTrainedTokenizerFast(tokenizer_object=_plain()))
    with pytest.raises(ValueError, match="no cls_token and sep_token"):
        SpecialTokens.of(transformers.PreTrainedTokenizerFast(tokenizer_object=_plain()))


def _plain():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))


def _run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_commands(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES[:2]) + "\n\n" + "\n".join(LINES[2:]))
    run = _run("tokenizer", "train", text, "-o", tmp_path / "tokenizer", "--vocab-size", 200)
    assert run.exit_code == 0, run.output
    assert f"tokens in {tmp_path}" in run.output.replace("\n", "")
    run = _run(
        *("data", "prepare", text, "-t", tmp_path / "tokenizer", "-o", tmp_path / "corpus"),
        *("--workers", 1),
    )
    assert run.exit_code == 0, run.output
    assert "4 sentences, 2 documents" in run.output
    corpus = Corpus.open(tmp_path / "corpus")
    assert corpus.num_documents == 2
    # The corpus carries its tokenizer.
    transformers.AutoTokenizer.from_pretrained(tmp_path / "corpus" / "tokenizer")


@pytest.mark.parametrize(
    "arguments",
    [
        ("tokenizer", "train", "nothing.txt", "-o", "out"),
        ("data", "prepare", "nothing.txt", "-t", "{tokenizer}", "-o", "out"),
    ],
)
def test_commands_name_what_is_wrong(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    train_tokenizer(LINES, vocab_size=100).save_pretrained("tokenizer")
    run = _run(*(a.format(tokenizer="tokenizer") for a in arguments))
    assert run.exit_code == 2
    assert "nothing.txt is no file" in run.output


def test_real_text(shared_data, real_checkpoint):
    """A novel through BERT's own vocabulary: words whole, nothing lost, 15 % of it predicted."""
    from fastbert.data.segmentation import by_punctuation
    from fastbert.testing.proportions import assert_proportion

    tokenizer = transformers.AutoTokenizer.from_pretrained(real_checkpoint)
    vocabulary = Vocabulary.of(tokenizer)
    assert len(vocabulary.ordinary) < len(tokenizer) - 900
    path = shared_data / "data" / "text" / "gutenberg_nltk" / "carroll-alice.txt"
    sentences = by_punctuation(path.read_text("utf-8"))
    ids = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
    documents = Documents.of([ids], np.uint16)
    packed = pack_sentences(documents, SpecialTokens.of(tokenizer), 128)
    special = vocabulary.special[packed.input_ids]
    assert (packed.input_ids[~special] == documents.ids).all()
    # Whole sentences leave little room unused.
    assert packed.lengths.mean() > 100
    batch = masked_batch(
        packed, np.arange(len(packed)), vocabulary, Masking(unit="word"), seed=0, epoch=0
    )
    starts = word_starts(packed.input_ids, packed.cu_seqlens, vocabulary)
    masked = starts[batch.masked.positions].sum()
    assert_proportion(int(masked), int((starts & ~special).sum()), 0.15)


def test_a_tokenizer_is_not_written_into_a_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES))
    run = _run("tokenizer", "train", text, "-o", text)
    assert run.exit_code == 2 and "is no folder" in run.output
    assert text.read_text() == "\n".join(LINES)
