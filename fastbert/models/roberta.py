"""RoBERTa (Liu et al. 2019), and XLM-R (Conneau et al. 2020) and CamemBERT (Martin et al. 2020),
which are RoBERTa under other names, on the fused encoder: transformers' classes, their forward
replaced.

Letters: B batch, S padded length, T packed rows.

What differs from BERT: positions are counted from the padding id on and pass over padding tokens,
the masked-LM head's GELU is exact whatever the configuration says, and sequence classification
reads the first token without a pooler.
"""

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.camembert import modeling_camembert
from transformers.models.roberta import modeling_roberta
from transformers.models.xlm_roberta import modeling_xlm_roberta

from fastbert import dispatch
from fastbert.models.accelerate import register_family
from fastbert.models.heads import (
    FirstTokenHead,
    MaskedLMHead,
    QuestionAnsweringHead,
    TaskHead,
    TokenClassificationHead,
    VocabularyParts,
)
from fastbert.models.layers import BertStyleLayer, bert_parts
from fastbert.models.post_norm import PostNormModel, too_long
from fastbert.padding import restarting_positions


class _Model(PostNormModel):
    output_type = BaseModelOutputWithPoolingAndCrossAttentions

    @property
    def first_position(self):
        return self.embeddings.padding_idx + 1

    def padded_positions(self, input_ids, inputs_embeds):
        embeddings, padding = self.embeddings, self.embeddings.padding_idx
        limit = embeddings.position_embeddings.num_embeddings - padding - 1
        if input_ids is None:
            if inputs_embeds.shape[1] > limit:
                raise too_long(inputs_embeds.shape[1], limit)
            return embeddings.create_position_ids_from_inputs_embeds(inputs_embeds, padding)
        if input_ids.shape[1] > limit and dispatch.is_checkable(input_ids):
            longest = int(input_ids.ne(padding).sum(1).max())
            if longest > limit:
                raise too_long(longest, limit)
        return embeddings.create_position_ids_from_input_ids(input_ids, padding)

    def packed_positions(self, input_ids, cu_seqlens, num_rows):
        padding = self.embeddings.padding_idx
        places = restarting_positions(cu_seqlens, num_rows)
        if input_ids is None:
            return places + padding + 1
        counted = input_ids.ne(padding).long()
        before = counted.cumsum(1) - counted
        starts = torch.arange(num_rows, device=places.device) - places
        return (before - before.gather(1, starts) + 1) * counted + padding


class _MaskedLM(MaskedLMHead):
    head_type: type

    def vocabulary_parts(self):
        head = self.lm_head
        return VocabularyParts(
            dense=head.dense,
            activation=nn.functional.gelu,
            norm=head.layer_norm,
            decoder=head.decoder,
            containers=((head, self.head_type),),
        )

    def scores_by_modules(self, hidden_states):
        return self.lm_head(hidden_states)


# --- RoBERTa --------------------------------------------------------------------------------------


class RobertaLayer(BertStyleLayer, modeling_roberta.RobertaLayer):
    """transformers' `RobertaLayer`, which given a `packed` batch runs fused on packed rows."""

    part_types = bert_parts(modeling_roberta, "Roberta")


class RobertaModel(_Model, transformers.RobertaModel):
    """Drop-in replacement of `transformers.RobertaModel`; further keyword arguments and errors as
    `fastbert.BertModel` has them. Of packed input without `position_ids` they restart with each
    sequence, after the padding id."""

    logged_as = "RobertaModel"
    counted_as = "roberta_model"
    layer_type = RobertaLayer
    embeddings_type = modeling_roberta.RobertaEmbeddings
    encoder_type = modeling_roberta.RobertaEncoder
    pooler_type = modeling_roberta.RobertaPooler


class RobertaForMaskedLM(_MaskedLM, transformers.RobertaForMaskedLM):
    """Drop-in replacement of `transformers.RobertaForMaskedLM`; as `fastbert.BertForMaskedLM`."""

    head_type = modeling_roberta.RobertaLMHead


class RobertaForSequenceClassification(
    FirstTokenHead, transformers.RobertaForSequenceClassification
):
    """Drop-in replacement of `transformers.RobertaForSequenceClassification`."""


class RobertaForMultipleChoice(TaskHead, transformers.RobertaForMultipleChoice):
    """Drop-in replacement of `transformers.RobertaForMultipleChoice`."""


class RobertaForTokenClassification(
    TokenClassificationHead, transformers.RobertaForTokenClassification
):
    """Drop-in replacement of `transformers.RobertaForTokenClassification`."""


class RobertaForQuestionAnswering(QuestionAnsweringHead, transformers.RobertaForQuestionAnswering):
    """Drop-in replacement of `transformers.RobertaForQuestionAnswering`."""


register_family(
    RobertaLayer,
    RobertaModel,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaForMultipleChoice,
    RobertaForTokenClassification,
    RobertaForQuestionAnswering,
)

# --- XLM-R ----------------------------------------------------------------------------------------


class XLMRobertaLayer(BertStyleLayer, modeling_xlm_roberta.XLMRobertaLayer):
    """transformers' `XLMRobertaLayer`, which given a `packed` batch runs fused on packed rows."""

    part_types = bert_parts(modeling_xlm_roberta, "XLMRoberta")


class XLMRobertaModel(_Model, transformers.XLMRobertaModel):
    """Drop-in replacement of `transformers.XLMRobertaModel`; as `fastbert.RobertaModel`."""

    logged_as = "XLMRobertaModel"
    counted_as = "xlm_roberta_model"
    layer_type = XLMRobertaLayer
    embeddings_type = modeling_xlm_roberta.XLMRobertaEmbeddings
    encoder_type = modeling_xlm_roberta.XLMRobertaEncoder
    pooler_type = modeling_xlm_roberta.XLMRobertaPooler


class XLMRobertaForMaskedLM(_MaskedLM, transformers.XLMRobertaForMaskedLM):
    """Drop-in replacement of `transformers.XLMRobertaForMaskedLM`; as BERT's."""

    head_type = modeling_xlm_roberta.XLMRobertaLMHead


class XLMRobertaForSequenceClassification(
    FirstTokenHead, transformers.XLMRobertaForSequenceClassification
):
    """Drop-in replacement of `transformers.XLMRobertaForSequenceClassification`."""


class XLMRobertaForMultipleChoice(TaskHead, transformers.XLMRobertaForMultipleChoice):
    """Drop-in replacement of `transformers.XLMRobertaForMultipleChoice`."""


class XLMRobertaForTokenClassification(
    TokenClassificationHead, transformers.XLMRobertaForTokenClassification
):
    """Drop-in replacement of `transformers.XLMRobertaForTokenClassification`."""


class XLMRobertaForQuestionAnswering(
    QuestionAnsweringHead, transformers.XLMRobertaForQuestionAnswering
):
    """Drop-in replacement of `transformers.XLMRobertaForQuestionAnswering`."""


register_family(
    XLMRobertaLayer,
    XLMRobertaModel,
    XLMRobertaForMaskedLM,
    XLMRobertaForSequenceClassification,
    XLMRobertaForMultipleChoice,
    XLMRobertaForTokenClassification,
    XLMRobertaForQuestionAnswering,
)

# --- CamemBERT ------------------------------------------------------------------------------------


class CamembertLayer(BertStyleLayer, modeling_camembert.CamembertLayer):
    """transformers' `CamembertLayer`, which given a `packed` batch runs fused on packed rows."""

    part_types = bert_parts(modeling_camembert, "Camembert")


class CamembertModel(_Model, transformers.CamembertModel):
    """Drop-in replacement of `transformers.CamembertModel`; as `fastbert.RobertaModel`."""

    logged_as = "CamembertModel"
    counted_as = "camembert_model"
    layer_type = CamembertLayer
    embeddings_type = modeling_camembert.CamembertEmbeddings
    encoder_type = modeling_camembert.CamembertEncoder
    pooler_type = modeling_camembert.CamembertPooler


class CamembertForMaskedLM(_MaskedLM, transformers.CamembertForMaskedLM):
    """Drop-in replacement of `transformers.CamembertForMaskedLM`; as `fastbert.BertForMaskedLM`."""

    head_type = modeling_camembert.CamembertLMHead


class CamembertForSequenceClassification(
    FirstTokenHead, transformers.CamembertForSequenceClassification
):
    """Drop-in replacement of `transformers.CamembertForSequenceClassification`."""


class CamembertForMultipleChoice(TaskHead, transformers.CamembertForMultipleChoice):
    """Drop-in replacement of `transformers.CamembertForMultipleChoice`."""


class CamembertForTokenClassification(
    TokenClassificationHead, transformers.CamembertForTokenClassification
):
    """Drop-in replacement of `transformers.CamembertForTokenClassification`."""


class CamembertForQuestionAnswering(
    QuestionAnsweringHead, transformers.CamembertForQuestionAnswering
):
    """Drop-in replacement of `transformers.CamembertForQuestionAnswering`."""


register_family(
    CamembertLayer,
    CamembertModel,
    CamembertForMaskedLM,
    CamembertForSequenceClassification,
    CamembertForMultipleChoice,
    CamembertForTokenClassification,
    CamembertForQuestionAnswering,
)
