"""Documents as token ids: what packers and pairs read.

Letters: D documents, K sentences, T tokens of all documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fastbert.data.sequences import cu_seqlens_of


@dataclass(frozen=True)
class Documents:
    """Token ids of documents without special tokens; arrays may be memory-mapped.

    Attributes:
        ids: `(T,)` unsigned integers.
        sentences: `(K+1,)` int64, the token at which each sentence begins, and T.
        documents: `(D+1,)` int64, the sentence at which each document begins, and K.
        word_starts: `(T,)` bool, words of a user's segmentation; None without.
    """

    ids: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    word_starts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.documents) - 1

    def tokens_of(self, document: int) -> np.ndarray:
        """The ids of one document."""
        first, last = self.sentences[self.documents[[document, document + 1]]]
        return self.ids[first:last]

    @classmethod
    def of(cls, documents: Iterable[Sequence[Sequence[int]]], dtype=np.uint32) -> "Documents":
        """From lists: documents of sentences of ids. Empty sentences and documents are left out."""
        kept = [[s for s in document if len(s)] for document in documents]
        kept = [document for document in kept if document]
        sentences = [s for document in kept for s in document]
        flat = [np.asarray(s, dtype) for s in sentences]
        return cls(
            np.concatenate(flat) if flat else np.empty(0, dtype),
            cu_seqlens_of([len(s) for s in sentences]),
            cu_seqlens_of([len(document) for document in kept]),
        )


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that frame a sequence: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]."""

    cls_id: int
    sep_id: int

    @classmethod
    def of(cls, tokenizer) -> "SpecialTokens":
        """Reads a transformers tokenizer; `<s>` and `</s>` serve where it has no [CLS], [SEP].

        Raises:
            ValueError: it has neither.
        """
        first = tokenizer.cls_token_id
        last = tokenizer.sep_token_id
        first = tokenizer.bos_token_id if first is None else first
        last = tokenizer.eos_token_id if last is None else last
        if first is None or last is None:
            raise ValueError(
                "the tokenizer has no cls_token and sep_token; give it some with "
                "tokenizer.add_special_tokens"
            )
        return cls(first, last)
