"""The first DeBERTa (He et al. 2020) on the fused encoder: what differs from
fastbert/models/deberta_v2.py, whose head says what runs transformers' own forward instead.
"""

import transformers
from transformers.models.deberta import modeling_deberta as modeling

from fastbert.encoder import PLAIN_NORMS
from fastbert.encoder_disentangled import DisentangledLayerSpec
from fastbert.models.accelerate import register_conversions, register_family
from fastbert.models.deberta_v2 import (
    DisentangledLayer,
    DisentangledMaskedLMHead,
    DisentangledModel,
    HandsOn,
    PooledHead,
)
from fastbert.models.heads import QuestionAnsweringHead, TokenClassificationHead


class DebertaLayerNorm(modeling.DebertaLayerNorm):
    """transformers' LayerNorm in fp32, under the names torch's has."""

    @property
    def eps(self) -> float:
        return self.variance_epsilon

    @property
    def normalized_shape(self):
        return self.weight.shape


PLAIN_NORMS.add(DebertaLayerNorm)


class DebertaLayer(DisentangledLayer, modeling.DebertaLayer):
    """transformers' layer, which given a `packed` batch runs fused on packed rows."""

    parts = (
        modeling.DebertaAttention,
        modeling.DisentangledSelfAttention,
        modeling.DebertaSelfOutput,
        modeling.DebertaIntermediate,
        modeling.DebertaOutput,
    )

    def spec(self, index: int) -> DisentangledLayerSpec:
        """The layer's modules in the encoder's terms, at place `index` of the encoder."""
        attention = self.attention.self
        kinds, relative = attention.pos_att_type, attention.relative_attention
        return DisentangledLayerSpec(
            query=None,
            key=None,
            value=None,
            qkv=attention.in_proj,
            query_bias=attention.q_bias,
            value_bias=attention.v_bias,
            softmax_scale=(attention.attention_head_size * (1 + len(kinds))) ** -0.5,
            position_key=attention.pos_proj if relative and "c2p" in kinds else None,
            position_query=attention.pos_q_proj if relative and "p2c" in kinds else None,
            position_buckets=-1,
            max_relative_positions=attention.max_relative_positions if relative else 1,
            **self._shared_spec(index),
        )

    def why_not_packed(self):
        reason = super().why_not_packed()
        if reason is None and self.attention.self.talking_head:
            return "heads talk to each other"
        return reason


class DebertaModel(DisentangledModel, transformers.DebertaModel):
    """Drop-in replacement of `transformers.DebertaModel`, as `fastbert.DebertaV2Model`."""

    logged_as = "DebertaModel"
    counted_as = "deberta_model"
    layer_type = DebertaLayer
    encoder_type = modeling.DebertaEncoder
    embeddings_type = modeling.DebertaEmbeddings


class DebertaForMaskedLM(DisentangledMaskedLMHead, transformers.DebertaForMaskedLM):
    """Drop-in replacement of `transformers.DebertaForMaskedLM`.

    Loss, logits and further keyword arguments as `fastbert.BertForMaskedLM`.
    """

    legacy_kinds = (
        modeling.LegacyDebertaOnlyMLMHead,
        modeling.LegacyDebertaLMPredictionHead,
        modeling.LegacyDebertaPredictionHeadTransform,
    )
    kinds = (modeling.DebertaOnlyMLMHead, modeling.DebertaLMPredictionHead)


class DebertaForSequenceClassification(
    PooledHead, HandsOn, transformers.DebertaForSequenceClassification
):
    """Drop-in replacement of `transformers.DebertaForSequenceClassification`."""


class DebertaForTokenClassification(
    TokenClassificationHead, HandsOn, transformers.DebertaForTokenClassification
):
    """Drop-in replacement of `transformers.DebertaForTokenClassification`."""


class DebertaForQuestionAnswering(
    QuestionAnsweringHead, HandsOn, transformers.DebertaForQuestionAnswering
):
    """Drop-in replacement of `transformers.DebertaForQuestionAnswering`.

    Its softmax reads padding, so a batch with padding runs transformers' forward.
    """


HEADS = (
    DebertaForMaskedLM,
    DebertaForSequenceClassification,
    DebertaForTokenClassification,
    DebertaForQuestionAnswering,
)
register_conversions(DebertaLayerNorm)
register_family(DebertaLayer, DebertaModel, *HEADS)
