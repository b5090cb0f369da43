"""ModernBERT (Warner et al. 2024) on the fused pre-norm encoder: transformers' classes, their
forward replaced.

Letters: B batch, S padded length, T packed rows, C hidden, D head dim, V vocab, P positions.

What cannot be expressed on packed rows runs transformers' own forward, as in
fastbert/models/bert.py; beside what is named there, a batch whose sliding window is narrower than
its texts and whose packed rows are no neighbours in the padded batch (a mask with holes, padding
that a head reads under left padding): the window counts padded positions.
"""

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.modernbert import modeling_modernbert as modeling
from transformers.utils.output_capturing import capture_outputs

from fastbert.cache import CachesWeights
from fastbert.encoder import add_norm, dropout_p, is_plain_dropout, is_plain_norm, is_unhooked
from fastbert.encoder_prenorm import PreNormLayerSpec, Rotation, pre_norm_layer
from fastbert.models.bert import gelu_form
from fastbert.models.accelerate import register_conversions, swap_classes
from fastbert.models.inputs import check_ids
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.padding import PackedBatch, rows_are_neighbours
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
