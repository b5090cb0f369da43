"""A post-norm model's forward from ids to outputs by one call, for inference on a CPU.

Asking every module of a model what it is takes longer than computing a short text. So it is done
once, and remembered are the objects that were met: every later forward compares their identities,
the layouts of the tensors, and of what was packed the values as fastbert/cache.py does, all in C++.
Where anything differs the model is asked again.

Letters: B batch, S padded length, T packed rows, C hidden.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fastbert import cache, dispatch, watch
from fastbert.cache import Fingerprint
from fastbert.encoder import (
    compute_dtype,
    dropout_p,
    is_ordinary,
    is_plain_linear,
    is_unhooked,
    packed,
)
from fastbert.encoder_inference import REPLACED, numbers_of, packed_layers, plain_parameters
from fastbert.models.embedding import row_of_zeros
from fastbert.models.linears import packed_weight
from fastbert.models.packed import (
    ATTENTION_IMPLEMENTATIONS,
    OUR_KEYWORDS,
    has_global_hooks,
    is_plain_table,
    is_traced,
    is_transformed,
)
from fastbert.padding import PackedBatch

ROOMS = (*REPLACED, "embed_layer_norm", "unpad", "pad")
"""Ops whose work the one call does; it runs where each of them would be the C++ kernel."""
COUNTED = ("prepared_model", "embed_layer_norm_fwd", "encoder_fwd")
"""What a call is counted as: itself, and the ops with most of its work."""
_SIMPLE = {"input_ids", "token_type_ids", "position_ids", "return_dict", "first_only"}
"""Arguments of a call that is about texts of a padded batch alone."""
_PACKING = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_ARGUMENTS = _SIMPLE | (OUR_KEYWORDS - {"last_layer_rows"}) | _PACKING


class PreparedModel:
    """A model that was looked at.

    Attributes:
        modules: what they were.
        compiled: the C++ object that computes it; None where one call cannot.
        pools: whether the pooler is among what it computes.
    """

    def __init__(
        self,
        modules: watch.ModuleWatch,
        compiled=None,
        tensors: Sequence[torch.Tensor] = (),
        pools: bool = False,
    ):
        self.modules, self.compiled, self.pools = modules, compiled, pools
        self._tensors = list(tensors)
        self._step = cache.optimizer_steps()

    def reads_what_was_packed(self) -> bool:
        """Whether the weights are unwritten, as far as can be seen cheaply."""
        return self._step == cache.optimizer_steps() and self.compiled.holds(self._tensors)

    def forward(self, input_ids, attention_mask, token_type_ids, position_ids, first_only, pooled):
        """`last_hidden_state` `(B, S, C)`, or `(B, 1, C)` with first_only; and where position 0 is
        read what the pooler gives, or the rows `(B, C)` there of one that is not in `pools`.

        Args:
            input_ids: `(B, S)`. attention_mask, token_type_ids: `(B, S)` or None.
            position_ids: `(B, S)` or `(1, S)`.
            first_only: position 0 alone is wanted. pooled: so is what is pooled of it.

        Returns:
            None where ids are outside their tables, or position 0 is read and is padding.
        """
        reads_first = first_only or pooled
        outputs = self.compiled.forward(
            input_ids, attention_mask, token_type_ids, position_ids, reads_first, first_only
        )
        return self._counted(outputs)

    def rows(self, batch: PackedBatch, inputs: dict) -> torch.Tensor | None:
        """`(T, C)` behind the last layer, of packed rows.

        Args:
            batch: where they come from.
            inputs: `input_ids` and `position_ids` `(B, S)`, positions maybe `(1, S)`, and
                `token_type_ids` or None.

        Returns:
            None where ids are outside their tables.
        """
        ids = (inputs["input_ids"], inputs.get("token_type_ids"), inputs["position_ids"])
        found = self.compiled.forward_rows(
            *ids, batch.indices, batch.cu_seqlens_q, batch.cu_seqlens_k
        )
        outputs = self._counted(found)
        return None if outputs is None else outputs[0]

    @staticmethod
    def _counted(outputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The outputs of a call, counted; None where there are none."""
        if not outputs:
            return None
        for name in COUNTED:
            dispatch.count(name, "cpu")
        return outputs


# --- which calls


def suits_one_call(model, attention_mask, kwargs: dict) -> bool:
    """Whether this call of a post-norm model may be one: nothing is recorded or traced, no other
    backend is bound, and it is about the usual outputs of ids."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_traced() or is_transformed():
        return False
    if has_global_hooks() or not dispatch.bound_to(*ROOMS) <= {"auto", "cpu"}:
        return False
    return _wants_usual_outputs(model.config, kwargs) and _are_plain_inputs(kwargs, attention_mask)


def is_simple(kwargs: dict) -> bool:
    """Whether a call that suits is about texts of a padded batch alone: no rows are named that are
    to be computed or kept, and none come packed."""
    return all(name in _SIMPLE or value is None or value is False for name, value in kwargs.items())


def _wants_usual_outputs(config, kwargs: dict) -> bool:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _ARGUMENTS:
            return False
    return (
        config._attn_implementation in ATTENTION_IMPLEMENTATIONS
        and not getattr(config, "output_attentions", False)
        and not getattr(config, "output_hidden_states", False)
        and not getattr(config, "is_decoder", False)
    )


def _are_plain_inputs(kwargs: dict, attention_mask) -> bool:
    """Whether the ids are `(B, S)`, and what is beside them is shaped like them."""
    ids = kwargs.get("input_ids")
    if not _are_ids(ids) or ids.dim() != 2 or ids.numel() == 0:
        return False
    shape = ids.shape
    for name, shapes in (("token_type_ids", (shape,)), ("position_ids", (shape, (1, shape[1])))):
        given = kwargs.get(name)
        if given is not None and not (_are_ids(given) and given.shape in shapes):
            return False
    return attention_mask is None or (_is_plain(attention_mask) and attention_mask.shape == shape)


def _are_ids(tensor) -> bool:
    return _is_plain(tensor) and tensor.dtype in (torch.int64, torch.int32)


def _is_plain(tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


# --- preparing


def prepared_model(model) -> PreparedModel | None:
    """What the model's cache holds, where the model still is that and one call computes it."""
    key = _key()
    found = model.weight_cache.prepared.get(key)
    if found is None:
        return None
    if found.modules.are_unchanged():
        if found.compiled is None:
            return None
        if found.reads_what_was_packed():
            return found
    # Another thread may have found it first.
    model.weight_cache.prepared.pop(key, None)
    return None


def prepare(model) -> None:
    """Leaves what a post-norm model is in its cache, where that holds nothing about it."""
    if watch.is_available() and _key() not in model.weight_cache.prepared:
        model.weight_cache.prepared[_key()] = _prepared(model)


def _key() -> torch.dtype | None:
    return dispatch.autocast_dtype(torch.device("cpu"))


def _prepared(model) -> PreparedModel:
    modules = watch.ModuleWatch(model)
    reason = model.why_modules_not_packed() or model.why_layers_are_called()
    if reason is not None or not _has_plain_embeddings(model):
        return PreparedModel(modules)
    rows = torch.empty((0, model.config.hidden_size), dtype=model.dtype)
    specs = model.specs()
    caches = [layer.weight_cache for layer in model.packed_layers()]
    projection, dtype = model.projection(), compute_dtype(rows)
    # Autocast leaves what a Linear gives in its dtype.
    encoded = rows if projection is None else rows.to(dtype or rows.dtype)
    layers, reason = plain_parameters(specs, caches, encoded)
    if reason is not None or not (projection is None or _is_biased(projection)):
        return PreparedModel(modules)
    packed_weights = packed_layers(layers.weights, caches, encoded)
    if packed_weights is None:
        return PreparedModel(modules)
    pooler, norm, tables = _pooler_of(model), model.embeddings.LayerNorm, _tables(model)
    linears = [linear for linear in (projection, pooler) if linear is not None]
    packed_from = [*layers.weights, *(linear.weight for linear in linears)]
    read = [*tables, norm.weight, norm.bias, *layers.biases, *layers.norms]
    read += [linear.bias for linear in linears]
    seen = Fingerprint(packed_from)
    compiled = torch.classes.fastbert.PreparedModel(
        read,
        packed_from,
        tables,
        [norm.weight, norm.bias],
        norm.eps,
        *_parts(projection, lambda w: packed(model.weight_cache, "projection", [w], rows)),
        *_parts(pooler, lambda w: packed_weight(w, dtype or model.dtype, model.weight_cache)),
        *layers,
        packed_weights,
        *numbers_of(specs[0]),
        dtype,
        seen.views,
        seen.samples,
    )
    return PreparedModel(modules, compiled, [*read, *packed_from], pooler is not None)


def _has_plain_embeddings(model) -> bool:
    embeddings = model.embeddings
    if not (
        model.is_plain_embedding()
        and is_plain_table(embeddings.word_embeddings)
        and is_ordinary(embeddings.LayerNorm.bias)
        and dropout_p(embeddings.dropout) == 0
    ):
        return False
    tables = _tables(model)
    return all(t.dtype == model.dtype and t.device.type == "cpu" for t in tables)


def _tables(model) -> list[torch.Tensor]:
    """The weights of the tables of words, token types and positions."""
    embeddings = model.embeddings
    words = embeddings.word_embeddings.weight
    types = getattr(embeddings, "token_type_embeddings", None)
    type_weight = row_of_zeros(words, 1)[1] if types is None else types.weight
    return [words, type_weight, embeddings.position_embeddings.weight]


def _pooler_of(model) -> nn.Linear | None:
    """The Linear in front of the pooler's tanh, where that is all there is."""
    pooler = model._modules.get("pooler")
    if (
        type(pooler) is not model.pooler_type
        or type(pooler.activation) is not nn.Tanh
        or not (is_unhooked(pooler) and is_unhooked(pooler.activation) and _is_biased(pooler.dense))
    ):
        return None
    return pooler.dense


def _is_biased(linear: nn.Module) -> bool:
    return is_plain_linear(linear) and is_ordinary(linear.bias)


def _parts(linear: nn.Linear | None, pack) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    return ([], None) if linear is None else ([linear.weight, linear.bias], pack(linear.weight))
