"""ModernBERT (Warner et al. 2024) on the fused pre-norm encoder: transformers' classes, their
forward replaced.

Letters: B batch, S padded length, T packed rows, C hidden, D head dim, V vocab, P labelled rows.

What cannot be expressed on packed rows runs transformers' own forward, as in
fastbert/models/bert.py; beside what is named there, a batch whose sliding window is narrower than
its texts and whose packed rows are no neighbours in the padded batch (a mask with holes, padding
that a head reads under left padding): the window counts padded positions.
"""

import contextlib

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.models.modernbert import modeling_modernbert as modeling
from transformers.utils.output_capturing import capture_outputs

from fastbert import dispatch
from fastbert.cache import CachesWeights
from fastbert.encoder import (
    add_norm,
    compute_dtype,
    dropout_p,
    is_ordinary,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    is_unhooked,
)
from fastbert.encoder_prenorm import PreNormLayerSpec, Rotation, pre_norm_layer
from fastbert.models.accelerate import register_conversions, swap_classes
from fastbert.models.inputs import check_ids, check_tensors
from fastbert.models.linears import own_linear, own_linears
from fastbert.models.losses import IGNORE_INDEX, mean_loss, rescaled_loss
from fastbert.models.outputs import Deferred, LazyLogits, LazyMaskedLMOutput
from fastbert.models.packed import (
    ATTENTION_IMPLEMENTATIONS,
    HEAD_KEYWORDS,
    OUR_KEYWORDS,
    PACKED_ATTENTION,
    PACKED_KEYWORDS,
    additive_mask,
    block_mask,
    check_reach,
    eager_attention,
    gelu_form,
    is_checkable_mask,
    is_plain_table,
    is_sharded,
    is_traced,
    is_transformed,
    one_row,
    packed_by_caller,
    pop_return_dict,
)
from fastbert.models.signature import transformers_signature
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.ops.linear_gelu import linear_gelu
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.philox import draw_rng_state
from fastbert.ops.unpad import unpad
from fastbert.padding import (
    PackedBatch,
    check_mask_shape,
    pack_batch,
    restarting_positions,
    rows_are_neighbours,
)
from fastbert.reference.philox import SITE_EMBEDDING

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


class ModernBertModel(CachesWeights, transformers.ModernBertModel):
    """Drop-in replacement of `transformers.ModernBertModel` that computes real tokens only.

    Takes what transformers' class takes and returns the same numbers; `last_hidden_state` and
    `hidden_states` are 0 at padding. Further keyword arguments and errors as `fastbert.BertModel`
    has them, but for `pooled_rows`.
    """

    def __init__(self, config):
        super().__init__(config)
        swap_classes(self)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        **kwargs,
    ):
        inputs = (input_ids, attention_mask, position_ids, inputs_embeds)
        check_tensors(
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
        )
        reason = self.why_not_packed(attention_mask, kwargs)
        if reason is not None:
            return self._forward_padded(reason, inputs, kwargs)
        return self._forward_packed(inputs, **kwargs)

    # --- transformers' own path

    def why_not_packed(self, attention_mask, kwargs) -> str | None:
        """Why these arguments need transformers' own forward; None if they do not."""
        if is_traced():
            return "the model is being traced or exported"
        if is_transformed():
            return "a functorch transform or forward-mode differentiation is active"
        for name, value in kwargs.items():
            if name not in PACKED_KEYWORDS and value is not None and value is not False:
                return f"the keyword argument {name!r} is passed on to transformers"
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            return "attention weights were asked for"
        if self.config._attn_implementation not in ATTENTION_IMPLEMENTATIONS:
            return f"attn_implementation is {self.config._attn_implementation!r}"
        if isinstance(attention_mask, dict):
            return "attention_mask is given per kind of layer"
        if attention_mask is not None:
            if type(attention_mask).__name__ == "BlockMask":
                return "attention_mask is flex attention's"
            check_tensors(attention_mask=attention_mask)
            if attention_mask.dim() == 4:
                return "attention_mask is given per query"
        return self._why_modules_not_packed()

    def _why_modules_not_packed(self) -> str | None:
        if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
            return "global module hooks are set"
        if type(self.rotary_emb) is not modeling.ModernBertRotaryEmbedding:
            return f"the rotary embedding is a {type(self.rotary_emb).__name__}"
        for layer in self.layers:
            if not isinstance(layer, ModernBertEncoderLayer):
                return f"a layer is a {type(layer).__name__}"
            reason = layer.why_not_packed()
            if reason is not None:
                return reason
        return None

    def _forward_padded(self, reason, inputs, kwargs):
        dispatch.log_once("ModernBertModel", "packed rows", reason)
        dispatch.count("modernbert_model", "padded")
        kwargs = {k: v for k, v in kwargs.items() if k not in OUR_KEYWORDS}
        input_ids, mask, position_ids, inputs_embeds = inputs
        tokens = inputs_embeds if input_ids is None else input_ids
        starts = kwargs.get("cu_seq_lens_q")
        if starts is not None and tokens is not None:
            if position_ids is None:
                position_ids = restarting_positions(starts, tokens.shape[1])
            if self.config._attn_implementation not in PACKED_ATTENTION:
                # transformers' attention would let the sequences of the row see each other.
                mask = self._masks_by_kind(block_mask(starts, mask, tokens))
        if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
            mask = additive_mask(mask, self.dtype)
        elif is_checkable_mask(mask, tokens, kwargs):
            check_mask_shape("attention_mask", mask, *tokens.shape[:2])
        wanted = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
        with eager_attention(self.config) if wanted else contextlib.nullcontext():
            return super().forward(input_ids, mask, position_ids, inputs_embeds, **kwargs)

    def _masks_by_kind(self, together: torch.Tensor) -> dict[str, torch.Tensor]:
        """transformers' masks for both kinds of layers, from `(1, 1, T, T)` bool."""
        rows = torch.arange(together.shape[-1], device=together.device)
        near = (rows[:, None] - rows[None, :]).abs() <= self.config.sliding_window
        masks = {"full_attention": together, SLIDING: together & near}
        return {kind: additive_mask(mask, self.dtype) for kind, mask in masks.items()}

    # --- packed path

    def _forward_packed(
        self,
        inputs,
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
        input_ids, attention_mask, position_ids, inputs_embeds = inputs
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("specify exactly one of input_ids and inputs_embeds")
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens.dim() != (3 if input_ids is None else 2):
            name = "inputs_embeds" if input_ids is None else "input_ids"
            shape = "(batch, length, hidden)" if input_ids is None else "(batch, length)"
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tokens.shape)}")
        size = tokens.shape[:2]
        if size[1] == 0:
            raise ValueError("the input has 0 positions; a text needs at least one token")
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
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
                return self._forward_padded(reason, inputs, {**others, **kwargs})
        if rng_state is None and self._dropout_active():
            rng_state = draw_rng_state(tokens)
        dispatch.count("modernbert_model", "packed")
        outputs = self._packed_rows(
            batch,
            (input_ids, position_ids, inputs_embeds),
            rng_state,
            required_rows is not None,
            keep_rows,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        if outputs.get("hidden_states") is not None:
            states = outputs.hidden_states
            padded = [None if h is None else batch.pad(h) for h in states[:-1]]
            last = None if states[-1] is None else outputs.last_hidden_state
            outputs.hidden_states = (*padded, last)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return outputs if return_dict else outputs.to_tuple()

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
        if input_ids is not None:
            num_words = getattr(words, "num_embeddings", self.config.vocab_size)
            check_ids("input_ids", input_ids, num_words, batch)
            input_ids = batch.unpad(input_ids)
        else:
            inputs_embeds = batch.unpad(inputs_embeds)
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
        if inputs_embeds is None and not is_plain_table(words):
            # Adapters and transformers' input hook for checkpointing sit here.
            inputs_embeds, input_ids = words(input_ids), None
        # Token types and positions are no part of it: one row of zeros stands for each table. Two
        # of each, since Dynamo takes no tensor twice.
        values = words.weight if inputs_embeds is None else inputs_embeds
        kinds, places = values.new_zeros(2, batch.num_rows, dtype=torch.int64)
        no_kind, no_place = values.new_zeros(2, 1, values.shape[-1])
        p = dropout_p(embeddings.drop)
        return embed_layer_norm(
            input_ids,
            kinds,
            places,
            None if input_ids is None else words.weight,
            no_kind,
            no_place,
            embeddings.norm.weight,
            embeddings.norm.bias,
            eps=embeddings.norm.eps,
            inputs_embeds=inputs_embeds,
            padding_idx=getattr(words, "padding_idx", None),
            dropout_p=p,
            site=SITE_EMBEDDING,
            rng_state=rng_state if p > 0 else None,
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


class ModernBertForMaskedLM(CachesWeights, transformers.ModernBertForMaskedLM):
    """Drop-in replacement of `transformers.ModernBertForMaskedLM`.

    Loss, logits and further keyword arguments as `fastbert.BertForMaskedLM`. With
    `config.sparse_prediction` and labels, `logits` are `(P, V)`, of the labelled rows alone.
    """

    def __init__(self, config):
        super().__init__(config)
        swap_classes(self)

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        **kwargs,
    ):
        inputs = (input_ids, attention_mask, position_ids, inputs_embeds)
        if is_traced() or is_transformed() or not isinstance(self.model, ModernBertModel):
            kwargs = {k: v for k, v in kwargs.items() if k not in HEAD_KEYWORDS}
            return super().forward(*inputs, **kwargs)
        labels = kwargs.pop("labels", None)
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        return_logits = kwargs.pop("return_logits", True)
        label_rows = kwargs.pop("label_rows", None)
        return_dict = pop_return_dict(self.config, kwargs)
        required = None
        if label_rows is not None and kwargs.get("cu_seq_lens_q") is None:
            raise ValueError(
                "label_rows are rows of packed input and need cu_seq_lens_q; of a padded batch "
                "the labelled rows are found by the labels"
            )
        if labels is not None:
            tokens = inputs_embeds if input_ids is None else input_ids
            check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels)
            check_mask_shape("labels", labels, *tokens.shape[:2])
            if label_rows is None:
                required = labels != self._ignored_label()
            elif dispatch.is_checkable(labels):
                check_reach("label_rows", label_rows, labels)
        outputs = self.model(
            *inputs, required_rows=required, keep_rows=True, return_dict=True, **kwargs
        )
        loss = logits = None
        if labels is None:
            logits = self._logits(outputs) if return_logits else None
        else:
            rows, labels = self._labelled_rows(outputs, labels, label_rows)
            loss = mean_loss(self._losses(rows, labels), labels, num_items_in_batch)
            if return_logits:
                logits = self._logits_beside_loss(outputs, rows)
        kind = LazyMaskedLMOutput if isinstance(logits, LazyLogits) else MaskedLMOutput
        result = kind(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict else result.to_tuple()

    def _ignored_label(self) -> int:
        return self.sparse_pred_ignore_index if self.sparse_prediction else IGNORE_INDEX

    def _labelled_rows(self, outputs, labels, label_rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows `(P, C)` and labels `(P,)` where there is a label; all while traced."""
        batch, rows = outputs.__dict__.get("packed", (None, None))
        labels = labels.reshape(-1).to(outputs.last_hidden_state.device)
        if rows is None:
            rows = outputs.last_hidden_state.flatten(0, 1)
        elif batch.indices is not None:
            labels = labels[batch.indices]
        if label_rows is None:
            if dispatch.is_symbolic(rows):
                return rows, labels
            labelled = labels != self._ignored_label()
            counted = batch is not None and batch.num_required is not None
            label_rows = batch.required(labelled) if counted else labelled.nonzero().view(-1)
        return unpad(rows, label_rows), labels[label_rows]

    def _losses(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`(P,)` cross-entropies in fp32, 0 where a label is ignored."""
        if self._is_plain_head():
            weight, bias = self.decoder.weight, self.decoder.bias
            return mlm_cross_entropy(self._transform(rows), weight, bias, labels)
        scores = self.decoder(self.head(rows)).float()
        return nn.functional.cross_entropy(scores, labels, reduction="none")

    def _is_plain_head(self) -> bool:
        head = self.head
        return (
            type(head) is modeling.ModernBertPredictionHead
            and is_unhooked(head)
            and is_plain_linear(head.dense)
            and is_plain_norm(head.norm)
            and gelu_form(head.act) is not None
            and is_plain_linear(self.decoder)
            and all(map(is_ordinary, (*head.parameters(), *self.decoder.parameters())))
        )

    def _transform(self, rows: torch.Tensor) -> torch.Tensor:
        dense = self.head.dense
        activated = linear_gelu(
            rows, dense.weight, dense.bias, approximate=gelu_form(self.head.act)
        )
        return add_norm(activated, None, None, self.head.norm, 0, None)

    def _logits(self, outputs) -> torch.Tensor:
        """`(B, S, V)` scores; every padded position has the scores of a zero hidden state."""
        batch, rows = outputs.__dict__.get("packed", (None, None))
        if rows is None or batch.indices is None or dispatch.is_symbolic(rows):
            return self._scores(outputs.last_hidden_state)
        blank = self._scores(rows.new_zeros(1, rows.shape[-1]))
        return batch.pad_with(self._scores(rows), blank)

    def _scores(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., V)` of hidden states `(..., C)`."""
        if dispatch.is_symbolic(hidden_states) or not self._is_plain_head():
            return self.decoder(self.head(hidden_states))
        rows = self._transform(hidden_states.reshape(-1, hidden_states.shape[-1]))
        scores = own_linear(rows, self.decoder.weight, self.decoder.bias, cache=self.weight_cache)
        return scores.view(*hidden_states.shape[:-1], -1)

    def _logits_beside_loss(self, outputs, rows) -> torch.Tensor:
        """Logits beside a loss: a stand-in for them, where nothing needs the values now."""

        def compute():
            return self._scores(rows) if self.sparse_prediction else self._logits(outputs)

        hidden = outputs.last_hidden_state
        lazy = self.training and not dispatch.is_symbolic(hidden) and self._is_plain_head()
        if not lazy or is_sharded(self) or is_sharded(self.model):
            return compute()
        weights = [*self.head.parameters(), *self.decoder.parameters()]
        size = (len(rows),) if self.sparse_prediction else hidden.shape[:2]
        return LazyLogits(
            Deferred(compute, weights, hidden.device),
            (*size, self.decoder.out_features),
            compute_dtype(hidden) or hidden.dtype,
            hidden.device,
        )


class _Head(CachesWeights):
    """A head whose forward is transformers' own, on our `ModernBertModel`.

    What is added: the rows the head reads are computed where they are padding, and
    `num_items_in_batch` is the denominator of the loss.
    """

    def __init__(self, config):
        super().__init__(config)
        swap_classes(self)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if kwargs.get("pooled_rows") is not None:
            raise NotImplementedError(
                f"{type(self).__name__} pools one text a row of ids and takes no pooled_rows; pass "
                "a padded batch"
            )
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        return_dict = pop_return_dict(self.config, kwargs)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        if isinstance(self.model, ModernBertModel):
            kwargs["required_rows"] = self.rows_read(input_ids, kwargs)
        with own_linears(self):
            outputs = super().forward(**inputs, return_dict=True, **kwargs)
        labels = kwargs.get("labels")
        if outputs.loss is not None and labels is not None:
            outputs.loss = rescaled_loss(outputs.loss, labels, num_items_in_batch)
        return outputs if return_dict else outputs.to_tuple()

    def rows_read(self, input_ids, kwargs) -> torch.Tensor | None:
        """`(B, S)` bool of positions read although they may be padding."""
        return None


def _all_positions(input_ids, kwargs, value: bool) -> torch.Tensor | None:
    """`(B, S)` bool; None without an input, which the model will say."""
    tokens = kwargs.get("inputs_embeds") if input_ids is None else input_ids
    if tokens is None:
        return None
    return torch.full(tokens.shape[:2], value, dtype=torch.bool, device=tokens.device)


class ModernBertForSequenceClassification(_Head, transformers.ModernBertForSequenceClassification):
    """Drop-in replacement of `transformers.ModernBertForSequenceClassification`."""

    def rows_read(self, input_ids, kwargs):
        if self.config.classifier_pooling != "cls" or kwargs.get("cu_seq_lens_q") is not None:
            return None
        first = _all_positions(input_ids, kwargs, False)
        if first is not None:
            first[:, :1] = True
        return first


class ModernBertForTokenClassification(_Head, transformers.ModernBertForTokenClassification):
    """Drop-in replacement of `transformers.ModernBertForTokenClassification`."""

    def rows_read(self, input_ids, kwargs):
        labels = kwargs.get("labels")
        return None if labels is None else labels != IGNORE_INDEX


class ModernBertForQuestionAnswering(_Head, transformers.ModernBertForQuestionAnswering):
    """Drop-in replacement of `transformers.ModernBertForQuestionAnswering`.

    Its softmax runs over all positions, so padded positions are computed as query-only rows. Where
    a window shows them no real token they attend to nothing, as in torch's sdpa.
    """

    def rows_read(self, input_ids, kwargs):
        return _all_positions(input_ids, kwargs, True)


class ModernBertForMultipleChoice(_Head, transformers.ModernBertForMultipleChoice):
    """Drop-in replacement of `transformers.ModernBertForMultipleChoice`."""


HEADS = (
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertForQuestionAnswering,
    ModernBertForMultipleChoice,
)
for _class in (ModernBertModel, *HEADS):
    _class.forward = transformers_signature(getattr(transformers, _class.__name__))(_class.forward)
register_conversions(ModernBertEncoderLayer, ModernBertModel, *HEADS)
