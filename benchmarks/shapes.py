"""Sizes, lengths and seeds of every benchmark, as literals."""

SEED = 20_260_101

# BERT-base (Devlin et al. 2019) and the 6-layer MiniLM encoder.
BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30_522,
}
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30_522,
}

# ModernBERT-base (Warner et al. 2024): 22 layers, every third global, the others with a window of
# 64 tokens to each side.
MODERNBERT = {
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "vocab_size": 50_368,
}

# DeBERTa-v3-base (He et al. 2023): positions in 256 logarithmic buckets to each side, projected by
# the weights of queries and keys.
DEBERTA_V3 = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 128_100,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "layer_norm_eps": 1e-7,
}

# RoBERTa-base, ELECTRA-base, DistilBERT and ALBERT-base; dropout 0.1 in all.
FAMILIES = {
    "Roberta": {**BASE, "vocab_size": 50_265},
    "Electra": {**BASE, "embedding_size": 768},
    "DistilBert": {
        "hidden_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "hidden_dim": 3072,
        "vocab_size": 30_522,
    },
    "Albert": {
        **BASE,
        "vocab_size": 30_000,
        "embedding_size": 128,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
}

# Lengths of the sequences of a batch, and the length it is padded to.
DENSE_8X128 = ([128] * 8, 128)
RAGGED_32X128 = (
    [
        *(128, 12, 9, 31, 44, 23, 17, 64, 8, 35, 27, 90, 14, 11, 52, 39),
        *(20, 16, 70, 6, 25, 33, 48, 10, 29, 18, 61, 22, 13, 40, 36, 95),
    ],
    128,
)
DENSE_4X512 = ([512] * 4, 512)
DENSE_8X512 = ([512] * 8, 512)
RAGGED_8X512 = ([512, 60, 190, 33, 410, 101, 275, 18], 512)
DENSE_4X2048 = ([2048] * 4, 2048)
# Long enough that some of its tokens carry a label.
TINY = ([21, 6, 13], 21)

BATCHES = {
    "dense-8x128": DENSE_8X128,
    "dense-8x512": DENSE_8X512,
    "ragged-32x128": RAGGED_32X128,
    "ragged-8x512": RAGGED_8X512,
}
MASKED = 0.15


def describe(batch: tuple[list[int], int]) -> str:
    """`1146 of 4096 tokens real (72 % padding)`."""
    lengths, longest = batch
    real, total = sum(lengths), len(lengths) * longest
    return f"{real} of {total} tokens real ({100 - round(100 * real / total)} % padding)"
