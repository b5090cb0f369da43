"""DeBERTa-v2 and -v3 (He et al. 2020, 2021) on the fused encoder: transformers' classes, their
forward replaced.

Letters: B batch, S padded length, T packed rows, C hidden, V vocab, P labelled rows, R rows of
relative positions.

What runs transformers' own forward instead stands in fastbert/models/packed_model.py; beside that,
a batch in which a head reads padding (a query of padding attends to everything here, padding
included) and one whose packed rows are no neighbours in the padded batch (a mask with holes):
distances count padded positions. What DeBERTa is pretrained with stands in
fastbert/models/deberta_pretraining.py.
"""

import threading

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2 import modeling_deberta_v2 as modeling

from fastbert import dispatch
from fastbert.cache import CachesWeights, kept
from fastbert.encoder import (
    dropout_p,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    is_unhooked,
    linear,
)
from fastbert.encoder_disentangled import DisentangledLayerSpec, disentangled_layer
from fastbert.models.accelerate import register_family
from fastbert.models.embedding import embed_rows
from fastbert.models.heads import (
    MaskedLMHead,
    QuestionAnsweringHead,
    TableDecoder,
    TaskHead,
    TokenClassificationHead,
    VocabularyParts,
    positions_like,
)
from fastbert.models.inputs import check_ids
from fastbert.models.packed import (
    PACKED_KEYWORDS,
    gelu_form,
    is_plain_table,
    one_row,
    packed_by_caller,
)
from fastbert.models.packed_model import PackedModel, tokens_of
from fastbert.ops.philox import draw_rng_state
from fastbert.ops.unpad import pad, unpad
from fastbert.padding import (
    PackedBatch,
    pack_batch,
    query_rows,
    restarting_positions,
    rows_are_neighbours,
)

DECODER_STEPS = 2
"""Runs of the last layer as the enhanced mask decoder."""

# --- layer ----------------------------------------------------------------------------------------


class DisentangledLayer(CachesWeights):
    """Base of a layer, before transformers' class, which given a `packed` batch runs fused on
    packed rows.

    Attributes:
        parts: the classes of the attention, its two halves, and the two of the feed-forward.
    """

    parts: tuple[type, ...]

    def forward(self, hidden_states, *args, packed=None, index=0, rng_state=None, **kwargs):
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        # By position: checkpointing hands on the gradients of these alone.
        positions, *queries = args
        spec, cache = self.spec(index), self.weight_cache
        return disentangled_layer(
            spec, hidden_states, positions, packed, rng_state, cache, *queries
        )

    def dropout_active(self) -> bool:
        """Whether this layer reads the rng_state; each dropout goes by its own training flag."""
        attention = self.attention.self
        modules = [attention.dropout, self.attention.output.dropout, self.output.dropout]
        if attention.relative_attention:
            modules.append(attention.pos_dropout)
        return any(dropout_p(module) > 0 for module in modules)

    def why_not_packed(self) -> str | None:
        """What about this layer keeps it from packed rows."""
        attention = self.attention
        modules = (attention, attention.self, attention.output, self.intermediate, self.output)
        for module, kind in zip(modules, self.parts, strict=True):
            if type(module) is not kind:
                return f"a layer holds a {type(module).__name__} in place of {kind.__name__}"
            if not is_unhooked(module):
                return f"{kind.__name__} has hooks"
        dropout = attention.self.dropout
        if type(dropout) is not nn.Dropout or not is_unhooked(dropout):
            return "the dropout of the attention probabilities was replaced or has hooks"
        return None

    def _shared_spec(self, index: int) -> dict:
        """What the specs of all versions have in common."""
        attention, output = self.attention.self, self.attention.output
        activation = self.intermediate.intermediate_act_fn
        return {
            "index": index,
            "attention_output": output.dense,
            "attention_output_dropout": output.dropout,
            "attention_norm": output.LayerNorm,
            "intermediate": self.intermediate.dense,
            "activation": activation,
            "approximate": gelu_form(activation),
            "output": self.output.dense,
            "output_dropout": self.output.dropout,
            "output_norm": self.output.LayerNorm,
            "num_heads": attention.num_attention_heads,
            "head_dim": attention.attention_head_size,
            "attention_dropout_p": dropout_p(attention.dropout),
            "position_dropout": attention.pos_dropout if attention.relative_attention else None,
        }


class DebertaV2Layer(DisentangledLayer, modeling.DebertaV2Layer):
    """transformers' layer, which given a `packed` batch runs fused on packed rows."""

    parts = (
        modeling.DebertaV2Attention,
        modeling.DisentangledSelfAttention,
        modeling.DebertaV2SelfOutput,
        modeling.DebertaV2Intermediate,
        modeling.DebertaV2Output,
    )

    def spec(self, index: int) -> DisentangledLayerSpec:
        """The layer's modules in the encoder's terms, at place `index` of the encoder."""
        attention = self.attention.self
        kinds = attention.pos_att_type
        relative = attention.relative_attention
        shared = attention.share_att_key
        position_key = position_query = None
        if relative and "c2p" in kinds:
            position_key = attention.key_proj if shared else attention.pos_key_proj
        if relative and "p2c" in kinds:
            position_query = attention.query_proj if shared else attention.pos_query_proj
        # The terms of a score, which add up their variances.
        terms = 1 + ("c2p" in kinds) + ("p2c" in kinds)
        return DisentangledLayerSpec(
            query=attention.query_proj,
            key=attention.key_proj,
            value=attention.value_proj,
            softmax_scale=(attention.attention_head_size * terms) ** -0.5,
            position_key=position_key,
            position_query=position_query,
            position_buckets=attention.position_buckets if relative else -1,
            max_relative_positions=attention.max_relative_positions if relative else 1,
            **self._shared_spec(index),
        )

    def why_not_packed(self) -> str | None:
        """What about this layer keeps it from packed rows."""
        reason = super().why_not_packed()
        attention = self.attention.self
        if reason is None and attention.relative_attention and attention.position_buckets > 0:
            buckets, reach = attention.position_buckets, attention.max_relative_positions
            if buckets == 1 or reach < buckets // 2 + 2:
                return f"{buckets} position buckets do not fit {reach} relative positions"
        return reason


# --- model ----------------------------------------------------------------------------------------

# transformers' heads of this family hand nothing on but what their signature names.
_beside_signature = threading.local()
_HANDED_ON = PACKED_KEYWORDS - {
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "num_items_in_batch",
}


class DisentangledModel(PackedModel):
    """Base of DeBERTa's models, before transformers' class.

    Attributes:
        encoder_type, embeddings_type: the classes of the modules around the layers.
        enhanced_decoding: whether the last layer is the enhanced mask decoder
            (fastbert/models/deberta_pretraining.py).
    """

    encoder_type: type
    embeddings_type: type
    enhanced_decoding = False

    def forward(self, **kwargs):
        return super().forward(**{**getattr(_beside_signature, "keywords", {}), **kwargs})

    def packed_layers(self):
        return self.encoder.layer

    def why_container_not_packed(self):
        if type(self.encoder) is not self.encoder_type or not is_unhooked(self.encoder):
            return "the encoder was replaced or has hooks"
        if self.z_steps > 1:
            return "the last layer runs more than once (z_steps)"
        return None

    def forward_padded(self, reason, inputs, mask, kwargs):
        if self.enhanced_decoding:
            raise NotImplementedError(
                f"{type(self).__name__}: the enhanced mask decoder runs on packed rows alone, but "
                f"{reason}; leave that out, or load the checkpoint without the decoder"
            )
        if kwargs.get("cu_seq_lens_q") is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: packed input (cu_seq_lens_q) needs the packed forward, "
                f"but {reason}; pass a padded batch with its attention_mask"
            )
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
            # An additive mask, which other families take, would be read as its opposite.
            mask = mask.int()
        return super().forward_padded(reason, inputs, mask, kwargs)

    # --- packed path

    def forward_packed(
        self,
        inputs,
        attention_mask,
        *,
        return_dict=None,
        output_hidden_states=None,
        rng_state=None,
        required_rows=None,
        keep_rows=False,
        last_layer_rows=None,
        cu_seq_lens_q=None,
        cu_seq_lens_k=None,
        max_length_q=None,
        max_length_k=None,
        **others,
    ):
        tokens = tokens_of(inputs["input_ids"], inputs["inputs_embeds"])
        size = tokens.shape[:2]
        output_hidden_states = self.records_hidden_states(output_hidden_states)
        if cu_seq_lens_q is not None:
            batch = packed_by_caller(
                attention_mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, size
            )
            if inputs["position_ids"] is None:
                positions = restarting_positions(batch.cu_seqlens_q, batch.num_rows)
                inputs = {**inputs, "position_ids": positions}
        else:
            batch = pack_batch(attention_mask, *size, tokens.device, required_rows=required_rows)
        reason = self.why_batch_not_packed(batch, cu_seq_lens_q)
        if reason is not None:
            kwargs = {"output_hidden_states": output_hidden_states, "return_dict": return_dict}
            kwargs = {**others, **kwargs, "cu_seq_lens_q": cu_seq_lens_q}
            return self.forward_padded(reason, inputs, attention_mask, kwargs)
        if rng_state is None and self._dropout_active():
            rng_state = draw_rng_state(tokens)
        dispatch.count(self.counted_as, "packed")
        outputs = self._packed_rows(batch, inputs, rng_state, output_hidden_states, last_layer_rows)
        if not keep_rows:
            del outputs.__dict__["packed"]
        return self.finished(outputs, batch, return_dict)

    def why_batch_not_packed(self, batch: PackedBatch, cu_seq_lens_q) -> str | None:
        """What about the rows keeps the call from them."""
        if batch.kv_indices is not None:
            return "a head reads padding"
        if cu_seq_lens_q is not None or batch.indices is None:
            return None
        if dispatch.is_symbolic(batch.indices) or not rows_are_neighbours(batch):
            return "distances count padded positions, and the packed rows are no neighbours"
        return None

    def _packed_rows(
        self, batch, inputs, rng_state, output_hidden_states, last_layer_rows
    ) -> BaseModelOutput:
        rows = embedded = self._embed(batch, rng_state, **inputs)
        states = [rows]
        positions = self._relative_positions()
        for index, layer in enumerate(self.encoder.layer):
            if self.enhanced_decoding and index == len(self.encoder.layer) - 1:
                places = self._absolute_positions(batch, inputs["position_ids"])
                rows = self._decoded(rows, places, positions, batch, rng_state, last_layer_rows)
                states.append(rows)
                break
            rows = layer(rows, positions, packed=batch, index=index, rng_state=rng_state)
            if index == 0:
                rows = self.after_first_layer(batch, embedded, rows)
            states.append(rows)
        outputs = BaseModelOutput(
            last_hidden_state=batch.pad(rows),
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        outputs.__dict__["packed"] = (batch, rows)
        return outputs

    def _decoded(self, rows, places, positions, batch, rng_state, last_layer_rows):
        """`(T, C)` of the enhanced mask decoder: the last layer, whose queries first are the states
        below it and the absolute positions, then its own output, and whose keys and values are the
        states both times. 0 at rows that are not among last_layer_rows, where these are given."""
        query, states = None, rows + places.to(rows.dtype)
        if last_layer_rows is not None:
            query = query_rows(last_layer_rows, batch)
            states = unpad(states, query.rows)
        last = len(self.encoder.layer) - 1
        for step in range(DECODER_STEPS):
            # Each run drops other elements.
            states = self.encoder.layer[last](
                rows,
                positions,
                states,
                query,
                packed=batch,
                index=last + step,
                rng_state=rng_state,
            )
        return states if query is None else pad(states, query.rows, batch.num_rows)

    def _absolute_positions(self, batch, position_ids) -> torch.Tensor:
        """`(T, C)` embeddings that the enhanced mask decoder adds."""
        table = self.embeddings.position_embeddings
        position_ids = _position_ids(batch, position_ids)
        check_ids("position_ids", position_ids, table.num_embeddings, batch)
        return table(batch.unpad(position_ids))

    def _relative_positions(self) -> torch.Tensor | None:
        """`(R, C)` embeddings of relative positions, normalised where the model does that."""
        encoder = self.encoder
        if not encoder.relative_attention:
            return None
        # Kept, so that what the layers keep of their projections has a source that stays.
        sources = [encoder.rel_embeddings.weight]
        if "layer_norm" in getattr(encoder, "norm_rel_ebd", ()):
            sources += encoder.LayerNorm.parameters()
        if torch.is_grad_enabled():
            self.weight_cache.clear()
        found = kept(self.weight_cache, "positions", sources, encoder.get_rel_embedding)
        return encoder.get_rel_embedding() if found is None else found

    def after_first_layer(self, batch, embedded, rows) -> torch.Tensor:
        """What the second layer reads, of the embeddings and the first one's output."""
        return rows

    def _embed(
        self, batch, rng_state, *, input_ids, token_type_ids, position_ids, inputs_embeds
    ) -> torch.Tensor:
        """`(T, C)` embeddings of the packed rows."""
        embeddings = self.embeddings
        words = embeddings.word_embeddings
        # A table that the input leaves out is the enhanced mask decoder's.
        places = embeddings.position_embeddings if embeddings.position_biased_input else None
        kinds = embeddings.token_type_embeddings
        position_ids = _position_ids(batch, position_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        token_type_ids = one_row("token_type_ids", token_type_ids, batch)
        if places is not None:
            check_ids("position_ids", position_ids, places.num_embeddings, batch)
        if kinds is not None:
            check_ids("token_type_ids", token_type_ids, kinds.num_embeddings, batch)
        input_ids, inputs_embeds = self.word_rows(words, input_ids, inputs_embeds, batch)
        position_ids, token_type_ids = batch.unpad(position_ids), batch.unpad(token_type_ids)
        if not self._is_plain_embedding():
            return embeddings(
                input_ids=None if input_ids is None else input_ids[None],
                token_type_ids=token_type_ids[None],
                position_ids=position_ids[None],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            )[0]
        token_types = None if kinds is None else (token_type_ids, kinds.weight)
        positions = None if places is None else (position_ids, places.weight)
        if embeddings.embed_proj is not None:
            rows = words(input_ids) if inputs_embeds is None else inputs_embeds
            for ids, table in filter(None, (token_types, positions)):
                rows = rows + nn.functional.embedding(ids, table)
            input_ids = token_types = positions = None
            inputs_embeds = linear(embeddings.embed_proj, rows, self.weight_cache, "embed_proj")
        return embed_rows(
            words,
            input_ids,
            inputs_embeds,
            token_types=token_types,
            positions=positions,
            norm=embeddings.LayerNorm,
            dropout=embeddings.dropout,
            rng_state=rng_state,
        )

    def _dropout_active(self) -> bool:
        return dropout_p(self.embeddings.dropout) > 0 or any(
            layer.dropout_active() for layer in self.encoder.layer
        )

    def _is_plain_embedding(self) -> bool:
        """Whether everything but the word embeddings may be fused."""
        embeddings = self.embeddings
        tables = (embeddings.position_embeddings, embeddings.token_type_embeddings)
        projection = embeddings.embed_proj
        return (
            type(embeddings) is self.embeddings_type
            and is_unhooked(embeddings)
            and (projection is None or is_plain_linear(projection))
            and is_plain_norm(embeddings.LayerNorm)
            and is_plain_dropout(embeddings.dropout)
            and all(table is None or is_plain_table(table) for table in tables)
        )


def _position_ids(batch: PackedBatch, position_ids: torch.Tensor | None) -> torch.Tensor:
    """`(B, S)` or `(1, S)`, from 0 where none are given."""
    if position_ids is None:
        position_ids = torch.arange(batch.seqlen, device=batch.cu_seqlens_q.device)
    return one_row("position_ids", position_ids, batch)


class DebertaV2Model(DisentangledModel, transformers.DebertaV2Model):
    """Drop-in replacement of `transformers.DebertaV2Model` that computes real tokens only.

    Takes what transformers' class takes and returns the same numbers; `last_hidden_state` and
    `hidden_states` are 0 at padding. Further keyword arguments and errors as `fastbert.BertModel`
    has them, but for `pooled_rows` and `last_layer_rows`.

    Raises:
        NotImplementedError: `cu_seq_lens_q` where transformers' own forward would have to run: it
            knows no packed input.
    """

    logged_as = "DebertaV2Model"
    counted_as = "deberta_v2_model"
    layer_type = DebertaV2Layer
    encoder_type = modeling.DebertaV2Encoder
    embeddings_type = modeling.DebertaV2Embeddings

    def why_container_not_packed(self):
        reason = super().why_container_not_packed()
        if reason is None and self.encoder.conv is not None:
            kind = type(self.encoder.conv)
            return None if kind is modeling.ConvLayer else f"the convolution is a {kind.__name__}"
        return reason

    def why_batch_not_packed(self, batch, cu_seq_lens_q):
        if self.encoder.conv is not None and cu_seq_lens_q is not None:
            return "the convolution would join the texts of packed input"
        return super().why_batch_not_packed(batch, cu_seq_lens_q)

    def after_first_layer(self, batch, embedded, rows):
        """transformers' convolution over the padded texts, where there is one."""
        if self.encoder.conv is None:
            return rows
        real = batch.pad(rows.new_ones(batch.num_rows, dtype=torch.int64))
        return batch.unpad(self.encoder.conv(batch.pad(embedded), batch.pad(rows), real))


# --- heads ----------------------------------------------------------------------------------------


class DisentangledMaskedLMHead(MaskedLMHead):
    """Base of the masked-LM head of all versions, with both its heads (`config.legacy`).

    Attributes:
        legacy_kinds: the classes of the legacy head and of what is in it. kinds: of the other's.
    """

    legacy_kinds: tuple[type, ...]
    kinds: tuple[type, ...]

    def vocabulary_parts(self):
        if self.legacy:
            predictions = self.cls.predictions
            around, kinds = (self.cls, predictions, predictions.transform), self.legacy_kinds
            decoder = predictions.decoder
        else:
            around, kinds = (self.lm_predictions, self.lm_predictions.lm_head), self.kinds
            words = self.deberta.embeddings.word_embeddings
            decoder = TableDecoder(words, self.lm_predictions.lm_head.bias)
        transform = around[-1]
        return VocabularyParts(
            dense=transform.dense,
            activation=transform.transform_act_fn,
            norm=transform.LayerNorm,
            decoder=decoder,
            containers=tuple(zip(around, kinds, strict=True)),
        )

    def scores_by_modules(self, hidden_states):
        if self.legacy:
            return self.cls(hidden_states)
        return self.lm_predictions(hidden_states, self.deberta.embeddings.word_embeddings)


class DebertaV2ForMaskedLM(DisentangledMaskedLMHead, transformers.DebertaV2ForMaskedLM):
    """Drop-in replacement of `transformers.DebertaV2ForMaskedLM`.

    Loss, logits and further keyword arguments as `fastbert.BertForMaskedLM`.
    """

    legacy_kinds = (
        modeling.LegacyDebertaV2OnlyMLMHead,
        modeling.LegacyDebertaV2LMPredictionHead,
        modeling.LegacyDebertaV2PredictionHeadTransform,
    )
    kinds = (modeling.DebertaV2OnlyMLMHead, modeling.DebertaV2LMPredictionHead)


class HandsOn:
    """Base of heads right before transformers' class: our keyword arguments reach the model."""

    def forward(self, **inputs):
        ours = {name: inputs.pop(name) for name in _HANDED_ON if name in inputs}
        _beside_signature.keywords = ours
        try:
            return super().forward(**inputs)
        finally:
            _beside_signature.keywords = {}


class PooledHead(TaskHead):
    """A head that reads position 0 of every text."""

    def rows_read(self, inputs):
        if inputs.get("cu_seq_lens_q") is not None:
            return None
        first = positions_like(inputs, False)
        if first is not None:
            first[:, :1] = True
        return first


class DebertaV2ForSequenceClassification(
    PooledHead, HandsOn, transformers.DebertaV2ForSequenceClassification
):
    """Drop-in replacement of `transformers.DebertaV2ForSequenceClassification`."""


class DebertaV2ForTokenClassification(
    TokenClassificationHead, HandsOn, transformers.DebertaV2ForTokenClassification
):
    """Drop-in replacement of `transformers.DebertaV2ForTokenClassification`."""


class DebertaV2ForQuestionAnswering(
    QuestionAnsweringHead, HandsOn, transformers.DebertaV2ForQuestionAnswering
):
    """Drop-in replacement of `transformers.DebertaV2ForQuestionAnswering`.

    Its softmax reads padding, so a batch with padding runs transformers' forward.
    """


class DebertaV2ForMultipleChoice(PooledHead, HandsOn, transformers.DebertaV2ForMultipleChoice):
    """Drop-in replacement of `transformers.DebertaV2ForMultipleChoice`."""


HEADS = (
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForMultipleChoice,
)
register_family(DebertaV2Layer, DebertaV2Model, *HEADS)
