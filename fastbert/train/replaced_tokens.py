"""The objective `replaced_tokens`: an ELECTRA (Clark et al. 2020) or a DeBERTaV3 (He et al. 2021).

A run as of masked tokens (fastbert/train/pretraining.py), whose model is a pair. What is evaluated
and exported is the discriminator; the generator goes beside it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from fastbert.models.replaced_tokens import (
    FAMILIES,
    DisentangledEmbedding,
    ReplacedTokensModel,
    embedding_size,
    generator_class,
)
from fastbert.train import building
from fastbert.train.config import ConfigError, GeneratorConfig, PretrainConfig, generator_sizes
from fastbert.train.evaluation import evaluate_detection
from fastbert.train.pretraining import Pretraining

GENERATOR = "generator"
"""Folder of the generator's config in a run, and of its model in what is exported."""


class ReplacedTokenPretraining(Pretraining):
    """A run in this process, maybe one of several."""

    evaluate = staticmethod(evaluate_detection)

    def build_model(self) -> ReplacedTokensModel:
        return new_pair(self.config, self.tokenizer).train()

    @staticmethod
    def step_loss(model: torch.nn.Module, batch: Mapping, rng_state, num_labels) -> Mapping:
        """The losses of both models, and their sum."""
        outputs = model(**batch, rng_state=rng_state, num_items_in_batch=num_labels)
        return {name: outputs[name] for name in ("loss", "mlm_loss", "detection_loss")}

    def flops(self, lengths, num_labels: int) -> float:
        generator = self.model.generator.config
        return building.training_flops(self.model.config, lengths, 0) + building.training_flops(
            generator, lengths, num_labels
        )

    def write_configs(self) -> None:
        super().write_configs()
        self.model.generator.config.save_pretrained(self.folder / GENERATOR)


# --- how a pair begins ----------------------------------------------------------------------------


def new_pair(settings: PretrainConfig, tokenizer) -> ReplacedTokensModel:
    """Both models as a run begins: with new weights, or with those of `init_from`.

    Args:
        settings: of the run.
        tokenizer: gives the vocabulary.

    Raises:
        ConfigError: checkpoints that do not fit the settings, the tokenizer or each other.
    """
    folders = {
        "model.init_from": settings.model.init_from,
        "generator.init_from": settings.generator.init_from,
    }
    given = {
        name: _config_of(name, folder, settings, tokenizer)
        for name, folder in folders.items()
        if folder is not None
    }
    discriminator = given.get("model.init_from")
    generator = given.get("generator.init_from")
    if discriminator is None:
        discriminator = building.detector_config(
            _family(settings, given), settings.model, tokenizer
        )
        if generator is not None:
            # Filled up otherwise, maybe; the tokenizer's words are in both.
            discriminator.vocab_size = generator.vocab_size
    if generator is None:
        generator = _generator_config(settings, discriminator)
    pair = pair_of(generator, discriminator, settings.generator)
    parts = {"model.init_from": pair.discriminator, "generator.init_from": pair.generator}
    begun = {
        name: type(parts[name]).from_pretrained(folders[name], config=config).float()
        for name, config in given.items()
    }
    try:
        pair.begin_with(begun.get("generator.init_from"), begun.get("model.init_from"))
    except ValueError as error:
        raise ConfigError(f"{' and '.join(folders)}: {error}; see generator.embeddings") from error
    return pair


def _config_of(name: str, folder: str, settings: PretrainConfig, tokenizer) -> PreTrainedConfig:
    """The configuration in a checkpoint's folder, with the dropout of the settings."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{name} {folder} is a {config.model_type}; replaced_tokens trains "
            f"{', '.join(FAMILIES)}"
        )
    if settings.model.family not in (None, config.model_type):
        raise ConfigError(
            f"{name} {folder} is a {config.model_type}, but model.family is "
            f"{settings.model.family}; drop that, or name another checkpoint"
        )
    longest = max(phase.max_length for phase in settings.phases)
    building.check_sizes(name, config, tokenizer, longest)
    for dropout in building.DROPOUTS:
        setattr(config, dropout, getattr(settings.model, dropout))
    return config


def _family(settings: PretrainConfig, given: Mapping[str, PreTrainedConfig]) -> str:
    """Of a model that begins anew, maybe beside one that does not."""
    own = settings.model.family or "electra"
    return next((config.model_type for config in given.values()), own)


def _generator_config(
    settings: PretrainConfig, discriminator: PreTrainedConfig
) -> PreTrainedConfig:
    """Of a new generator beside a discriminator."""
    config = copy.deepcopy(discriminator)
    # By itself its embeddings would be as wide as its layers.
    config.embedding_size = embedding_size(discriminator)
    for name, size in generator_sizes(settings, discriminator).items():
        setattr(config, name, size)
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"generator.size {settings.generator.size} of model.init_from gives hidden_size "
            f"{config.hidden_size} and {config.num_attention_heads} heads, of which it must be a "
            "multiple; take another"
        )
    return building.with_fitting_head(config)


def pair_of(
    generator: PreTrainedConfig, discriminator: PreTrainedConfig, settings: GeneratorConfig
) -> ReplacedTokensModel:
    """Both models, with new weights.

    Raises:
        ConfigError: configurations that do not fit each other or the settings.
    """
    try:
        return ReplacedTokensModel(
            generator,
            discriminator,
            embeddings=settings.embeddings,
            detection_weight=settings.detection_weight,
            enhanced_mask_decoder=settings.enhanced_mask_decoder,
        )
    except ValueError as error:
        raise ConfigError(f"model and generator: {error}") from error


# --- how it goes on -------------------------------------------------------------------------------


def pair_of_run(run: Path, settings: PretrainConfig) -> ReplacedTokensModel:
    """The models of a run, whose weights are still to be loaded."""
    read = AutoConfig.from_pretrained
    return pair_of(read(run / GENERATOR), read(run), settings.generator)


def save_pair(model: ReplacedTokensModel, output: Path) -> None:
    """Writes the discriminator and, below it, the generator as its family's masked-LM model, in
    transformers without an enhanced mask decoder."""
    words = model.discriminator.get_input_embeddings()
    if isinstance(words, DisentangledEmbedding):
        model.discriminator.set_input_embeddings(words.folded())
    model.discriminator.save_pretrained(output)
    model.generator.save_pretrained(output / GENERATOR)
    # transformers knows the class without the decoder.
    plain = generator_class(model.generator.config, enhanced=False)
    model.generator.config.architectures = [plain.__name__]
    model.generator.config.save_pretrained(output / GENERATOR)
