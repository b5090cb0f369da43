"""Text cut into sentences, and words of a user's segmentation laid over tokens.

BERT splits Chinese into characters, so that its vocabulary marks no words; a segmenter such as
jieba finds them, and whole-word masking then hides all characters of a word (Cui et al., "Pre-
Training with Whole Word Masking for Chinese BERT", 2019).
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

Segmenter = Callable[[str], Sequence[str]]

_BY_PUNCTUATION = re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f\uff1b])")


def by_line(text: str) -> list[str]:
    """A sentence a line."""
    return text.splitlines()


def by_punctuation(text: str) -> list[str]:
    """Cuts behind . ! ? and a space, and behind the Chinese marks; line ends are spaces.

    A rule of thumb: an abbreviation ends a sentence too.
    """
    return _BY_PUNCTUATION.split(" ".join(text.split()))


SENTENCES: dict[str, Callable[[str], list[str]]] = {
    "line": by_line,
    "punctuation": by_punctuation,
}


def jieba_segmenter() -> Segmenter:
    """jieba's words (accurate mode), as a function from a text to its words.

    Raises:
        ImportError: jieba is not installed.
    """
    try:
        import jieba
    except ImportError as error:
        raise ImportError(
            "segmentation by jieba needs the package: pip install 'fastbert[chinese]'"
        ) from error
    return jieba.lcut


def segmented_starts(
    text: str, offsets: Sequence[tuple[int, int]], segmenter: Segmenter
) -> np.ndarray:
    """Where words begin among the tokens of a text.

    A token begins a word unless a token of the same word stands before it.

    Args:
        text: as it was given to the tokenizer.
        offsets: characters of each token, `(start, end)`, as `tokenizers` returns them.
        segmenter: gives the words of a text; together they are the text.

    Returns:
        `(tokens,)` bool.

    Raises:
        ValueError: the words are not the text.
    """
    words = segmenter(text)
    if "".join(words) != text:
        raise ValueError(
            f"the segmenter must return the text in parts and change nothing, got "
            f"{'|'.join(words)[:80]!r} for {text[:80]!r}"
        )
    ends = np.cumsum([len(word) for word in words])
    word = np.searchsorted(ends, [start for start, _ in offsets], side="right")
    starts = np.ones(len(offsets), bool)
    starts[1:] = word[1:] != word[:-1]
    return starts
