"""ALBERT (Lan et al. 2020) on the fused encoder: transformers' classes, their forward replaced.

Letters: B batch, C hidden.

What differs from BERT: embeddings narrower than the layers, few layers used many times (their
weights are packed once, their dropout differs from place to place), no dropout behind the
feed-forward, and a question about the order of two texts in place of next sentence.
"""

import dataclasses

import transformers
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.albert import modeling_albert as modeling

from fastbert.encoder import EncoderLayerSpec
from fastbert.models.accelerate import register_family
from fastbert.models.heads import (
    MaskedLMHead,
    PreTrainingHead,
    QuestionAnsweringHead,
    TaskHead,
    TokenClassificationHead,
    VocabularyHead,
    VocabularyParts,
)
from fastbert.models.layers import PostNormLayer
from fastbert.models.outputs import LazyFields
from fastbert.models.packed import gelu_form
from fastbert.models.post_norm import PostNormModel


class AlbertLayer(PostNormLayer, modeling.AlbertLayer):
    """transformers' `AlbertLayer`, which given a `packed` batch runs fused on packed rows."""

    def spec(self, index):
        attention = self.attention
        return EncoderLayerSpec(
            index=index,
            query=attention.query,
            key=attention.key,
            value=attention.value,
            attention_output=attention.dense,
            attention_output_dropout=attention.output_dropout,
            attention_norm=attention.LayerNorm,
            intermediate=self.ffn,
            activation=self.activation,
            approximate=gelu_form(self.activation),
            output=self.ffn_output,
            output_dropout=None,
            output_norm=self.full_layer_layer_norm,
            num_heads=attention.num_attention_heads,
            head_dim=attention.attention_head_size,
            softmax_scale=attention.scaling,
            attention_dropout_p=self.attention_dropout_p(),
        )

    def parts(self):
        return ((self.attention, modeling.AlbertAttention),)

    def attention_dropout(self):
        return self.attention.attention_dropout, self.attention

    def row_dropouts(self):
        return (self.attention.output_dropout,)


class AlbertModel(PostNormModel, transformers.AlbertModel):
    """Drop-in replacement of `transformers.AlbertModel`; further keyword arguments and errors as
    `fastbert.BertModel` has them."""

    logged_as = "AlbertModel"
    counted_as = "albert_model"
    layer_type = AlbertLayer
    output_type = BaseModelOutputWithPooling
    embeddings_type = modeling.AlbertEmbeddings

    def packed_layers(self):
        groups = self.encoder.albert_layer_groups
        # In transformers' words: floating point, and so the groups' sizes where they do not divide.
        per_group = self.config.num_hidden_layers / self.config.num_hidden_groups
        for place in range(self.config.num_hidden_layers):
            yield from groups[int(place / per_group)].albert_layers

    def containers(self):
        groups = self.encoder.albert_layer_groups
        return (
            (self.encoder, modeling.AlbertTransformer),
            *((group, modeling.AlbertLayerGroup) for group in groups),
        )

    def projection(self):
        return self.encoder.embedding_hidden_mapping_in

    def pool(self, first):
        return self.pooler_activation(self.pooler(first))


# --- heads ----------------------------------------------------------------------------------------


class _Vocabulary(VocabularyHead):
    def vocabulary_parts(self):
        head = self.predictions
        return VocabularyParts(
            dense=head.dense,
            activation=head.activation,
            norm=head.LayerNorm,
            decoder=head.decoder,
            containers=((head, modeling.AlbertMLMHead),),
        )

    def scores_by_modules(self, hidden_states):
        return self.predictions(hidden_states)


class AlbertForMaskedLM(_Vocabulary, MaskedLMHead, transformers.AlbertForMaskedLM):
    """Drop-in replacement of `transformers.AlbertForMaskedLM`; as `fastbert.BertForMaskedLM`."""


@dataclasses.dataclass
class LazyAlbertPreTrainingOutput(LazyFields, modeling.AlbertForPreTrainingOutput):
    """transformers' `AlbertForPreTrainingOutput` whose prediction_logits are computed when first
    read."""


class AlbertForPreTraining(_Vocabulary, PreTrainingHead, transformers.AlbertForPreTraining):
    """Drop-in replacement of `transformers.AlbertForPreTraining`: masked LM and sentence order.

    As `fastbert.BertForPreTraining`, by `sentence_order_label`.
    """

    pair_labels = "sentence_order_label"
    pair_logits = "sop_logits"
    output_type = modeling.AlbertForPreTrainingOutput
    lazy_output_type = LazyAlbertPreTrainingOutput

    def score_pairs(self, pooled):
        return self.sop_classifier(pooled)


class AlbertForSequenceClassification(TaskHead, transformers.AlbertForSequenceClassification):
    """Drop-in replacement of `transformers.AlbertForSequenceClassification`."""


class AlbertForMultipleChoice(TaskHead, transformers.AlbertForMultipleChoice):
    """Drop-in replacement of `transformers.AlbertForMultipleChoice`."""


class AlbertForTokenClassification(
    TokenClassificationHead, transformers.AlbertForTokenClassification
):
    """Drop-in replacement of `transformers.AlbertForTokenClassification`."""


class AlbertForQuestionAnswering(QuestionAnsweringHead, transformers.AlbertForQuestionAnswering):
    """Drop-in replacement of `transformers.AlbertForQuestionAnswering`."""


register_family(
    AlbertLayer,
    AlbertModel,
    AlbertForMaskedLM,
    AlbertForPreTraining,
    AlbertForSequenceClassification,
    AlbertForMultipleChoice,
    AlbertForTokenClassification,
    AlbertForQuestionAnswering,
)
