"""ModernBERT (Warner et al. 2024) on the fused pre-norm encoder: transformers' classes, their
forward replaced.

Letters: B batch, S padded length, T packed rows, C hidden, D head dim, V vocab, P labelled rows.

What runs transformers' own forward instead stands in fastbert/models/packed_model.py; beside that,
a batch whose sliding window is narrower than its texts and whose packed rows are no neighbours in
the padded batch (a mask with holes, padding that a head reads under left padding): the window
counts padded positions.
"""

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.modernbert import modeling_modernbert as modeling
from transformers.utils.output_capturing import capture_outputs

from fastbert import dispatch
from fastbert.cache import CachesWeights
from fastbert.encoder import (
    add_norm,
    dropout_p,
    is_plain_dropout,
    is_plain_norm,
    is_unhooked,
)
from fastbert.encoder_prenorm import PreNormLayerSpec, Rotation, pre_norm_layer
from fastbert.models.accelerate import register_family
from fastbert.models.embedding import embed_rows
from fastbert.models.heads import (
    MaskedLMHead,
    QuestionAnsweringHead,
    TaskHead,
    TokenClassificationHead,
    VocabularyParts,
    positions_like,
)
from fastbert.models.packed import (
    additive_mask,
    gelu_form,
    one_row,
    packed_by_caller,
)
from fastbert.models.packed_model import PackedModel, tokens_of
from fastbert.ops.philox import draw_rng_state
from fastbert.padding import (
    PackedBatch,
    pack_batch,
    restarting_positions,
    rows_are_neighbours,
)

SLIDING = "sliding_attention"


class ModernBertEncoderLayer(CachesWeights, modeling.ModernBertEncoderLayer):
    """transformers' layer, which given a `packed` batch runs fused on packed rows."""

    def forward(self, hidden_states, *args, packed=None, rotations=None, rng_state=None, **kwargs):
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        rotation = rotations[self.attention_type]
        return pre_norm_layer(
            self.spec(), hidden_states, packed, rotation, rng_state, self.weight_cache
        )

    def spec(self) -> PreNormLayerSpec:
        """The layer's modules in the encoder's terms."""
        attention, feed_forward = self.attn, self.mlp
        return PreNormLayerSpec(
            index=self.layer_idx,
            attention_norm=self.attn_norm,
            qkv=attention.Wqkv,
            attention_output=attention.Wo,
            attention_output_dropout=attention.out_drop,
            feed_forward_norm=self.mlp_norm,
            gated=feed_forward.Wi,
            activation=feed_forward.act,
            approximate=gelu_form(feed_forward.act),
            inner_dropout=feed_forward.drop,
            output=feed_forward.Wo,
            num_heads=self.config.num_attention_heads,
            head_dim=attention.head_dim,
            softmax_scale=attention.head_dim**-0.5,
            attention_dropout_p=attention.attention_dropout if attention.training else 0.0,
            window=self.window(),
        )

    def window(self) -> int | None:
        """Tokens a local layer sees to each side; None in a global one."""
        return self.config.sliding_window if self.attention_type == SLIDING else None

    def dropout_active(self) -> bool:
        """Whether this layer reads the rng_state; each dropout goes by its own training flag."""
        return (
            dropout_p(self.attn.out_drop) > 0
            or dropout_p(self.mlp.drop) > 0
            or (self.attn.training and self.attn.attention_dropout > 0)
        )

    def why_not_packed(self) -> str | None:
        """What about this layer keeps it from packed rows."""
        expected = (
            (self.attn, modeling.ModernBertAttention),
            (self.mlp, modeling.ModernBertMLP),
        )
        for module, kind in expected:
            if type(module) is not kind:
                return f"a layer holds a {type(module).__name__} in place of {kind.__name__}"
            if not is_unhooked(module):
                return f"{kind.__name__} has hooks"
        if self.attn.head_dim % 2:
            return f"a head dim of {self.attn.head_dim} cannot be rotated in pairs"
        return None


# --- model ----------------------------------------------------------------------------------------


class ModernBertModel(PackedModel, transformers.ModernBertModel):
    """Drop-in replacement of `transformers.ModernBertModel` that computes real tokens only.

    Takes what transformers' class takes and returns the same numbers; `last_hidden_state` and
    `hidden_states` are 0 at padding. Further keyword arguments and errors as `fastbert.BertModel`
    has them, but for `pooled_rows`.
    """

    logged_as = "ModernBertModel"
    counted_as = "modernbert_model"
    layer_type = ModernBertEncoderLayer
    input_names = ("input_ids", "position_ids", "inputs_embeds")

    def packed_layers(self):
        return self.layers

    def why_container_not_packed(self):
        if type(self.rotary_emb) is not modeling.ModernBertRotaryEmbedding:
            return f"the rotary embedding is a {type(self.rotary_emb).__name__}"
        return None

    def masks_per_query(self, together):
        # One for each kind of layers.
        rows = torch.arange(together.shape[-1], device=together.device)
        near = (rows[:, None] - rows[None, :]).abs() <= self.config.sliding_window
        masks = {"full_attention": together, SLIDING: together & near}
        return {kind: additive_mask(mask, self.dtype) for kind, mask in masks.items()}

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
        cu_seq_lens_q=None,
        cu_seq_lens_k=None,
        max_length_q=None,
        max_length_k=None,
        **others,
    ):
        input_ids, position_ids, inputs_embeds = inputs.values()
        tokens = tokens_of(input_ids, inputs_embeds)
        size = tokens.shape[:2]
        output_hidden_states = self.records_hidden_states(output_hidden_states)
        if cu_seq_lens_q is not None:
            batch = packed_by_caller(
                attention_mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, size
            )
            if position_ids is None:
                position_ids = restarting_positions(batch.cu_seqlens_q, batch.num_rows)
        else:
            batch = pack_batch(attention_mask, *size, tokens.device, required_rows=required_rows)
            if not self._windows_hold(batch):
                reason = "a window is narrower than the texts, and their rows are no neighbours"
                kwargs = {"output_hidden_states": output_hidden_states, "return_dict": return_dict}
                return self.forward_padded(reason, inputs, attention_mask, {**others, **kwargs})
        if rng_state is None and self._dropout_active():
            rng_state = draw_rng_state(tokens)
        dispatch.count(self.counted_as, "packed")
        outputs = self._packed_rows(
            batch,
            (input_ids, position_ids, inputs_embeds),
            rng_state,
            required_rows is not None,
            keep_rows,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        return self.finished(outputs, batch, return_dict)

    def _windows_hold(self, batch: PackedBatch) -> bool:
        """Whether a window over packed rows is one over padded positions."""
        windows = [layer.window() for layer in self.layers if layer.window() is not None]
        if not windows or batch.max_seqlen <= min(windows) + 1 or batch.indices is None:
            return True
        return not dispatch.is_symbolic(batch.indices) and rows_are_neighbours(batch)

    @capture_outputs
    def _packed_rows(
        self, batch: PackedBatch, inputs, rng_state, keep_query_only, keep_rows, **kwargs
    ):
        input_ids, position_ids, inputs_embeds = inputs
        rows = self._embed(batch, input_ids, inputs_embeds, rng_state)
        rotations = self._rotations(batch, position_ids, rows.device)
        for layer in self.layers:
            rows = layer(rows, packed=batch, rotations=rotations, rng_state=rng_state)
        rows = add_norm(rows, None, None, self.final_norm, 0, None)
        outputs = BaseModelOutput(
            last_hidden_state=batch.pad(rows, keep_query_only=keep_query_only)
        )
        if keep_rows:
            outputs.__dict__["packed"] = (batch, rows)
        return outputs

    def _embed(self, batch, input_ids, inputs_embeds, rng_state) -> torch.Tensor:
        """`(T, C)` embeddings of the packed rows."""
        embeddings = self.embeddings
        words = embeddings.tok_embeddings
        input_ids, inputs_embeds = self.word_rows(words, input_ids, inputs_embeds, batch)
        plain = (
            type(embeddings) is modeling.ModernBertEmbeddings
            and is_unhooked(embeddings)
            and is_plain_norm(embeddings.norm)
            and is_plain_dropout(embeddings.drop)
        )
        if not plain:
            return embeddings(
                input_ids=None if input_ids is None else input_ids[None],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            )[0]
        return embed_rows(
            words,
            input_ids,
            inputs_embeds,
            token_types=None,
            positions=None,
            norm=embeddings.norm,
            dropout=embeddings.drop,
            rng_state=rng_state,
        )

    def _rotations(self, batch, position_ids, device) -> dict[str, Rotation]:
        """Angles of each kind of layer, by transformers' own module, in fp32."""
        if position_ids is None:
            position_ids = torch.arange(batch.seqlen, device=device)
        position_ids = one_row("position_ids", position_ids, batch)
        places = torch.arange(position_ids.numel(), device=device).view(position_ids.shape)
        index = batch.unpad(places)
        like = torch.zeros((), device=device)
        rotations = {}
        for kind in set(self.config.layer_types):
            cos, sin = self.rotary_emb(like, position_ids, kind)
            half = cos.shape[-1] // 2
            cos, sin = (t[..., :half].reshape(-1, half) for t in (cos, sin))
            rotations[kind] = Rotation(cos, sin, index)
        return rotations

    def _dropout_active(self) -> bool:
        return dropout_p(self.embeddings.drop) > 0 or any(
            layer.dropout_active() for layer in self.layers
        )


# --- heads ----------------------------------------------------------------------------------------


class ModernBertForMaskedLM(MaskedLMHead, transformers.ModernBertForMaskedLM):
    """Drop-in replacement of `transformers.ModernBertForMaskedLM`.

    Loss, logits and further keyword arguments as `fastbert.BertForMaskedLM`. With
    `config.sparse_prediction` and labels, `logits` are `(P, V)`, of the labelled rows alone.
    """

    def vocabulary_parts(self):
        head = self.head
        return VocabularyParts(
            dense=head.dense,
            activation=head.act,
            norm=head.norm,
            decoder=self.decoder,
            containers=((head, modeling.ModernBertPredictionHead),),
        )

    def scores_by_modules(self, hidden_states):
        return self.decoder(self.head(hidden_states))


class _OneTextARow(TaskHead):
    """A head that pools by itself, one text a row of ids."""

    def forward(self, **inputs):
        if inputs.get("pooled_rows") is not None:
            raise NotImplementedError(
                f"{type(self).__name__} pools one text a row of ids and takes no pooled_rows; pass "
                "a padded batch"
            )
        return super().forward(**inputs)


class ModernBertForSequenceClassification(
    _OneTextARow, transformers.ModernBertForSequenceClassification
):
    """Drop-in replacement of `transformers.ModernBertForSequenceClassification`."""

    def rows_read(self, inputs):
        if self.config.classifier_pooling != "cls" or inputs.get("cu_seq_lens_q") is not None:
            return None
        first = positions_like(inputs, False)
        if first is not None:
            first[:, :1] = True
        return first


class ModernBertForTokenClassification(
    _OneTextARow, TokenClassificationHead, transformers.ModernBertForTokenClassification
):
    """Drop-in replacement of `transformers.ModernBertForTokenClassification`."""


class ModernBertForQuestionAnswering(
    _OneTextARow, QuestionAnsweringHead, transformers.ModernBertForQuestionAnswering
):
    """Drop-in replacement of `transformers.ModernBertForQuestionAnswering`.

    Where a window shows padded positions no real token they attend to nothing, as in torch's sdpa.
    """


class ModernBertForMultipleChoice(_OneTextARow, transformers.ModernBertForMultipleChoice):
    """Drop-in replacement of `transformers.ModernBertForMultipleChoice`."""


HEADS = (
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertForQuestionAnswering,
    ModernBertForMultipleChoice,
)
register_family(ModernBertEncoderLayer, ModernBertModel, *HEADS)
