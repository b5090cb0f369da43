"""DistilBERT (Sanh et al. 2019) on the fused encoder: transformers' classes, their forward
replaced.

What differs from BERT: no token types, no pooler, no dropout behind the attention, and its own
names of modules.
"""

import transformers
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.distilbert import modeling_distilbert as modeling

from fastbert.encoder import EncoderLayerSpec
from fastbert.models.accelerate import register_family
from fastbert.models.heads import (
    FirstTokenHead,
    MaskedLMHead,
    QuestionAnsweringHead,
    TokenClassificationHead,
    VocabularyParts,
)
from fastbert.models.layers import PostNormLayer
from fastbert.models.packed import gelu_form
from fastbert.models.post_norm import PostNormModel


class DistilBertLayer(PostNormLayer, modeling.TransformerBlock):
    """transformers' `TransformerBlock`, which given a `packed` batch runs fused on packed rows."""

    def spec(self, index):
        attention, feed_forward = self.attention, self.ffn
        return EncoderLayerSpec(
            index=index,
            query=attention.q_lin,
            key=attention.k_lin,
            value=attention.v_lin,
            attention_output=attention.out_lin,
            attention_output_dropout=None,
            attention_norm=self.sa_layer_norm,
            intermediate=feed_forward.lin1,
            activation=feed_forward.activation,
            approximate=gelu_form(feed_forward.activation),
            output=feed_forward.lin2,
            output_dropout=feed_forward.dropout,
            output_norm=self.output_layer_norm,
            num_heads=attention.n_heads,
            head_dim=attention.attention_head_size,
            softmax_scale=attention.scaling,
            attention_dropout_p=self.attention_dropout_p(),
        )

    def parts(self):
        return (self.attention, modeling.DistilBertSelfAttention), (self.ffn, modeling.FFN)

    def attention_dropout(self):
        return self.attention.dropout, self.attention

    def row_dropouts(self):
        return (self.ffn.dropout,)


class DistilBertModel(PostNormModel, transformers.DistilBertModel):
    """Drop-in replacement of `transformers.DistilBertModel`; further keyword arguments and errors
    as `fastbert.BertModel` has them."""

    logged_as = "DistilBertModel"
    counted_as = "distilbert_model"
    layer_type = DistilBertLayer
    output_type = BaseModelOutput
    embeddings_type = modeling.Embeddings

    def packed_layers(self):
        return self.transformer.layer

    def containers(self):
        return ((self.transformer, modeling.Transformer),)


# --- heads ----------------------------------------------------------------------------------------


class DistilBertForMaskedLM(MaskedLMHead, transformers.DistilBertForMaskedLM):
    """Drop-in replacement of `transformers.DistilBertForMaskedLM`; as BERT's."""

    def vocabulary_parts(self):
        return VocabularyParts(
            dense=self.vocab_transform,
            activation=self.activation,
            norm=self.vocab_layer_norm,
            decoder=self.vocab_projector,
        )


class DistilBertForSequenceClassification(
    FirstTokenHead, transformers.DistilBertForSequenceClassification
):
    """Drop-in replacement of `transformers.DistilBertForSequenceClassification`."""


class DistilBertForMultipleChoice(FirstTokenHead, transformers.DistilBertForMultipleChoice):
    """Drop-in replacement of `transformers.DistilBertForMultipleChoice`."""


class DistilBertForTokenClassification(
    TokenClassificationHead, transformers.DistilBertForTokenClassification
):
    """Drop-in replacement of `transformers.DistilBertForTokenClassification`."""


class DistilBertForQuestionAnswering(
    QuestionAnsweringHead, transformers.DistilBertForQuestionAnswering
):
    """Drop-in replacement of `transformers.DistilBertForQuestionAnswering`."""


register_family(
    DistilBertLayer,
    DistilBertModel,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertForMultipleChoice,
    DistilBertForTokenClassification,
    DistilBertForQuestionAnswering,
)
