"""Replaced-token detection in one forward: the pretraining of ELECTRA (Clark et al. 2020, section
2) and of DeBERTaV3 (He et al. 2021).

A generator fills masked tokens by samples of its predictions, and the discriminator says of every
token whether it is the original. Sharing of the word embeddings: ELECTRA's, section 3.2, and the
gradient-disentangled one of DeBERTaV3, section 3.3.

Letters: T packed rows, E features of the embeddings, V vocab, P labelled rows.
"""

from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers.utils import ModelOutput

from fastbert import dispatch
from fastbert.models.deberta import DebertaForMaskedLM
from fastbert.models.deberta_pretraining import (
    DebertaForEnhancedMaskedLM,
    DebertaForPreTraining,
    DebertaV2ForEnhancedMaskedLM,
    DebertaV2ForPreTraining,
)
from fastbert.models.deberta_v2 import DebertaV2ForMaskedLM
from fastbert.models.electra import ElectraForMaskedLM, ElectraForPreTraining
from fastbert.models.losses import mean_loss, rescaled_loss
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.unpad import unpad
from fastbert.padding import IGNORE_INDEX
from fastbert.reference.philox import sampling_words

ROWS_AT_ONCE = 256
"""Rows whose predictions over the vocabulary are held while they are sampled."""
PROBABILITY_BITS = 30
SECOND_STREAM = 1 << 31
"""Added to the dropout stream's offset for the discriminator, which would else drop what the
generator drops."""


@dataclass(frozen=True)
class Family:
    """The classes of a family's two models.

    Attributes:
        generator, discriminator: heads.
        enhanced_generator: the generator with the enhanced mask decoder; None: there is none.
        shares_whole_embeddings: whether shared embeddings are the module with all its tables, and
            not the table of words alone.
    """

    generator: type
    discriminator: type
    enhanced_generator: type | None = None
    shares_whole_embeddings: bool = False


FAMILIES = {
    "electra": Family(ElectraForMaskedLM, ElectraForPreTraining, shares_whole_embeddings=True),
    "deberta-v2": Family(
        DebertaV2ForMaskedLM, DebertaV2ForPreTraining, DebertaV2ForEnhancedMaskedLM
    ),
    "deberta": Family(DebertaForMaskedLM, DebertaForPreTraining, DebertaForEnhancedMaskedLM),
}
"""By transformers' `model_type`."""


@dataclass
class ReplacedTokensOutput(ModelOutput):
    """What a step of both models gives.

    Attributes:
        loss: mlm_loss + detection_weight · detection_loss.
        mlm_loss: the generator's cross-entropy, mean over labelled rows.
        detection_loss: the discriminator's binary cross-entropy, mean over real tokens.
        logits: `(1, T)` of the discriminator, above 0 where it holds a token for replaced.
        corrupted_ids: `(1, T)` what it read.
        replaced: `(1, T)` bool, where that is not the original.
    """

    loss: torch.Tensor | None = None
    mlm_loss: torch.Tensor | None = None
    detection_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    corrupted_ids: torch.Tensor | None = None
    replaced: torch.Tensor | None = None


class DisentangledEmbedding(nn.Module):
    """A table that adds its own weight, at first 0, to another's, which gets no gradient from here
    (He et al. 2021, equation 4).

    Args:
        base: the generator's table, no part of this module.
    """

    def __init__(self, base: nn.Embedding):
        super().__init__()
        self._base = (base,)
        self.padding_idx = base.padding_idx
        self.weight = nn.Parameter(torch.zeros_like(base.weight))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        shared = nn.functional.embedding(input_ids, self._base[0].weight.detach())
        return shared + nn.functional.embedding(input_ids, self.weight, self.padding_idx)

    def folded(self) -> nn.Embedding:
        """A plain table with the sum."""
        table = nn.Embedding(*self.weight.shape, padding_idx=self.padding_idx)
        table.weight.data = self._base[0].weight.detach() + self.weight.detach()
        return table


class ReplacedTokensModel(nn.Module):
    """A generator and a discriminator that are trained together.

    Args:
        generator_config, discriminator_config: of one family and vocabulary; of one width of the
            embeddings unless they are separate.
        embeddings: "shared", of ELECTRA the whole module in both, of DeBERTa the table of words;
            "disentangled", `DisentangledEmbedding`; "separate".
        detection_weight: factor of the discriminator's loss.
        enhanced_mask_decoder: whether DeBERTa's generator has one
            (`fastbert.models.deberta_pretraining`); None: where its input has no absolute
            positions.

    Raises:
        ValueError: configurations that do not fit each other or the arguments.
    """

    def __init__(
        self,
        generator_config: transformers.PreTrainedConfig,
        discriminator_config: transformers.PreTrainedConfig,
        *,
        embeddings: str = "shared",
        detection_weight: float = 50.0,
        enhanced_mask_decoder: bool | None = None,
    ):
        super().__init__()
        family = family_of(discriminator_config)
        _check_pair(generator_config, discriminator_config, embeddings)
        generator_type = generator_class(generator_config, enhanced_mask_decoder)
        self.generator = generator_type(generator_config)
        self.discriminator = family.discriminator(discriminator_config)
        self.config = discriminator_config
        self.embeddings = embeddings
        self.detection_weight = detection_weight
        if embeddings == "shared" and family.shares_whole_embeddings:
            self.discriminator.base_model.embeddings = self.generator.base_model.embeddings
        elif embeddings == "shared":
            words = self.generator.get_input_embeddings()
            self.discriminator.set_input_embeddings(words)
        elif embeddings == "disentangled":
            words = DisentangledEmbedding(self.generator.get_input_embeddings())
            self.discriminator.set_input_embeddings(words)

    @property
    def parts(self) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
        """The generator and the discriminator, models of transformers each."""
        return self.generator, self.discriminator

    @torch.no_grad()
    def begin_with(
        self,
        generator: transformers.PreTrainedModel | None = None,
        discriminator: transformers.PreTrainedModel | None = None,
    ) -> None:
        """Takes over the weights of models that are there.

        Of a discriminator alone the generator takes the embeddings, unless they are separate, and
        what a disentangled embedding adds is then 0; of both the sum is the discriminator's.

        Args:
            generator, discriminator: of the classes and sizes of the parts; None: left as it is.

        Raises:
            ValueError: both, whose embeddings are to be shared and differ.
        """
        if generator is not None and discriminator is not None and self.embeddings == "shared":
            _check_same_embeddings(generator, discriminator, family_of(self.config))
        if discriminator is not None:
            self.discriminator.load_state_dict(discriminator.state_dict())
        if generator is not None:
            self.generator.load_state_dict(generator.state_dict())
        if discriminator is not None and self.embeddings == "disentangled":
            added, words = self.discriminator.get_input_embeddings(), self.generator
            words = words.get_input_embeddings().weight
            if generator is None:
                words.copy_(added.weight)
            added.weight.sub_(words)

    def forward(
        self,
        *,
        input_ids,
        labels,
        attention_mask,
        rng_state,
        label_rows=None,
        num_items_in_batch=None,
        **inputs,
    ) -> ReplacedTokensOutput:
        """Both losses of a packed batch.

        Args:
            input_ids, labels: `(1, T)` int64, masked tokens and what stood there, -100 elsewhere.
            attention_mask: `(1, T)`, 0 at rows that are no tokens.
            rng_state: `(2,)` int64 of the dropout stream, from which samples are drawn, too; in
                evaluation as well.
            label_rows: `(P,)` as in `BertForMaskedLM`; None: found by the labels.
            num_items_in_batch: labels of the whole step, of which the losses are a share; the
                discriminator's as large as that of the generator's labels.
            inputs: of both models.
        """
        inputs["attention_mask"] = attention_mask
        if label_rows is None or dispatch.is_checkable(labels):
            # Rows that only fill the capacity cost a decoder's product each.
            label_rows = (labels[0] != IGNORE_INDEX).nonzero().view(-1)
        features, counted = self._features(input_ids, labels, label_rows, rng_state, inputs)
        decoder = self.generator.decoder_layer()
        losses = mlm_cross_entropy(features, decoder.weight, decoder.bias, counted)
        mlm_loss = mean_loss(losses, counted, num_items_in_batch)
        original = torch.where(labels == IGNORE_INDEX, input_ids, labels)
        words = sampling_words(rng_state, label_rows)
        samples = sampled(features, decoder.weight, decoder.bias, words)
        ids = original.index_put(
            (torch.zeros_like(label_rows), label_rows),
            torch.where(counted == IGNORE_INDEX, original[0, label_rows], samples),
        )
        replaced = ids != original
        outputs = self.discriminator(
            input_ids=ids,
            labels=replaced.long(),
            # Made on the device: nothing may come from the host while a CUDA graph is captured.
            rng_state=torch.stack((rng_state[0], rng_state[1] + SECOND_STREAM)),
            **inputs,
        )
        detection_loss = rescaled_loss(outputs.loss, labels, num_items_in_batch)
        loss = mlm_loss + self.detection_weight * detection_loss
        return ReplacedTokensOutput(loss, mlm_loss, detection_loss, outputs.logits, ids, replaced)

    def _features(self, input_ids, labels, label_rows, rng_state, inputs):
        """What the generator's decoder reads `(P, E)`, and the labels `(P,)` there."""
        inputs = {**inputs, "input_ids": input_ids, "rng_state": rng_state}
        if getattr(self.generator.base_model, "enhanced_decoding", False):
            # Keys and values need all rows, the decoder's output these alone.
            inputs["last_layer_rows"] = label_rows.sort().values
        outputs = self.generator.run_model(inputs, labels, label_rows)
        _, rows = outputs.__dict__["packed"]
        return self.generator.transform(unpad(rows, label_rows)), labels[0, label_rows]


def family_of(config: transformers.PreTrainedConfig) -> Family:
    """The family of a configuration.

    Raises:
        ValueError: none that is trained by replaced tokens.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type {config.model_type} is not trained by replaced tokens; use one of "
            f"{', '.join(FAMILIES)}"
        )
    return family


def generator_class(config: transformers.PreTrainedConfig, enhanced: bool | None) -> type:
    """The generator's class.

    Args:
        config: the generator's. enhanced: `ReplacedTokensModel`'s enhanced_mask_decoder.

    Raises:
        ValueError: a decoder that the family does not have.
    """
    family = family_of(config)
    if family.enhanced_generator is None:
        if enhanced:
            raise ValueError(
                f"enhanced_mask_decoder is DeBERTa's, {config.model_type} has none; leave it out"
            )
        return family.generator
    if enhanced is None:
        enhanced = not config.position_biased_input
    return family.enhanced_generator if enhanced else family.generator


def embedding_size(config: transformers.PreTrainedConfig) -> int:
    """Width of a configuration's embeddings."""
    return getattr(config, "embedding_size", config.hidden_size)


def _check_pair(generator, discriminator, embeddings: str) -> None:
    if generator.model_type != discriminator.model_type:
        raise ValueError(
            f"the generator's model_type is {generator.model_type} and the discriminator's "
            f"{discriminator.model_type}; use models of one family"
        )
    if generator.vocab_size != discriminator.vocab_size:
        raise ValueError(
            f"the generator's vocab_size is {generator.vocab_size} and the discriminator's "
            f"{discriminator.vocab_size}; use models of one tokenizer"
        )
    widths = embedding_size(generator), embedding_size(discriminator)
    if embeddings != "separate" and widths[0] != widths[1]:
        raise ValueError(
            f"the generator's embeddings are {widths[0]} wide and the discriminator's {widths[1]}, "
            f"which {embeddings} embeddings cannot be; use separate ones, or models of one "
            "embedding_size"
        )


def _check_same_embeddings(generator, discriminator, family: Family) -> None:
    modules = [m.get_input_embeddings() for m in (generator, discriminator)]
    if family.shares_whole_embeddings:
        modules = [m.base_model.embeddings for m in (generator, discriminator)]
    ours, theirs = (m.state_dict() for m in modules)
    for name, weight in ours.items():
        if not torch.equal(weight, theirs[name]):
            raise ValueError(
                f"embeddings are to be shared, but {name} of the generator is not the "
                "discriminator's; use disentangled or separate ones"
            )


@torch.no_grad()
def sampled(features, weight, bias, words) -> torch.Tensor:
    """A token of each row, drawn from softmax(features · weightᵀ + bias).

    Probabilities are rounded to multiples of 2^-30 and added as integers: the same token on every
    device where they are the same, and one call of Philox a row.

    Args:
        features: `(P, E)`. weight: `(V, E)`. bias: `(V,)`.
        words: `(P,)` int64, 32 random bits each.

    Returns:
        `(P,)` int64.
    """
    tokens = torch.empty_like(words)
    # Detached: autocast keeps casts of parameters, and those made here would have no gradient.
    weight, bias = weight.detach(), bias.detach()
    for start in range(0, len(features), ROWS_AT_ONCE):
        chosen = slice(start, start + ROWS_AT_ONCE)
        logits = nn.functional.linear(features[chosen], weight, bias).float()
        parts = (logits.softmax(-1) * (1 << PROBABILITY_BITS)).round_().long()
        sums = parts.cumsum(-1)
        thresholds = (words[chosen, None] * sums[:, -1:]) >> 32
        drawn = torch.searchsorted(sums, thresholds, right=True)
        # Of logits that are not finite any token may come; the step will be skipped.
        tokens[chosen] = drawn[:, 0].clamp(max=len(weight) - 1)
    return tokens
