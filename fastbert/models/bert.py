"""BERT (Devlin et al. 2019) on the fused encoder: transformers' classes, their forward replaced.

Letters: B batch, S padded length, T packed rows, C hidden, V vocab, P labelled rows.

What runs transformers' own forward instead stands in fastbert/models/packed_model.py.
"""

from dataclasses import replace

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.output_capturing import capture_outputs

from fastbert import dispatch
from fastbert.cache import CachesWeights
from fastbert.encoder import (
    EncoderLayerSpec,
    add_norm,
    dropout_p,
    encoder_layer,
    is_ordinary,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    is_unhooked,
)
from fastbert.models.accelerate import register_conversions
from fastbert.models.heads import (
    MaskedLMHead,
    QuestionAnsweringHead,
    TaskHead,
    TokenClassificationHead,
    VocabularyHead,
)
from fastbert.models.inputs import check_ids, check_tensors
from fastbert.models.linears import own_linears
from fastbert.models.losses import rescaled_loss
from fastbert.models.outputs import (
    LazyLogits,
    LazyPreTrainingOutput,
)
from fastbert.models.packed import (
    HEAD_KEYWORDS,
    gelu_form,
    is_plain_table,
    one_row,
    packed_by_caller,
    pop_return_dict,
)
from fastbert.models.packed_model import PackedModel, tokens_of
from fastbert.models.signature import transformers_signature
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.ops.linear_gelu import linear_gelu
from fastbert.ops.philox import draw_rng_state
from fastbert.ops.unpad import pad, unpad
from fastbert.padding import (
    PackedBatch,
    pack_batch,
    query_rows,
    restarting_positions,
)
from fastbert.reference.philox import SITE_EMBEDDING

# --- layer ----------------------------------------------------------------------------------------


class BertLayer(CachesWeights, modeling_bert.BertLayer):
    """transformers' `BertLayer`, which given a `packed` batch runs fused on packed rows."""

    def forward(
        self, hidden_states, *args, packed=None, index=0, rng_state=None, query=None, **kwargs
    ):
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        spec = self.spec(index)
        return encoder_layer(spec, hidden_states, packed, rng_state, self.weight_cache, query)

    def spec(self, index: int) -> EncoderLayerSpec:
        """The layer's modules in the encoder's terms, at place `index` of the encoder."""
        # Through the modules' own tables: attribute access on modules is a search, and this runs
        # for every layer of every forward.
        parts = self._modules
        attention = parts["attention"]._modules
        self_attention = attention["self"]
        projections, attention_output = self_attention._modules, attention["output"]._modules
        intermediate, output = parts["intermediate"], parts["output"]._modules
        activation = intermediate.intermediate_act_fn
        dropout = projections["dropout"]
        return EncoderLayerSpec(
            index=index,
            query=projections["query"],
            key=projections["key"],
            value=projections["value"],
            attention_output=attention_output["dense"],
            attention_output_dropout=attention_output["dropout"],
            attention_norm=attention_output["LayerNorm"],
            intermediate=intermediate._modules["dense"],
            activation=activation,
            approximate=gelu_form(activation),
            output=output["dense"],
            output_dropout=output["dropout"],
            output_norm=output["LayerNorm"],
            num_heads=self_attention.num_attention_heads,
            head_dim=self_attention.attention_head_size,
            softmax_scale=self_attention.scaling,
            attention_dropout_p=dropout.p if self_attention.training else 0.0,
        )

    def dropout_active(self) -> bool:
        """Whether this layer reads the rng_state; each dropout goes by its own training flag."""
        attention = self._modules["attention"]._modules
        self_attention = attention["self"]
        return (
            dropout_p(attention["output"]._modules["dropout"]) > 0
            or dropout_p(self._modules["output"]._modules["dropout"]) > 0
            or (self_attention.training and self_attention._modules["dropout"].p > 0)
        )

    def why_not_packed(self) -> str | None:
        """What about this layer keeps it from packed rows."""
        parts = self._modules
        attention = parts["attention"]
        expected = (
            (attention, modeling_bert.BertAttention),
            (attention._modules["self"], modeling_bert.BertSelfAttention),
            (attention._modules["output"], modeling_bert.BertSelfOutput),
            (parts["intermediate"], modeling_bert.BertIntermediate),
            (parts["output"], modeling_bert.BertOutput),
        )
        for module, kind in expected:
            if type(module) is not kind:
                return f"a layer holds a {type(module).__name__} in place of {kind.__name__}"
            if not is_unhooked(module):
                return f"{kind.__name__} has hooks"
        dropout = attention._modules["self"]._modules["dropout"]
        if type(dropout) is not nn.Dropout:
            return "the dropout of the attention probabilities was replaced"
        if not is_unhooked(dropout):
            return "the dropout of the attention probabilities has hooks"
        if self.is_decoder or self.add_cross_attention:
            return "the layer is a decoder's"
        return None


# --- model ----------------------------------------------------------------------------------------


class BertModel(PackedModel, transformers.BertModel):
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

    Raises:
        TypeError: what should be a tensor is none, or ids are no integers.
        ValueError: both or neither of input_ids and inputs_embeds, shapes that do not fit, on a CPU
            an id outside its table (elsewhere see fastbert.ops.index_flags).
    """

    logged_as = "BertModel"
    counted_as = "bert_model"
    layer_type = BertLayer

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        token_type_ids=None,
        position_ids=None,
        inputs_embeds=None,
        **kwargs,
    ):
        inputs = {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        check_tensors(**inputs, cu_seq_lens_q=kwargs.get("cu_seq_lens_q"))
        reason = self.why_not_packed(attention_mask, kwargs)
        if reason is not None:
            return self._forward_pooled(reason, inputs, attention_mask, kwargs)
        return self._forward_packed(attention_mask, **inputs, **kwargs)

    def packed_layers(self):
        return self.encoder.layer

    def why_container_not_packed(self):
        if self.config.is_decoder:
            return "the model is a decoder"
        if type(self.encoder) is not modeling_bert.BertEncoder or not is_unhooked(self.encoder):
            return "the encoder was replaced or has hooks"
        return None

    # --- transformers' own path

    def _forward_pooled(self, reason, inputs, mask, kwargs):
        """transformers' forward, with our pooled_rows."""
        pooled_rows = kwargs.get("pooled_rows")
        if pooled_rows is None:
            return self.forward_padded(reason, inputs, mask, kwargs)
        return_dict = pop_return_dict(self.config, kwargs)
        outputs = self.forward_padded(reason, inputs, mask, {**kwargs, "return_dict": True})
        if self.pooler is not None:
            rows = outputs.last_hidden_state.flatten(0, 1)[pooled_rows]
            outputs.pooler_output = self.pooler(rows[:, None])
        return outputs if return_dict else outputs.to_tuple()

    # --- packed path

    def _forward_packed(
        self,
        attention_mask,
        *,
        input_ids,
        token_type_ids,
        position_ids,
        inputs_embeds,
        return_dict=None,
        output_hidden_states=None,
        rng_state=None,
        required_rows=None,
        cu_seq_lens_q=None,
        cu_seq_lens_k=None,
        max_length_q=None,
        max_length_k=None,
        keep_rows=False,
        pooled_rows=None,
        last_layer_rows=None,
        **ignored,
    ):
        tokens = tokens_of(input_ids, inputs_embeds)
        size = tokens.shape[:2]
        if cu_seq_lens_q is None:
            self._check_length(size[1], position_ids)
        if cu_seq_lens_q is not None:
            batch = packed_by_caller(
                attention_mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, size
            )
            if required_rows is not None and not dispatch.is_symbolic(required_rows):
                batch = replace(batch, num_required=int(required_rows.sum()))
            if position_ids is None:
                position_ids = restarting_positions(batch.cu_seqlens_q, batch.num_rows)
        elif pooled_rows is not None:
            raise ValueError(
                "pooled_rows are rows of packed input and need cu_seq_lens_q; of a padded batch "
                "the pooler reads position 0"
            )
        elif last_layer_rows is not None:
            raise ValueError(
                "last_layer_rows are rows of packed input and need cu_seq_lens_q; pack the batch "
                "by fastbert.padding.pack(..., last_layer_subset=True)"
            )
        else:
            batch = pack_batch(
                attention_mask,
                *size,
                tokens.device,
                required_rows=required_rows,
                first_rows=self.pooler is not None,
            )
        if rng_state is None and self._dropout_active():
            rng_state = draw_rng_state(tokens)
        dispatch.count(self.counted_as, "packed")
        outputs = self._packed_rows(
            batch,
            (input_ids, token_type_ids, position_ids, inputs_embeds),
            rng_state,
            required_rows is not None,
            keep_rows,
            pooled_rows,
            None if last_layer_rows is None else query_rows(last_layer_rows, batch),
            output_hidden_states=self.records_hidden_states(output_hidden_states),
            return_dict=True,
        )
        return self.finished(outputs, batch, return_dict)

    @capture_outputs
    def _packed_rows(
        self,
        batch: PackedBatch,
        inputs,
        rng_state,
        keep_query_only,
        keep_rows,
        pooled_rows,
        query,
        **kwargs,
    ):
        rows = self._embed(batch, *inputs, rng_state)
        last = len(self.encoder.layer) - 1
        for index, layer in enumerate(self.encoder.layer):
            wanted = query if index == last else None
            rows = layer(rows, packed=batch, index=index, rng_state=rng_state, query=wanted)
            if wanted is not None:
                rows = pad(rows, wanted.rows, batch.num_rows)
        pooled = None
        if self.pooler is not None:
            first = batch.first_rows(rows) if pooled_rows is None else unpad(rows, pooled_rows)
            with own_linears(self):
                pooled = self.pooler(first[:, None])
        outputs = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=batch.pad(rows, keep_query_only=keep_query_only),
            pooler_output=pooled,
        )
        if keep_rows:
            outputs.__dict__["packed"] = (batch, rows)
        return outputs

    def _embed(
        self, batch, input_ids, token_type_ids, position_ids, inputs_embeds, rng_state
    ) -> torch.Tensor:
        """`(T, C)` embeddings of the packed rows."""
        embeddings = self.embeddings
        if position_ids is None:
            position_ids = embeddings.position_ids[:, : batch.seqlen]
        else:
            position_ids = one_row("position_ids", position_ids, batch)
            num_positions = embeddings.position_embeddings.num_embeddings
            check_ids("position_ids", position_ids, num_positions, batch)
        if token_type_ids is None:
            token_type_ids = embeddings.token_type_ids[0][position_ids]
        else:
            token_type_ids = one_row("token_type_ids", token_type_ids, batch)
            num_types = embeddings.token_type_embeddings.num_embeddings
            check_ids("token_type_ids", token_type_ids, num_types, batch)
        if input_ids is not None:
            num_words = getattr(
                embeddings.word_embeddings, "num_embeddings", self.config.vocab_size
            )
            check_ids("input_ids", input_ids, num_words, batch)
        position_ids, token_type_ids = batch.unpad(position_ids), batch.unpad(token_type_ids)
        input_ids = None if input_ids is None else batch.unpad(input_ids)
        inputs_embeds = None if inputs_embeds is None else batch.unpad(inputs_embeds)
        if not _is_plain_embedding(embeddings):
            return embeddings(
                input_ids=None if input_ids is None else input_ids[None],
                token_type_ids=token_type_ids[None],
                position_ids=position_ids[None],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            )[0]
        if inputs_embeds is None and not is_plain_table(embeddings.word_embeddings):
            # Adapters and transformers' input hook for checkpointing sit here.
            inputs_embeds, input_ids = embeddings.word_embeddings(input_ids), None
        p = dropout_p(embeddings.dropout)
        return embed_layer_norm(
            input_ids,
            token_type_ids,
            position_ids,
            None if input_ids is None else embeddings.word_embeddings.weight,
            embeddings.token_type_embeddings.weight,
            embeddings.position_embeddings.weight,
            embeddings.LayerNorm.weight,
            embeddings.LayerNorm.bias,
            eps=embeddings.LayerNorm.eps,
            inputs_embeds=inputs_embeds,
            padding_idx=getattr(embeddings.word_embeddings, "padding_idx", None),
            dropout_p=p,
            site=SITE_EMBEDDING,
            rng_state=rng_state if p > 0 else None,
        )

    def _dropout_active(self) -> bool:
        return dropout_p(self.embeddings.dropout) > 0 or any(
            layer.dropout_active() for layer in self.encoder.layer
        )

    def _check_length(self, seqlen: int, position_ids) -> None:
        limit = self.embeddings.position_embeddings.num_embeddings
        if position_ids is None and seqlen > limit:
            raise ValueError(
                f"the input has {seqlen} positions, the model {limit} "
                "(config.max_position_embeddings); truncate the text or pass position_ids"
            )


def _is_plain_embedding(embeddings: nn.Module) -> bool:
    """Whether everything but the word embeddings may be fused."""
    return (
        type(embeddings) is modeling_bert.BertEmbeddings
        and is_unhooked(embeddings)
        and is_plain_norm(embeddings.LayerNorm)
        and is_plain_dropout(embeddings.dropout)
        and is_plain_table(embeddings.token_type_embeddings)
        and is_plain_table(embeddings.position_embeddings)
    )


# --- heads ----------------------------------------------------------------------------------------


class _VocabularyHead(VocabularyHead):
    def decoder_layer(self):
        return self.cls.predictions.decoder

    def scores_by_modules(self, hidden_states):
        return self.cls.predictions(hidden_states)

    def is_plain_head(self):
        predictions = self.cls.predictions
        transform = predictions.transform
        return (
            type(predictions) is modeling_bert.BertLMPredictionHead
            and type(transform) is modeling_bert.BertPredictionHeadTransform
            and all(map(is_unhooked, (self.cls, predictions, transform)))
            and is_plain_linear(transform.dense)
            and is_plain_norm(transform.LayerNorm)
            and gelu_form(transform.transform_act_fn) is not None
            and is_plain_linear(predictions.decoder)
            and all(map(is_ordinary, predictions.parameters()))
        )

    def transform(self, rows):
        transform = self.cls.predictions.transform
        activated = linear_gelu(
            rows,
            transform.dense.weight,
            transform.dense.bias,
            approximate=gelu_form(transform.transform_act_fn),
        )
        return add_norm(activated, None, None, transform.LayerNorm, 0, None)

    def head_parameters(self):
        return self.cls.predictions.parameters()


class BertForMaskedLM(_VocabularyHead, MaskedLMHead, transformers.BertForMaskedLM):
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


class BertForPreTraining(_VocabularyHead, transformers.BertForPreTraining):
    """Drop-in replacement of `transformers.BertForPreTraining`: masked LM and next sentence.

    As `BertForMaskedLM`; the loss is given when both `labels` and `next_sentence_label` are.
    """

    def forward(self, **inputs):
        if self.plain_forward():
            return super().forward(**{k: v for k, v in inputs.items() if k not in HEAD_KEYWORDS})
        labels = inputs.pop("labels", None)
        label_rows = inputs.pop("label_rows", None)
        next_sentence_label = inputs.pop("next_sentence_label", None)
        num_items_in_batch = inputs.pop("num_items_in_batch", None)
        return_logits = inputs.pop("return_logits", True)
        return_dict = pop_return_dict(self.config, inputs)
        has_loss = labels is not None and next_sentence_label is not None
        labels = labels if has_loss else None
        outputs = self.run_model(inputs, labels, label_rows)
        with own_linears(self):
            pair_logits = self.cls.seq_relationship(outputs.pooler_output)
        loss, logits = self.score(outputs, labels, label_rows, num_items_in_batch, return_logits)
        if has_loss:
            pairs = nn.functional.cross_entropy(
                pair_logits.view(-1, 2).float(), next_sentence_label.view(-1)
            )
            loss = loss + rescaled_loss(pairs, labels, num_items_in_batch)
        lazy = isinstance(logits, LazyLogits)
        kind = LazyPreTrainingOutput if lazy else BertForPreTrainingOutput
        result = kind(
            loss=loss,
            prediction_logits=logits,
            seq_relationship_logits=pair_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict else result.to_tuple()


class BertForNextSentencePrediction(TaskHead, transformers.BertForNextSentencePrediction):
    """Drop-in replacement of `transformers.BertForNextSentencePrediction`."""


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
for _class in (BertModel, *HEADS):
    _class.forward = transformers_signature(getattr(transformers, _class.__name__))(_class.forward)
register_conversions(BertLayer, BertModel, *HEADS)
