"""What the models of all families share around their packed forward: which calls it can take, and
transformers' own forward for those it cannot.

Letters: B batch, S padded length, T packed rows, C hidden.
"""

import contextlib
from collections.abc import Iterable

import torch
from torch import nn

from fastbert import dispatch
from fastbert.models.accelerate import swap_classes
from fastbert.models.inputs import check_dtype, check_ids, check_tensors
from fastbert.models.loading import LoadsFolders
from fastbert.models.packed import (
    ATTENTION_IMPLEMENTATIONS,
    OUR_KEYWORDS,
    PACKED_ATTENTION,
    PACKED_KEYWORDS,
    additive_mask,
    block_mask,
    eager_attention,
    has_global_hooks,
    is_checkable_mask,
    is_traced,
    is_transformed,
)
from fastbert.padding import PackedBatch, check_mask_shape, restarting_positions


class PackedModel(LoadsFolders):
    """Base of a family's model, before transformers' class.

    What cannot be expressed on packed rows (attention weights, masks per query, decoders, caches,
    tracing and export, keyword arguments we do not know, submodules of other classes) runs
    transformers' own forward with the same numbers; the reason is logged once and counted.

    Attributes:
        logged_as: the model's name in the log. counted_as: what its forwards are counted under.
        layer_type: the class of its layers.
        input_names: of the tensors of the forward, beside the mask.
    """

    input_names = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
    logged_as: str
    counted_as: str
    layer_type: type

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        swap_classes(self)

    def forward(self, attention_mask=None, **kwargs):
        inputs = {name: kwargs.pop(name, None) for name in self.input_names}
        check_tensors(**inputs, cu_seq_lens_q=kwargs.get("cu_seq_lens_q"))
        reason = self.why_not_packed(attention_mask, kwargs)
        if reason is not None:
            return self.forward_padded(reason, inputs, attention_mask, kwargs)
        return self.forward_packed(inputs, attention_mask, **kwargs)

    # --- what differs between families

    def forward_packed(self, inputs: dict, attention_mask, **kwargs):
        """The forward on packed rows.

        Args:
            inputs: tensors by `input_names`, each maybe None.
            attention_mask: as given. kwargs: the call's others.
        """
        raise NotImplementedError

    def packed_layers(self) -> Iterable[nn.Module]:
        """The layers in the order they run; one may run more than once."""
        raise NotImplementedError

    def why_container_not_packed(self) -> str | None:
        """What about the modules around the layers keeps the model from packed rows."""
        raise NotImplementedError

    @property
    def first_position(self) -> int:
        """Position id of a text's first token."""
        return 0

    def packed_positions(self, input_ids, cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Position ids `(1, T)` of packed input where the caller gave none.

        Args:
            input_ids: `(1, T)`, or None where embeddings were given.
            cu_seqlens: `(B+1,)`, first row of each sequence.
            num_rows: T.
        """
        return restarting_positions(cu_seqlens, num_rows)

    def masks_per_query(self, together: torch.Tensor):
        """What transformers' forward takes for `(1, 1, T, T)` bool, True where rows of one
        sequence meet."""
        return together

    # --- which path

    def why_not_packed(self, attention_mask, kwargs) -> str | None:
        """Why these arguments need transformers' own forward; None if they do not."""
        if is_traced():
            return "the model is being traced or exported"
        if is_transformed():
            return "a functorch transform or forward-mode differentiation is active"
        for name, value in kwargs.items():
            if name not in PACKED_KEYWORDS and value is not None and value is not False:
                return f"the keyword argument {name!r} is passed on to transformers"
        if self._wants_attentions(kwargs):
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
        return self.why_modules_not_packed()

    def why_modules_not_packed(self) -> str | None:
        if has_global_hooks():
            return "global module hooks are set"
        reason = self.why_container_not_packed()
        if reason is not None:
            return reason
        for layer in dict.fromkeys(self.packed_layers()):
            if not isinstance(layer, self.layer_type):
                return f"a layer is a {type(layer).__name__}"
            reason = layer.why_not_packed()
            if reason is not None:
                return reason
        return None

    def _wants_attentions(self, kwargs) -> bool:
        return kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))

    # --- transformers' own path

    def forward_padded(self, reason: str, inputs: dict, mask, kwargs: dict):
        """transformers' forward, its reason logged and counted.

        Args:
            reason: why.
            inputs: what transformers' forward takes beside the mask: ids, positions, embeddings.
            mask: attention_mask as given.
            kwargs: the call's others; ours are left out.
        """
        self.refuse_if_frozen(f"transformers' own forward ({reason})")
        dispatch.log_once(self.logged_as, "packed rows", reason)
        dispatch.count(self.counted_as, "padded")
        kwargs = {k: v for k, v in kwargs.items() if k not in OUR_KEYWORDS}
        tokens = inputs["inputs_embeds"] if inputs["input_ids"] is None else inputs["input_ids"]
        starts = kwargs.get("cu_seq_lens_q")
        if starts is not None and tokens is not None:
            if inputs["position_ids"] is None:
                positions = self.packed_positions(inputs["input_ids"], starts, tokens.shape[1])
                inputs = {**inputs, "position_ids": positions}
            if self.config._attn_implementation not in PACKED_ATTENTION:
                # transformers' attention would let the sequences of the row see each other.
                mask = self.masks_per_query(block_mask(starts, mask, tokens))
            elif mask is not None:
                raise NotImplementedError(
                    f"attention_mask beside cu_seq_lens_q, and {reason}: transformers' "
                    f"{self.config._attn_implementation} reads one of the two; use "
                    "attn_implementation='sdpa' or leave the filling out"
                )
        if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool:
            mask = additive_mask(mask, self.dtype)
        elif is_checkable_mask(mask, tokens, kwargs):
            check_mask_shape("attention_mask", mask, *tokens.shape[:2])
        # A family without token types has no argument for them.
        inputs = {name: value for name, value in inputs.items() if value is not None}
        wanted = self._wants_attentions(kwargs)
        with eager_attention(self.config) if wanted else contextlib.nullcontext():
            return super().forward(attention_mask=mask, **inputs, **kwargs)

    # --- packed path

    def records_hidden_states(self, output_hidden_states: bool | None) -> bool:
        """Whether the call, or else the configuration, asks for them."""
        if output_hidden_states is None:
            return getattr(self.config, "output_hidden_states", False)
        return output_hidden_states

    def word_rows(
        self, words: nn.Module, input_ids, inputs_embeds, batch: PackedBatch
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The packed rows `(T,)` of ids, checked, and `(T, E)` of embeddings; one is None.

        Args:
            words: the table that ids point into.
            input_ids, inputs_embeds: as given; one is None.
            batch: where the rows come from.
        """
        if input_ids is None:
            weight = next(next(iter(self.packed_layers())).parameters(), None)
            check_dtype("inputs_embeds", inputs_embeds, weight)
            return None, batch.unpad(inputs_embeds)
        num_words = getattr(words, "num_embeddings", self.config.vocab_size)
        check_ids("input_ids", input_ids, num_words, batch)
        return batch.unpad(input_ids), None

    def finished(
        self, outputs, batch: PackedBatch, return_dict: bool | None, *, first_only: bool = False
    ):
        """The outputs of the packed forward as the caller wants them: padded, maybe a tuple.

        Args:
            outputs: of the packed forward.
            batch: where its rows come from.
            return_dict: as given.
            first_only: their last_hidden_state is not of all rows, which they keep beside it.
        """
        if outputs.get("hidden_states") is not None:
            states = outputs.hidden_states
            padded = [None if h is None else batch.pad(h) for h in states[:-1]]
            last = outputs.last_hidden_state
            if first_only:
                last = batch.pad(outputs.__dict__["packed"][1])
            outputs.hidden_states = (*padded, None if states[-1] is None else last)
        return self.as_wanted(outputs, return_dict)

    def as_wanted(self, outputs, return_dict: bool | None):
        """The outputs, or a tuple of them where `return_dict`, or else the configuration, says
        so."""
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return outputs if return_dict else outputs.to_tuple()


def tokens_of(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """The one of both that is given, `(B, S)` or `(B, S, C)`.

    Raises:
        ValueError: both or none, another number of dimensions, no position.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("specify exactly one of input_ids and inputs_embeds")
    tokens = inputs_embeds if input_ids is None else input_ids
    if tokens.dim() != (3 if input_ids is None else 2):
        name = "inputs_embeds" if input_ids is None else "input_ids"
        shape = "(batch, length, hidden)" if input_ids is None else "(batch, length)"
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tokens.shape)}")
    if tokens.shape[1] == 0:
        raise ValueError("the input has 0 positions; a text needs at least one token")
    return tokens
