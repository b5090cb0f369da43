"""The parts of a run, made from its settings: model, optimizer, learning rate, loss scaling."""

import os

import torch
import transformers
from torch import nn

import fastbert
from fastbert.optim import LAMB, StableAdamW, decay_groups
from fastbert.train.config import ConfigError, ModelConfig, OptimizerConfig, PretrainConfig

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_of(config: PretrainConfig) -> torch.device:
    """The device of this process.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device cuda: torch sees no GPU; use --device cpu or auto")
    if not available or config.device == "cpu":
        return torch.device("cpu")
    # torchrun numbers the processes of a machine.
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def build_model(config: ModelConfig, tokenizer, *, pairs: bool, max_length: int) -> nn.Module:
    """A masked-LM head, with next-sentence prediction for pairs, in training mode.

    Args:
        config: sizes, or the checkpoint to begin with.
        tokenizer: gives the vocabulary.
        pairs: whether sequences are labelled pairs.
        max_length: longest sequence of the run.

    Raises:
        ConfigError: a checkpoint that does not fit the tokenizer or the sequences.
    """
    head = fastbert.BertForPreTraining if pairs else fastbert.BertForMaskedLM
    if config.init_from is None:
        return head(transformers.BertConfig(**_sizes(config, tokenizer))).train()
    dropouts = {name: getattr(config, name) for name in DROPOUTS}
    model = head.from_pretrained(config.init_from, **dropouts)
    check_sizes("model.init_from", model.config, tokenizer, max_length)
    return model.float().train()


def detector_config(family: str, config: ModelConfig, tokenizer) -> transformers.PreTrainedConfig:
    """Of a discriminator.

    Args:
        family: as `ModelConfig.family`.
        config, tokenizer: `build_model`'s.
    """
    embedding_size = config.embedding_size or config.hidden_size
    sizes = {"embedding_size": embedding_size, **_sizes(config, tokenizer)}
    if family == "electra":
        return transformers.ElectraConfig(**sizes)
    # Of the published models; position_biased_input is what the mask decoder stands for.
    common = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
    }
    if family == "deberta":
        return with_fitting_head(transformers.DebertaConfig(**common, **sizes))
    buckets = config.position_buckets or max(2, config.max_position_embeddings // 2)
    of_version = {
        "position_buckets": buckets,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    }
    return with_fitting_head(transformers.DebertaV2Config(**common, **of_version, **sizes))


def with_fitting_head(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """The same, with DeBERTa's masked-LM head that fits the embeddings: that of the published
    models leaves rows as wide as the layers."""
    if hasattr(config, "legacy"):
        config.legacy = config.embedding_size != config.hidden_size
    return config


def _sizes(config: ModelConfig, tokenizer) -> dict:
    """By transformers' names."""
    num_tokens, multiple = max(tokenizer.get_vocab().values()) + 1, config.vocab_multiple_of
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "hidden_act",
        *DROPOUTS,
    )
    return {
        "vocab_size": -(-num_tokens // multiple) * multiple,
        "pad_token_id": tokenizer.pad_token_id,
        **{name: getattr(config, name) for name in names},
    }


def check_sizes(name: str, config: transformers.BertConfig, tokenizer, max_length: int) -> None:
    """Refuses a checkpoint that is too small for a run.

    Args:
        name: of the setting that chose it.
        config: of the checkpoint.
        tokenizer: of the corpus.
        max_length: longest sequence of the run.

    Raises:
        ConfigError: naming the size.
    """
    num_tokens = max(tokenizer.get_vocab().values()) + 1
    sizes = {"vocab_size": num_tokens, "max_position_embeddings": max_length}
    for size, needed in sizes.items():
        if getattr(config, size) < needed:
            raise ConfigError(
                f"{name} {config.name_or_path} has {size} {getattr(config, size)}, the run needs "
                f"{needed}; use its own tokenizer and shorter sequences"
            )


def checkpoint_activations(model: nn.Module) -> None:
    """Makes layers keep their input alone; dropout is drawn again as it was."""
    for part in getattr(model, "parts", (model,)):
        # transformers 5.24 renamed it.
        enable = getattr(part, "activation_checkpointing_enable", None)
        (enable or part.gradient_checkpointing_enable)()


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that can skip a step on the device.

    Raises:
        ConfigError: settings it does not accept.
    """
    # Schedulers start from initial_lr; as a number here, so that they never read a tensor of rates.
    groups = [
        {**group, "initial_lr": config.lr} for group in decay_groups(model, config.weight_decay)
    ]
    options = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    try:
        if config.name == "lamb":
            return LAMB(groups, **options)
        if config.name == "stable_adamw":
            return StableAdamW(groups, **options)
        return torch.optim.AdamW(groups, **options, fused=True)
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error


def build_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler | None:
    """Dynamic loss scaling, for fp16."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def training_flops(config: transformers.BertConfig, lengths, num_labels: int) -> float:
    """Floating-point operations of forward and backward on real tokens.

    Two for each weight and token in the forward pass, 4 C S² for attention's two products in each
    layer, the decoder for predicted tokens alone, and twice as much again in the backward pass
    (Kaplan et al. 2020, section 2.1).

    Args:
        config: sizes.
        lengths: `(N,)` tokens of each sequence, as numpy array.
        num_labels: predicted tokens.
    """
    c, f = config.hidden_size, config.intermediate_size
    layer = 2.0 * (4 * c * c + 2 * c * f) * lengths.sum() + 4.0 * c * (lengths**2).sum()
    head = 2.0 * (c * c + c * config.vocab_size) * num_labels
    return 3 * (config.num_hidden_layers * layer + head)
