"""transformers' post-norm layers in the encoder's terms.

Letters: T packed rows, C hidden.
"""

from torch import nn

from fastbert.cache import CachesWeights
from fastbert.encoder import EncoderLayerSpec, dropout_p, encoder_layer, is_unhooked
from fastbert.models.packed import gelu_form


class PostNormLayer(CachesWeights):
    """Base of a family's layer, before transformers' class; given a `packed` batch it runs fused on
    packed rows `(T, C)`, without one as transformers' does."""

    def forward(
        self, hidden_states, *args, packed=None, index=0, rng_state=None, query=None, **kwargs
    ):
        self.refuse_if_frozen("calling a layer by itself")
        if packed is None:
            return super().forward(hidden_states, *args, **kwargs)
        spec = self.spec(index)
        return encoder_layer(spec, hidden_states, packed, rng_state, self.weight_cache, query)

    # --- what differs between families

    def spec(self, index: int) -> EncoderLayerSpec:
        """The layer's modules in the encoder's terms, at place `index` of the encoder."""
        raise NotImplementedError

    def parts(self) -> tuple[tuple[nn.Module, type], ...]:
        """The modules whose forward is not called, with the classes they must be of."""
        raise NotImplementedError

    def attention_dropout(self) -> tuple[nn.Module, nn.Module]:
        """The dropout of the attention probabilities, and the module whose training flag counts."""
        raise NotImplementedError

    def row_dropouts(self) -> tuple[nn.Module, ...]:
        """The other dropouts."""
        raise NotImplementedError

    # --- what they share

    def attention_dropout_p(self) -> float:
        """The probability in force for attention probabilities."""
        dropout, owner = self.attention_dropout()
        return dropout.p if owner.training else 0.0

    def dropout_active(self) -> bool:
        """Whether this layer reads the rng_state; each dropout goes by its own training flag."""
        return self.attention_dropout_p() > 0 or any(dropout_p(d) > 0 for d in self.row_dropouts())

    def why_not_packed(self) -> str | None:
        """What about this layer keeps it from packed rows."""
        for module, kind in self.parts():
            if type(module) is not kind:
                return f"a layer holds a {type(module).__name__} in place of {kind.__name__}"
            if not is_unhooked(module):
                return f"{kind.__name__} has hooks"
        dropout, _ = self.attention_dropout()
        if type(dropout) is not nn.Dropout:
            return "the dropout of the attention probabilities was replaced"
        if not is_unhooked(dropout):
            return "the dropout of the attention probabilities has hooks"
        return None


def bert_parts(modeling, prefix: str) -> tuple[type, ...]:
    """The classes of a layer's parts in a module that names them as BERT's, `prefix` in front."""
    names = ("Attention", "SelfAttention", "SelfOutput", "Intermediate", "Output")
    return tuple(getattr(modeling, prefix + name) for name in names)


class BertStyleLayer(PostNormLayer):
    """A layer whose modules have BERT's names: BERT, RoBERTa and its kin, ELECTRA.

    Attributes:
        part_types: what `bert_parts` gives.
    """

    part_types: tuple[type, ...]

    def spec(self, index: int) -> EncoderLayerSpec:
        # Through the modules' own tables: attribute access on modules is a search, and this runs
        # for every layer of every forward.
        parts = self._modules
        attention = parts["attention"]._modules
        self_attention = attention["self"]
        projections, attention_output = self_attention._modules, attention["output"]._modules
        intermediate, output = parts["intermediate"], parts["output"]._modules
        activation = intermediate.intermediate_act_fn
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
            attention_dropout_p=self.attention_dropout_p(),
        )

    def parts(self):
        parts = self._modules
        attention = parts["attention"]
        modules = (
            attention,
            attention._modules["self"],
            attention._modules["output"],
            parts["intermediate"],
            parts["output"],
        )
        return tuple(zip(modules, self.part_types, strict=True))

    def attention_dropout(self):
        self_attention = self._modules["attention"]._modules["self"]
        return self_attention._modules["dropout"], self_attention

    def row_dropouts(self):
        parts = self._modules
        attention_output = parts["attention"]._modules["output"]
        return attention_output._modules["dropout"], parts["output"]._modules["dropout"]

    def why_not_packed(self):
        reason = super().why_not_packed()
        if reason is None and (self.is_decoder or self.add_cross_attention):
            return "the layer is a decoder's"
        return reason
