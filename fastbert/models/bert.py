"""BERT (Devlin et al. 2019) on the fused encoder: transformers' classes, their forward replaced.

What runs transformers' own forward instead stands in fastbert/models/packed_model.py.
"""

import transformers
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.bert import modeling_bert as modeling

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
from fastbert.models.layers import BertStyleLayer, bert_parts
from fastbert.models.outputs import LazyPreTrainingOutput
from fastbert.models.post_norm import PostNormModel


class BertLayer(BertStyleLayer, modeling.BertLayer):
    """transformers' `BertLayer`, which given a `packed` batch runs fused on packed rows."""

    part_types = bert_parts(modeling, "Bert")


class BertModel(PostNormModel, transformers.BertModel):
    """Drop-in replacement of `transformers.BertModel` that computes real tokens only.

    Takes what transformers' class takes and returns the same numbers; `last_hidden_state` and
    `hidden_states` are 0 at padding. In addition to transformers' keyword arguments:

    Args:
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed input, `(1, T)` ids, as
            `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` or `fastbert.padding.pack`
            gives it; `attention_mask` is then 0 at filling behind the last sequence.
        pooled_rows: `(B,)` int64, unique; of packed input the rows the pooler reads, which makes
            `pooler_output` `(B, C)`. None: the first row alone, as in transformers.
        last_layer_rows: `(R,)` int64, rising; of packed input the rows the last layer computes.
            They attend to all rows of their sequence; the others are 0 in `last_hidden_state`.
        rng_state: `(2,)` int64, the dropout stream of this forward (docs/dropout.md); drawn from
            torch's generator if None.
        required_rows: `(B, S)` bool, padded positions whose output is wanted nevertheless, as a
            padded model computes it.
        keep_rows: leave the packed rows on the output object, for a head.
        first_only: `last_hidden_state` is `(B, 1, C)`, of position 0 (of `pooled_rows`) alone, for
            a head.

    Raises:
        TypeError: what should be a tensor is none, or ids are no integers.
        ValueError: both or neither of input_ids and inputs_embeds, shapes that do not fit, on a CPU
            an id outside its table (elsewhere see fastbert.ops.index_flags).
    """

    logged_as = "BertModel"
    counted_as = "bert_model"
    layer_type = BertLayer
    output_type = BaseModelOutputWithPoolingAndCrossAttentions
    embeddings_type = modeling.BertEmbeddings
    encoder_type = modeling.BertEncoder
    pooler_type = modeling.BertPooler


# --- heads ----------------------------------------------------------------------------------------


class _Vocabulary(VocabularyHead):
    def vocabulary_parts(self):
        predictions = self.cls.predictions
        transform = predictions.transform
        return VocabularyParts(
            dense=transform.dense,
            activation=transform.transform_act_fn,
            norm=transform.LayerNorm,
            decoder=predictions.decoder,
            containers=(
                (self.cls, self.cls_type),
                (predictions, modeling.BertLMPredictionHead),
                (transform, modeling.BertPredictionHeadTransform),
            ),
        )

    def scores_by_modules(self, hidden_states):
        return self.cls.predictions(hidden_states)


class BertForMaskedLM(_Vocabulary, MaskedLMHead, transformers.BertForMaskedLM):
    """Drop-in replacement of `transformers.BertForMaskedLM`.

    With labels the loss is computed in fp32 from the labelled rows alone. In training `logits` are
    computed when first read (attribute, index, `to_tuple`), with the reference's values and
    gradients; reading them first after the weights changed raises RuntimeError. Beside the
    arguments of `BertModel`:

    Args:
        labels: `(B, S)` int64, -100 where ignored; a label on padding counts as in transformers.
        label_rows: `(P,)` int64, unique; of packed input all rows that have a label, and any
            without. Given, nothing waits for the device to find them (`fastbert.padding.pack`).
        num_items_in_batch: denominator of the loss, as Trainer passes it under gradient
            accumulation; None: the labels of this batch.
        return_logits: False leaves `logits` out.
    """

    cls_type = modeling.BertOnlyMLMHead


class BertForPreTraining(_Vocabulary, PreTrainingHead, transformers.BertForPreTraining):
    """Drop-in replacement of `transformers.BertForPreTraining`: masked LM and next sentence.

    As `BertForMaskedLM`; the loss is given when both `labels` and `next_sentence_label` are.
    """

    cls_type = modeling.BertPreTrainingHeads
    pair_labels = "next_sentence_label"
    pair_logits = "seq_relationship_logits"
    output_type = modeling.BertForPreTrainingOutput
    lazy_output_type = LazyPreTrainingOutput

    def score_pairs(self, pooled):
        return self.cls.seq_relationship(pooled)


class BertForNextSentencePrediction(TaskHead, transformers.BertForNextSentencePrediction):
    """Drop-in replacement of `transformers.BertForNextSentencePrediction`."""

    def num_classes(self, inputs, labels):
        return 2


class BertForSequenceClassification(TaskHead, transformers.BertForSequenceClassification):
    """Drop-in replacement of `transformers.BertForSequenceClassification`."""


class BertForMultipleChoice(TaskHead, transformers.BertForMultipleChoice):
    """Drop-in replacement of `transformers.BertForMultipleChoice`."""


class BertForTokenClassification(TokenClassificationHead, transformers.BertForTokenClassification):
    """Drop-in replacement of `transformers.BertForTokenClassification`."""


class BertForQuestionAnswering(QuestionAnsweringHead, transformers.BertForQuestionAnswering):
    """Drop-in replacement of `transformers.BertForQuestionAnswering`."""


HEADS = (
    BertForMaskedLM,
    BertForPreTraining,
    BertForNextSentencePrediction,
    BertForSequenceClassification,
    BertForMultipleChoice,
    BertForTokenClassification,
    BertForQuestionAnswering,
)
register_family(BertLayer, BertModel, *HEADS)
