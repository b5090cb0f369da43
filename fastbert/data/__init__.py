"""Pretraining data: from raw text to masked batches.

`prepare` writes a `Corpus` of token ids once; `pack_sentences`, `next_sentence_pairs` and
`sentence_order_pairs` make training sequences of it; `TokenBudgetSampler` chooses the batches of
each rank and `masked_batch` masks one. The collators offer the same masking to transformers'
Trainer.
"""

from fastbert.lazy import exports

# Workers that only tokenize need neither torch nor transformers.
_EXPORTS = {
    "Batch": ".sequences",
    "Corpus": ".corpus",
    "CorpusError": ".reading",
    "DataCollatorForLanguageModeling": ".collators",
    "DataCollatorForWholeWordMask": ".collators",
    "Documents": ".documents",
    "MaskedTokens": ".masking",
    "Masking": ".masking",
    "RateSchedule": ".masking",
    "Sequences": ".sequences",
    "SpecialTokens": ".documents",
    "TokenBudgetSampler": ".sampler",
    "Vocabulary": ".vocabulary",
    "concatenate": ".sequences",
    "geometric_lengths": ".masking",
    "inverse_lengths": ".masking",
    "mask_tokens": ".masking",
    "masked_batch": ".sequences",
    "next_sentence_pairs": ".pairs",
    "pack_sentences": ".packing",
    "pad_rows": ".sequences",
    "prepare": ".preparation",
    "sentence_order_pairs": ".pairs",
    "train_tokenizer": ".tokenizer_training",
}

__all__ = sorted(_EXPORTS)
__getattr__, __dir__ = exports(__name__, _EXPORTS)
