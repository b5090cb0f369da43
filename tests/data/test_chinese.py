"""Chinese: characters as BERT splits them, and words of a segmentation masked as a whole."""

from pathlib import Path

import numpy as np
import pytest

from fastbert.data import (
    Masking,
    SpecialTokens,
    Vocabulary,
    masked_batch,
    pack_sentences,
    prepare,
    train_tokenizer,
)
from fastbert.data.segmentation import by_punctuation, jieba_segmenter, segmented_starts

FILE = Path(__file__).with_name("chinese.txt")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(FILE.read_text("utf-8").splitlines(), vocab_size=600, min_frequency=1)


def test_characters_are_tokens(tokenizer):
    sentences = [line for line in FILE.read_text("utf-8").splitlines() if line]
    assert len(sentences) >= 36
    for sentence in sentences:
        tokens = tokenizer.tokenize(sentence)
        assert [t for t in tokens if not t.isascii()] == [c for c in sentence if not c.isascii()]
        assert "[UNK]" not in tokens


def _starts(tokenizer, text, words):
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = segmented_starts(text, offsets["offset_mapping"], lambda _: words)
    return starts.tolist()


def test_words_of_a_segmentation(tokenizer):
    # "Library" (3 characters), "in", "read a book" (2).
    text, words = (
        "\u56fe\u4e66\u9986\u91cc\u770b\u4e66",
        ["\u56fe\u4e66\u9986", "\u91cc", "\u770b\u4e66"],
    )
    assert _starts(tokenizer, text, words) == [True, False, False, True, True, False]
    # Pieces of a Latin word are one word, too.
    words = ["\u7528", " ", "Python", " ", "\u5199"]
    starts = _starts(tokenizer, "".join(words), words)
    assert starts[0] and starts[1] and starts[-1] and not any(starts[2:-1])
    with pytest.raises(ValueError, match="change nothing"):
        _starts(tokenizer, "".join(words), ["\u7528", "Python"])


def test_sentences_by_punctuation():
    text = '\u5929\u6c14\u597d\u3002\u4ed6\u8d70\u4e86\uff01 It is. "Was it?" Yes'
    assert [s.strip() for s in by_punctuation(text) if s.strip()] == [
        "\u5929\u6c14\u597d\u3002",
        "\u4ed6\u8d70\u4e86\uff01",
        "It is.",
        '"Was it?',
        "Yes",
    ]


def _masked_words(tokenizer, folder, segmenter):
    """A prepared corpus, and the fate of each of its tokens over many epochs."""
    corpus = prepare(FILE, tokenizer, folder, segmenter=segmenter, workers=1, progress=False)
    documents = corpus.shard(0)
    assert len(documents) == 5 and corpus.num_sentences >= 36
    packed = pack_sentences(documents, SpecialTokens.of(tokenizer), 48)
    vocabulary = Vocabulary.of(tokenizer)
    fates = []
    for epoch in range(60):
        batch = masked_batch(
            packed,
            np.arange(len(packed)),
            vocabulary,
            Masking(0.3, unit="word"),
            seed=0,
            epoch=epoch,
        )
        fates.append(batch.masked.dense_labels() != -100)
    return packed, np.array(fates)


def test_jieba_words_are_masked_as_a_whole(tokenizer, tmp_path):
    pytest.importorskip("jieba")
    packed, fates = _masked_words(tokenizer, tmp_path / "words", "jieba")
    ids = packed.input_ids
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    seen = 0
    segment = jieba_segmenter()
    for place in np.flatnonzero(~packed.word_starts):
        assert (fates[:, place] == fates[:, place - 1]).all()
        seen += 1
    assert seen > 100 and fates.any(0)[~packed.word_starts].all()
    # The stored words are jieba's.
    pairs = zip(tokens, packed.word_starts, strict=True)
    joined = "".join((" " if start else "") + token for token, start in pairs)
    for word in segment("\u5927\u5b66\u56fe\u4e66\u9986\u6536\u85cf\u4e86"):
        assert f" {word}" in joined


def test_without_a_segmentation_characters_are_words(tokenizer, tmp_path):
    packed, fates = _masked_words(tokenizer, tmp_path / "characters", None)
    assert packed.word_starts is None
    # "Beijing is" begins the second sentence: two characters with fates of their own.
    tokens = tokenizer.convert_ids_to_tokens(packed.input_ids.tolist())
    place = tokens.index("\u4eac")
    assert tokens[place - 1] == "\u5317"
    assert (fates[:, place] != fates[:, place - 1]).any()
