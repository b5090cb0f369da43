"""What masking knows of a tokenizer: special, ordinary and continuing ids.

Letters: N sequences, T tokens, V ids of the vocabulary.
"""

import re
from dataclasses import dataclass

import numpy as np

_PLACEHOLDER = re.compile(r"\[unused\d+\]|<unused\d+>|madeupword\d+")


@dataclass(frozen=True)
class Vocabulary:
    """What masking knows of a tokenizer.

    Attributes:
        mask_id: the id of the mask token.
        special: `(V,)` bool, ids that are never masked.
        ordinary: ids that may stand in for another.
        continues: `(V,)` bool, ids that continue a word; None where the ids do not tell.
    """

    mask_id: int
    special: np.ndarray
    ordinary: np.ndarray
    continues: np.ndarray | None = None

    @classmethod
    def of(cls, tokenizer) -> "Vocabulary":
        """Reads a transformers tokenizer.

        Special are its special tokens; ordinary all others but placeholders such as `[unused7]`.

        Raises:
            ValueError: no mask token, or no ordinary token.
        """
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "the tokenizer has no mask token; give it one with "
                "tokenizer.add_special_tokens({'mask_token': '[MASK]'})"
            )
        tokens = tokenizer.get_vocab()
        # Ids may have gaps, and added tokens lie behind the model's own vocabulary.
        size = max(tokens.values()) + 1
        special = np.zeros(size, bool)
        special[[i for i in tokenizer.all_special_ids if i < size]] = True
        for i, token in tokenizer.added_tokens_decoder.items():
            special[i] |= token.special
        usable = np.zeros(size, bool)
        usable[[i for token, i in tokens.items() if not _PLACEHOLDER.fullmatch(token)]] = True
        ordinary = np.flatnonzero(usable & ~special)
        if not ordinary.size:
            raise ValueError("the tokenizer has no token that is not special")
        return cls(tokenizer.mask_token_id, special, ordinary, _continues(tokenizer, tokens, size))


def _continues(tokenizer, tokens: dict[str, int], size: int) -> np.ndarray | None:
    """Ids that continue a word, by the marks of the tokenizer's kind; None without any marks.

    WordPiece marks what continues a word (`##ing`); byte-level BPE and SentencePiece mark what
    begins one, by a written-out space.
    """
    continues = np.zeros(size, bool)
    prefix = _continuing_prefix(tokenizer)
    if prefix and any(token.startswith(prefix) for token in tokens):
        continues[[i for token, i in tokens.items() if token.startswith(prefix)]] = True
        return continues
    for space in ("\u0120", "\u2581"):
        if any(token.startswith(space) for token in tokens):
            continues[[i for token, i in tokens.items() if not token.startswith(space)]] = True
            return continues
    return None


def _continuing_prefix(tokenizer) -> str | None:
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is None:
        return "##"
    return getattr(model, "continuing_subword_prefix", None)


def word_starts(ids: np.ndarray, cu_seqlens: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """`(T,)` bool, True where a word begins, told by the ids.

    A special token and the token behind it begin one.

    Raises:
        ValueError: the vocabulary does not mark words.
    """
    if vocabulary.continues is None:
        raise ValueError(
            "the tokenizer's vocabulary does not mark where words begin; give word_starts"
        )
    special = vocabulary.special[ids]
    starts = ~vocabulary.continues[ids] | special
    starts[1:] |= special[:-1]
    starts[cu_seqlens[:-1][np.diff(cu_seqlens) > 0]] = True
    return starts
