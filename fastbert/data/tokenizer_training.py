"""A tokenizer of one's own: WordPiece, byte-level BPE or Unigram, trained on texts."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from fastbert.data.reading import pieces_of, read_piece

KINDS = ("wordpiece", "bpe", "unigram")
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def train_tokenizer(
    texts: Iterable[str],
    *,
    kind: str = "wordpiece",
    vocab_size: int = 30_522,
    lowercase: bool = True,
    min_frequency: int = 2,
    max_length: int = 512,
    progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer that frames texts as BERT does: [CLS] A [SEP] B [SEP].

    WordPiece normalises and splits as BERT does, Chinese into characters; BPE works on bytes, as
    RoBERTa's, with a space before the first word; Unigram works on words with a written-out space,
    as ALBERT's. [PAD] has id 0 and the other special tokens follow.

    Args:
        texts: to train on.
        kind: "wordpiece", "bpe" or "unigram".
        vocab_size: with special tokens; small texts give fewer.
        lowercase: lower-case and strip accents.
        min_frequency: of a pair to be merged (not for unigram).
        max_length: `model_max_length` of the tokenizer.
        progress: show the training's bars.

    Returns:
        A tokenizer; `save_pretrained` writes a folder that `AutoTokenizer` loads.

    Raises:
        ValueError: an unknown kind, a vocabulary smaller than the special tokens.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if vocab_size <= len(SPECIAL):
        raise ValueError(f"vocab_size must exceed {len(SPECIAL)} special tokens, got {vocab_size}")
    tokenizer, trainer = _BUILDERS[kind](
        lowercase,
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        show_progress=progress,
        **({} if kind == "unigram" else {"min_frequency": min_frequency}),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **SPECIAL,
    )


def _wordpiece(lowercase: bool, **training):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(**training)


def _bpe(lowercase: bool, **training):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _plain_normalizer(lowercase, normalizers.NFC())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(initial_alphabet=alphabet, **training)


def _unigram(lowercase: bool, **training):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = _plain_normalizer(lowercase, normalizers.NFKC())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(unk_token="[UNK]", **training)


def _plain_normalizer(lowercase: bool, form):
    if not lowercase:
        return form
    steps = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(), form]
    return normalizers.Sequence(steps)


_BUILDERS = {"wordpiece": _wordpiece, "bpe": _bpe, "unigram": _unigram}


def texts_of(paths: Sequence[str | os.PathLike], column: str = "text") -> Iterator[str]:
    """The documents of text, JSONL and Parquet files, for training.

    Raises:
        FileNotFoundError: an input that is not there.
        CorpusError: an input that cannot be read.
    """
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file")
        for piece in pieces_of(path, 64 << 20, "line"):
            yield from read_piece(piece, documents="line", column=column)
