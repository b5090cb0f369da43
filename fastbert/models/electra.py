"""ELECTRA (Clark et al. 2020) on the fused encoder: transformers' classes, their forward replaced.

Letters: B batch, S padded length, T packed rows, C hidden.

What differs from BERT: embeddings may be narrower than the layers, there is no pooler, and the
discriminator's head asks of every token whether it was replaced.
"""

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.electra import modeling_electra as modeling

from fastbert import dispatch
from fastbert.encoder import is_plain_linear, is_unhooked
from fastbert.models.accelerate import register_family
from fastbert.models.detection import DetectionHead
from fastbert.models.heads import (
    FirstTokenHead,
    MaskedLMHead,
    QuestionAnsweringHead,
    TokenClassificationHead,
    VocabularyParts,
    positions_like,
)
from fastbert.models.layers import BertStyleLayer, bert_parts
from fastbert.models.linears import own_linear
from fastbert.models.packed import gelu_form
from fastbert.models.post_norm import PostNormModel
from fastbert.ops.linear_gelu import linear_gelu


class ElectraLayer(BertStyleLayer, modeling.ElectraLayer):
    """transformers' `ElectraLayer`, which given a `packed` batch runs fused on packed rows."""

    part_types = bert_parts(modeling, "Electra")


class ElectraModel(PostNormModel, transformers.ElectraModel):
    """Drop-in replacement of `transformers.ElectraModel`; further keyword arguments and errors as
    `fastbert.BertModel` has them."""

    logged_as = "ElectraModel"
    counted_as = "electra_model"
    layer_type = ElectraLayer
    output_type = BaseModelOutputWithPastAndCrossAttentions
    embeddings_type = modeling.ElectraEmbeddings
    encoder_type = modeling.ElectraEncoder

    def projection(self):
        return self._modules.get("embeddings_project")


# --- heads ----------------------------------------------------------------------------------------


class ElectraForMaskedLM(MaskedLMHead, transformers.ElectraForMaskedLM):
    """Drop-in replacement of `transformers.ElectraForMaskedLM`, the generator; as
    `fastbert.BertForMaskedLM`."""

    def vocabulary_parts(self):
        predictions = self.generator_predictions
        return VocabularyParts(
            dense=predictions.dense,
            activation=predictions.activation,
            norm=predictions.LayerNorm,
            decoder=self.generator_lm_head,
            containers=((predictions, modeling.ElectraGeneratorPredictions),),
        )

    def scores_by_modules(self, hidden_states):
        return self.generator_lm_head(self.generator_predictions(hidden_states))


class ElectraForPreTraining(DetectionHead, transformers.ElectraForPreTraining):
    """Drop-in replacement of `transformers.ElectraForPreTraining`, the discriminator.

    The loss is computed in fp32, over the tokens whose `attention_mask` is 1. Beside the arguments
    of `ElectraModel`:

    Args:
        labels: `(B, S)`, 1 where the token was replaced, else 0, or a number between; looked at
            where the mask is 1. As in transformers nothing else is left out: -100 is a number.
        num_items_in_batch: denominator of the loss, as Trainer passes it under gradient
            accumulation; None: the tokens of this batch.
    """

    def token_scores(self, outputs, attention_mask):
        return self.scores_of_rows(outputs, self._scores)[..., 0]

    def _scores(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., 1)` of hidden states `(..., C)`."""
        head = self.discriminator_predictions
        dense, prediction = head.dense, head.dense_prediction
        plain = (
            type(head) is modeling.ElectraDiscriminatorPredictions
            and is_unhooked(head)
            and gelu_form(head.activation) is not None
            and is_plain_linear(dense)
            and is_plain_linear(prediction)
        )
        if dispatch.is_symbolic(hidden_states) or not plain:
            return head(hidden_states)[..., None]
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        form = gelu_form(head.activation)
        activated = linear_gelu(rows, dense.weight, dense.bias, approximate=form)
        scores = own_linear(activated, prediction.weight, prediction.bias, cache=self.weight_cache)
        return scores.view(*hidden_states.shape[:-1], 1)


class ElectraForSequenceClassification(
    FirstTokenHead, transformers.ElectraForSequenceClassification
):
    """Drop-in replacement of `transformers.ElectraForSequenceClassification`."""


class ElectraForMultipleChoice(FirstTokenHead, transformers.ElectraForMultipleChoice):
    """Drop-in replacement of `transformers.ElectraForMultipleChoice`."""

    def model_keywords(self, inputs):
        if self.sequence_summary.summary_type == "first":
            return super().model_keywords(inputs)
        # The last position, or a mean over all, padding among them.
        return {"required_rows": positions_like(inputs, True)}


class ElectraForTokenClassification(
    TokenClassificationHead, transformers.ElectraForTokenClassification
):
    """Drop-in replacement of `transformers.ElectraForTokenClassification`."""


class ElectraForQuestionAnswering(QuestionAnsweringHead, transformers.ElectraForQuestionAnswering):
    """Drop-in replacement of `transformers.ElectraForQuestionAnswering`."""


register_family(
    ElectraLayer,
    ElectraModel,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraForMultipleChoice,
    ElectraForTokenClassification,
    ElectraForQuestionAnswering,
)
