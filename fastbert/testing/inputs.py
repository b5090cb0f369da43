"""Inputs of the tests: ragged lengths, strided views, padded batches, small configurations."""

from collections.abc import Sequence

import torch
import transformers


def cu_seqlens(lengths: Sequence[int]) -> torch.Tensor:
    """`(B+1,)` int32: where each sequence starts, and the end."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def noncontiguous(x: torch.Tensor) -> torch.Tensor:
    """The values of `x` in a tensor whose rows are not adjacent (whose elements, if it is 1D)."""
    if x.dim() < 2:
        return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def padded_batch(
    lengths: Sequence[int],
    vocab_size: int,
    *,
    side: str = "right",
    seed: int = 0,
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """`(B, S)` input_ids, attention_mask, token_type_ids; S is the longest length.

    Args:
        lengths: real tokens per row.
        vocab_size: ids are drawn from 1 to vocab_size - 1.
        side: `right`, `left`, or `holes` for padding at random places.
        seed: of everything drawn.
        pad_token_id: id of padding; one that is not 0 stands in texts too.
    """
    generator = torch.Generator().manual_seed(seed)
    size, longest = len(lengths), max(lengths)
    ids = torch.randint(1, vocab_size, (size, longest), generator=generator)
    types = torch.randint(0, 2, (size, longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        if side == "right":
            mask[row, :length] = 1
        elif side == "left":
            mask[row, longest - length :] = 1
        else:
            mask[row, torch.randperm(longest, generator=generator)[:length]] = 1
    ids = ids.masked_fill(mask == 0, pad_token_id)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def small_bert_config(**overrides) -> transformers.BertConfig:
    """A BERT of 3 layers, 48 features, 4 heads, 99 tokens, 64 positions; anything overridable."""
    settings = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "num_labels": 3,
    }
    return transformers.BertConfig(**{**settings, **overrides})


# ALBERT's probabilities are 0 by default.
OF_FAMILY = {
    "ModernBert": {
        "pad_token_id": 0,
        **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    },
    "DistilBert": {"hidden_dim": 96},
    "Electra": {"embedding_size": 24},
    "Albert": {
        "embedding_size": 24,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
    # 4 buckets to each side for up to 9 distances.
    "DebertaV2": {
        "relative_attention": True,
        "position_buckets": 4,
        "max_relative_positions": 9,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 2,
    },
    # Up to 9 distances told apart.
    "Deberta": {
        "relative_attention": True,
        "max_relative_positions": 9,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "type_vocab_size": 2,
    },
}


def small_config(family: str, **overrides) -> transformers.PreTrainedConfig:
    """A model of 2 layers, 64 features, 4 heads, 99 tokens, 64 positions; anything overridable.

    Args:
        family: prefix of its class names, as "Roberta".
        overrides: of the configuration's fields.
    """
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 99,
        "max_position_embeddings": 64,
        "num_labels": 3,
        **OF_FAMILY.get(family, {}),
    }
    return getattr(transformers, f"{family}Config")(**{**settings, **overrides})


def small_modernbert_config(**overrides) -> transformers.ModernBertConfig:
    """A ModernBERT of 4 layers, the first and the last global, the others with a window of 4
    tokens to each side; 48 features, 4 heads, 99 tokens; anything overridable."""
    settings = {
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "intermediate_size": 72,
        "max_position_embeddings": 128,
        "local_attention": 8,
    }
    return small_config("ModernBert", **{**settings, **overrides})
