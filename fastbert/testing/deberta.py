"""DeBERTa with the enhanced mask decoder (He et al. 2020, section 3.2) in plain PyTorch: oracles
built of transformers' modules, in any dtype, on padded batches."""

from unittest import mock

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput


class _Decoding:
    """Base before transformers' masked-LM model: its forward with the decoder."""

    def __init__(self, config):
        super().__init__(config)
        table = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.deberta.embeddings.position_embeddings = table

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
        }
        encoder, embeddings = self.deberta.encoder, self.deberta.embeddings
        last = encoder.layer[-1]
        if len(encoder.layer) == 1:
            below = embeddings(input_ids, token_type_ids, mask=attention_mask)
        else:
            with mock.patch.dict(encoder._modules, layer=encoder.layer[:-1]):
                below = self.deberta(**inputs).last_hidden_state
        mask = encoder.get_attention_mask(attention_mask)
        around = (mask, encoder.get_rel_pos(below), encoder.get_rel_embedding())
        states = below + embeddings.position_embeddings.weight[: below.shape[1]]
        for _ in range(2):
            states = self.run(last, below, states, *around)
        if self.legacy:
            logits = self.cls(states)
        else:
            logits = self.lm_predictions(states, embeddings.word_embeddings)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)

    def run(self, layer, below, states, mask, distances, embeddings):
        """The layer's output with queries of `states`, keys and values of `below`."""
        return layer(
            below, mask, query_states=states, relative_pos=distances, rel_embeddings=embeddings
        )[0]


class DecodingDebertaV2(_Decoding, transformers.DebertaV2ForMaskedLM):
    """Of version 2."""


class DecodingDeberta(_Decoding, transformers.DebertaForMaskedLM):
    """Of version 1."""

    def run(self, layer, below, states, mask, distances, embeddings):
        """The layer's modules one by one: with query_states transformers' own forward raises."""
        attention = layer.attention
        heads = attention.self.num_attention_heads

        def project(x):
            def product(x):
                return nn.functional.linear(x, attention.self.in_proj.weight).unflatten(
                    -1, (heads, 3, -1)
                )

            parts = product(x).unbind(-2)
            return torch.stack([product(states).unbind(-2)[0], *parts[1:]], -2).flatten(-3)

        with mock.patch.object(attention.self.in_proj, "forward", project):
            context = attention.self(
                below, mask, relative_pos=distances, rel_embeddings=embeddings
            )[0]
        attended = attention.output(context, states)
        return layer.output(layer.intermediate(attended), attended)
