"""The packed forward that the models with post-norm layers and absolute positions share: BERT,
RoBERTa and its kin, ELECTRA, DistilBERT, ALBERT.

Letters: B batch, S padded length, T packed rows, R rows of the last layer, E features of the
embeddings, C hidden.

What runs transformers' own forward instead stands in fastbert/models/packed_model.py.
"""

from dataclasses import replace

import torch
from torch import nn
from transformers.utils.output_capturing import capture_outputs

from fastbert import dispatch
from fastbert.encoder import (
    EncoderLayerSpec,
    dropout_p,
    is_plain_dropout,
    is_plain_norm,
    is_unhooked,
    linear,
)
from fastbert.encoder_inference import encode
from fastbert.models.embedding import embed_rows, without_padding_gradient
from fastbert.models.inputs import check_ids
from fastbert.models.linears import own_linears
from fastbert.models.packed import is_plain_table, one_row, packed_by_caller, pop_return_dict
from fastbert.models.packed_model import PackedModel, tokens_of
from fastbert.models.prepared import (
    PreparedModel,
    is_simple,
    prepare,
    prepared_model,
    suits_one_call,
)
from fastbert.ops.philox import draw_rng_state
from fastbert.ops.unpad import pad, unpad
from fastbert.padding import PackedBatch, pack_batch, query_rows


class PostNormModel(PackedModel):
    """Base of such a family's model, before transformers' class.

    Keyword arguments and errors as `fastbert.BertModel` has them.

    Attributes:
        output_type: what transformers' forward returns.
        embeddings_type, encoder_type: exact classes of the modules around the layers.
        pooler_type: of a pooler that is a Linear `dense` and a tanh `activation`; None in a family
            without.
    """

    output_type: type
    embeddings_type: type
    encoder_type: type
    pooler_type: type | None = None

    def forward(self, attention_mask=None, **kwargs):
        if not suits_one_call(self, attention_mask, kwargs):
            return super().forward(attention_mask=attention_mask, **kwargs)
        prepared = prepared_model(self)
        if prepared is not None:
            return self._forward_at_once(prepared, attention_mask, **kwargs)
        outputs = super().forward(attention_mask=attention_mask, **kwargs)
        prepare(self)
        return outputs

    # --- what differs between families

    def packed_layers(self):
        return self.encoder.layer

    def containers(self) -> tuple[tuple[nn.Module, type], ...]:
        """The modules around the layers, whose forward is not called, with their exact classes."""
        return ((self.encoder, self.encoder_type),)

    def why_container_not_packed(self):
        if getattr(self.config, "is_decoder", False):
            return "the model is a decoder"
        if not all(type(m) is kind and is_unhooked(m) for m, kind in self.containers()):
            return "the encoder was replaced or has hooks"
        return None

    def pool(self, first: torch.Tensor) -> torch.Tensor:
        """`pooler_output` `(B, C)` of the hidden states `(B, C)` at position 0."""
        return self.pooler(first[:, None])

    def has_pooler(self) -> bool:
        """Whether there is a `pooler_output`."""
        return self._modules.get("pooler") is not None

    def projection(self) -> nn.Module | None:
        """The Linear from the embeddings' E features to C; None where they are the same."""
        return None

    def padded_positions(self, input_ids, inputs_embeds) -> torch.Tensor:
        """Position ids `(B, S)` or `(1, S)` of a padded batch where the caller gave none.

        Raises:
            ValueError: more positions than the model has.
        """
        seqlen = tokens_of(input_ids, inputs_embeds).shape[1]
        limit = self.embeddings.position_embeddings.num_embeddings
        if seqlen > limit:
            raise too_long(seqlen, limit)
        return self.embeddings.position_ids[:, :seqlen]

    # --- transformers' own path

    def forward_padded(self, reason, inputs, mask, kwargs):
        """transformers' forward, with our pooled_rows and first_only."""
        pooled_rows, first_only = kwargs.get("pooled_rows"), kwargs.get("first_only")
        if pooled_rows is None and not first_only:
            return super().forward_padded(reason, inputs, mask, kwargs)
        return_dict = pop_return_dict(self.config, kwargs)
        outputs = super().forward_padded(reason, inputs, mask, {**kwargs, "return_dict": True})
        states = outputs.last_hidden_state
        first = states[:, 0] if pooled_rows is None else states.flatten(0, 1)[pooled_rows]
        if self.has_pooler() and pooled_rows is not None:
            outputs.pooler_output = self.pool(first)
        if first_only:
            outputs.last_hidden_state = first[:, None]
        return outputs if return_dict else outputs.to_tuple()

    # --- by one call

    def _forward_at_once(self, prepared: PreparedModel, attention_mask, **kwargs):
        """What `forward_packed` gives, of a model that is what it was when it was prepared."""
        outputs = None
        if is_simple(kwargs):
            outputs = self._forward_padded_texts(prepared, attention_mask, **kwargs)
        if outputs is not None:
            return outputs
        inputs = {name: kwargs.pop(name, None) for name in self.input_names}
        return self.forward_packed(inputs, attention_mask, prepared=prepared, **kwargs)

    def _forward_padded_texts(
        self,
        prepared: PreparedModel,
        attention_mask,
        *,
        input_ids,
        token_type_ids=None,
        position_ids=None,
        return_dict=None,
        first_only=False,
        **ignored,
    ):
        """The same of texts of which nothing is known but the mask; None where that begins with
        padding and position 0 is read, or ids are outside their tables."""
        if position_ids is None:
            position_ids = self.padded_positions(input_ids, None)
        pooled = self.has_pooler()
        found = prepared.forward(
            input_ids, attention_mask, token_type_ids, position_ids, first_only, pooled
        )
        if found is None:
            return None
        dispatch.count(self.counted_as, "packed")
        fields = {"last_hidden_state": found[0]}
        if pooled and prepared.pools:
            fields["pooler_output"] = found[1]
        elif pooled:
            with own_linears(self):
                fields["pooler_output"] = self.pool(found[1])
        return self.as_wanted(self.output_type(**fields), return_dict)

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
        cu_seq_lens_q=None,
        cu_seq_lens_k=None,
        max_length_q=None,
        max_length_k=None,
        keep_rows=False,
        pooled_rows=None,
        first_only=False,
        last_layer_rows=None,
        prepared=None,
        **ignored,
    ):
        """Beside the call's arguments `prepared`: what one call computes the rows by, or None."""
        input_ids, inputs_embeds = inputs["input_ids"], inputs["inputs_embeds"]
        tokens = tokens_of(input_ids, inputs_embeds)
        size = tokens.shape[:2]
        if cu_seq_lens_q is not None:
            batch = packed_by_caller(
                attention_mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, size
            )
            if required_rows is not None and not dispatch.is_symbolic(required_rows):
                batch = replace(batch, num_required=int(required_rows.sum()))
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
                first_rows=first_only or self.has_pooler(),
            )
        inputs = {**inputs, "position_ids": self._positions(batch, inputs, cu_seq_lens_q)}
        dispatch.count(self.counted_as, "packed")
        wanted = (required_rows is not None, keep_rows, pooled_rows, first_only)
        rows = None if prepared is None else prepared.rows(batch, inputs)
        if rows is not None:
            outputs = self._outputs_of_rows(batch, rows, *wanted)
            return self.as_wanted(outputs, return_dict)
        if rng_state is None and self._dropout_active():
            rng_state = draw_rng_state(tokens)
        outputs = self._packed_rows(
            batch,
            inputs,
            rng_state,
            None if last_layer_rows is None else query_rows(last_layer_rows, batch),
            wanted,
            output_hidden_states=self.records_hidden_states(output_hidden_states),
            return_dict=True,
        )
        return self.finished(outputs, batch, return_dict, first_only=first_only)

    def _positions(self, batch: PackedBatch, inputs: dict, cu_seqlens) -> torch.Tensor:
        """Position ids `(B, S)` or `(1, S)`, the caller's checked."""
        position_ids = inputs["position_ids"]
        if position_ids is None and cu_seqlens is None:
            return self.padded_positions(inputs["input_ids"], inputs["inputs_embeds"])
        if position_ids is None:
            position_ids = self.packed_positions(
                inputs["input_ids"], batch.cu_seqlens_q, batch.num_rows
            )
        position_ids = one_row("position_ids", position_ids, batch)
        num_positions = self.embeddings.position_embeddings.num_embeddings
        check_ids("position_ids", position_ids, num_positions, batch)
        return position_ids

    @capture_outputs
    def _packed_rows(self, batch: PackedBatch, inputs, rng_state, query, wanted, **kwargs):
        embedded = self._project(self._embed(batch, **inputs, rng_state=rng_state))
        layers, rows = list(self.packed_layers()), None
        if query is None and not kwargs["output_hidden_states"]:
            rows = self._encode_at_once(layers, embedded, batch)
        else:
            self.refuse_if_frozen("a forward that returns or computes rows layer by layer")
        if rows is None:
            rows = _encode_by_layers(layers, embedded, batch, rng_state, query)
        return self._outputs_of_rows(batch, rows, *wanted)

    def _outputs_of_rows(
        self, batch: PackedBatch, rows, keep_query_only, keep_rows, pooled_rows, first_only
    ):
        """What is wanted of the rows `(T, C)` behind the last layer.

        Args:
            batch: where the rows come from.
            keep_query_only: they are returned where they are padding, too.
            keep_rows: they go along for a head. pooled_rows: those that the pooler reads; None:
                position 0. first_only: position 0 alone is wanted.
        """
        fields = {}
        if first_only or self.has_pooler():
            first = batch.first_rows(rows) if pooled_rows is None else unpad(rows, pooled_rows)
        if first_only:
            fields["last_hidden_state"] = first[:, None]
        else:
            fields["last_hidden_state"] = batch.pad(rows, keep_query_only=keep_query_only)
        if self.has_pooler():
            with own_linears(self):
                fields["pooler_output"] = self.pool(first)
        outputs = self.output_type(**fields)
        if keep_rows or first_only:
            outputs.__dict__["packed"] = (batch, rows)
        return outputs

    def why_layers_are_called(self) -> str | None:
        """What about the layers as modules keeps one op from computing all of them."""
        for layer in self.packed_layers():
            if type(layer) is not self.layer_type or not is_unhooked(layer):
                return "a layer was replaced or has hooks"
        return None

    def specs(self) -> list[EncoderLayerSpec]:
        """The layers in the encoder's terms, in the order they run."""
        return [layer.spec(index) for index, layer in enumerate(self.packed_layers())]

    def _encode_at_once(self, layers, rows, batch) -> torch.Tensor | None:
        """All layers by one op; None where they have to be called."""
        if torch.is_grad_enabled() and self.weight_cache.frozen is None:
            return None
        encoded, reason = None, self.why_layers_are_called()
        if reason is None:
            caches = [layer.weight_cache for layer in layers]
            encoded, reason = encode(self.specs(), caches, rows, batch)
        if reason is not None:
            self.refuse_if_frozen(f"this forward ({reason})")
        return encoded

    def _project(self, rows: torch.Tensor) -> torch.Tensor:
        projection = self.projection()
        if projection is None:
            return rows
        if torch.is_grad_enabled():
            self.weight_cache.clear()
        return linear(projection, rows, self.weight_cache, "projection")

    def _embed(
        self, batch, *, input_ids, token_type_ids, position_ids, inputs_embeds, rng_state
    ) -> torch.Tensor:
        """`(T, E)` embeddings of the packed rows."""
        embeddings = self.embeddings
        words = embeddings.word_embeddings
        kinds = self._token_types(batch, token_type_ids, position_ids)
        input_ids, inputs_embeds = self.word_rows(words, input_ids, inputs_embeds, batch)
        position_ids = batch.unpad(position_ids)
        if not self.is_plain_embedding():
            types = {} if kinds is None else {"token_type_ids": kinds[None]}
            return embeddings(
                input_ids=None if input_ids is None else input_ids[None],
                position_ids=position_ids[None],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
                **types,
            )[0]
        table = embeddings.position_embeddings
        return embed_rows(
            words,
            input_ids,
            inputs_embeds,
            token_types=None if kinds is None else (kinds, embeddings.token_type_embeddings.weight),
            positions=(position_ids, without_padding_gradient(table)),
            norm=embeddings.LayerNorm,
            dropout=embeddings.dropout,
            rng_state=rng_state,
        )

    def _token_types(self, batch, token_type_ids, position_ids) -> torch.Tensor | None:
        """`(T,)` token types, 0 where none are given; None in a family without, which ignores them,
        as transformers does."""
        table = getattr(self.embeddings, "token_type_embeddings", None)
        if table is None:
            return None
        if token_type_ids is None:
            return batch.unpad(torch.zeros_like(position_ids))
        token_type_ids = one_row("token_type_ids", token_type_ids, batch)
        check_ids("token_type_ids", token_type_ids, table.num_embeddings, batch)
        return batch.unpad(token_type_ids)

    def is_plain_embedding(self) -> bool:
        """Whether everything but the word embeddings may be fused."""
        embeddings = self.embeddings
        kinds = getattr(embeddings, "token_type_embeddings", None)
        return (
            type(embeddings) is self.embeddings_type
            and is_unhooked(embeddings)
            and is_plain_norm(embeddings.LayerNorm)
            and is_plain_dropout(embeddings.dropout)
            and (kinds is None or is_plain_table(kinds))
            and is_plain_table(embeddings.position_embeddings)
        )

    def _dropout_active(self) -> bool:
        return dropout_p(self.embeddings.dropout) > 0 or any(
            layer.dropout_active() for layer in dict.fromkeys(self.packed_layers())
        )


def _encode_by_layers(layers, rows, batch, rng_state, query) -> torch.Tensor:
    for index, layer in enumerate(layers):
        wanted = query if index == len(layers) - 1 else None
        rows = layer(rows, packed=batch, index=index, rng_state=rng_state, query=wanted)
        if wanted is not None:
            rows = pad(rows, wanted.rows, batch.num_rows)
    return rows


def too_long(num_positions: int, limit: int) -> ValueError:
    """The error of a text that has more positions than the model."""
    return ValueError(
        f"the input has {num_positions} positions, the model {limit} "
        "(config.max_position_embeddings); truncate the text or pass position_ids"
    )
