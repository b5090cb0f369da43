"""The objective `replaced_tokens`: an ELECTRA from scratch (Clark et al. 2020).

A run as of masked tokens (fastbert/train/pretraining.py), whose model is a pair. What is evaluated
and exported is the discriminator; the generator goes beside it.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from fastbert.models.replaced_tokens import DisentangledEmbedding, ReplacedTokensModel
from fastbert.train import building
from fastbert.train.config import GeneratorConfig, PretrainConfig, generator_sizes
from fastbert.train.evaluation import evaluate_detection
from fastbert.train.pretraining import Pretraining

GENERATOR = "generator"
"""Folder of the generator's config in a run, and of its model in what is exported."""


class ReplacedTokenPretraining(Pretraining):
    """A run in this process, maybe one of several."""

    evaluate = staticmethod(evaluate_detection)

    def build_model(self) -> ReplacedTokensModel:
        discriminator = building.electra_config(self.config.model, self.tokenizer)
        generator = copy.deepcopy(discriminator)
        for name, size in generator_sizes(self.config).items():
            setattr(generator, name, size)
        return pair_of(generator, discriminator, self.config.generator).train()

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


def pair_of(
    generator: transformers.ElectraConfig,
    discriminator: transformers.ElectraConfig,
    settings: GeneratorConfig,
) -> ReplacedTokensModel:
    """Both models, with new weights."""
    return ReplacedTokensModel(
        generator,
        discriminator,
        embeddings=settings.embeddings,
        detection_weight=settings.detection_weight,
    )


def pair_of_run(run: Path, settings: PretrainConfig) -> ReplacedTokensModel:
    """The models of a run, whose weights are still to be loaded."""
    read = transformers.ElectraConfig.from_pretrained
    return pair_of(read(run / GENERATOR), read(run), settings.generator)


def save_pair(model: ReplacedTokensModel, output: Path) -> None:
    """Writes the discriminator as transformers' ElectraForPreTraining, and the generator as its
    ElectraForMaskedLM below."""
    embeddings = model.discriminator.electra.embeddings
    if isinstance(embeddings.word_embeddings, DisentangledEmbedding):
        embeddings.word_embeddings = embeddings.word_embeddings.folded()
    model.discriminator.save_pretrained(output)
    model.generator.save_pretrained(output / GENERATOR)
