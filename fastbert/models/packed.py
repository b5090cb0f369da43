"""What the adapters of all families ask of their arguments and modules, and how they hand a call on
to transformers.

Letters: B batch, S padded length, T packed rows.
"""

import contextlib
import threading

import torch
from torch import nn
from torch.autograd import forward_ad
from transformers.activations import (
    FastGELUActivation,
    GELUActivation,
    GELUTanh,
    NewGELUActivation,
)

from fastbert import dispatch
from fastbert.encoder import is_ordinary, is_unhooked
from fastbert.models.losses import IGNORE_INDEX
from fastbert.padding import PackedBatch, packed_input

ATTENTION_IMPLEMENTATIONS = {
    None,
    "eager",
    "fastbert",
    "flash_attention_2",
    "flex_attention",
    "sdpa",
}
OUR_KEYWORDS = {
    "rng_state",
    "required_rows",
    "keep_rows",
    "pooled_rows",
    "first_only",
    "last_layer_rows",
}
PACKED_KEYWORDS = OUR_KEYWORDS | {
    "output_hidden_states",
    "output_attentions",
    "return_dict",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
HEAD_KEYWORDS = {"return_logits", "num_items_in_batch", "label_rows"}
# transformers' attentions that read cu_seq_lens_q themselves.
PACKED_ATTENTION = {"flash_attention_2", "flash_attention_3"}


def gelu_form(activation) -> str | None:
    """`none` or `tanh` for the forms of GELU the ops compute, None for any other activation."""
    if isinstance(activation, nn.Module) and not is_unhooked(activation):
        return None
    if type(activation) is nn.GELU:
        return activation.approximate
    if type(activation) is GELUActivation or activation is nn.functional.gelu:
        return "none"
    if type(activation) in (NewGELUActivation, GELUTanh, FastGELUActivation):
        return "tanh"
    return None


def is_plain_table(table: nn.Module) -> bool:
    """Whether `table` is an unhooked nn.Embedding without the options that the ops do not know."""
    return (
        type(table) is nn.Embedding
        and is_unhooked(table)
        and is_ordinary(table.weight)
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 owns the module's parameters, which are whole during its forward only."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def is_traced() -> bool:
    """Whether a graph is recorded that must hold for other masks: traced, scripted or exported."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def has_global_hooks() -> bool:
    """Whether hooks are set on the forward of all modules there are."""
    hooks = nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def is_transformed() -> bool:
    """Whether derivatives are taken in a way our autograd Functions do not offer."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def pop_return_dict(config, kwargs) -> bool:
    """The `return_dict` of a call, taken out of its keyword arguments, or the configuration's."""
    given = kwargs.pop("return_dict", None)
    return getattr(config, "return_dict", True) if given is None else given


def packed_by_caller(
    mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, size
) -> PackedBatch:
    """The batch that transformers' keyword arguments of packed input describe."""
    if cu_seq_lens_k is not None and _differ(cu_seq_lens_q, cu_seq_lens_k):
        raise ValueError("cu_seq_lens_k must equal cu_seq_lens_q in self-attention")
    lengths = [int(n) for n in (max_length_q, max_length_k) if n is not None]
    return packed_input(cu_seq_lens_q, *size, max(lengths) if lengths else None, mask)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two index tensors differ, as far as the host can see without waiting."""
    if a is b or a.shape != b.shape:
        return a is not b
    return dispatch.is_checkable(a) and not torch.equal(a, b)


def one_row(name: str, ids: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`ids` as `(B, S)` or `(1, S)`; `(S,)` stands for every row.

    Raises:
        ValueError: any other shape.
    """
    rows = ids[None] if ids.dim() == 1 else ids
    if (
        rows.dim() != 2
        or rows.shape[1] != batch.seqlen
        or rows.shape[0] not in (1, batch.batch_size)
    ):
        raise ValueError(
            f"{name} must have shape ({batch.batch_size}, {batch.seqlen}) or (1, {batch.seqlen}), "
            f"got {tuple(ids.shape)}"
        )
    return rows


def check_reach(name: str, rows: torch.Tensor, labels: torch.Tensor) -> None:
    """Raises ValueError where `rows` leave out a label or list it twice."""
    listed, all_labels = (int((x != IGNORE_INDEX).sum()) for x in (labels.view(-1)[rows], labels))
    if listed != all_labels:
        raise ValueError(
            f"{name} must list every labelled row once: they reach {listed} labels of {all_labels}"
        )


def is_checkable_mask(mask, tokens, kwargs) -> bool:
    """Whether a mask has to have the shape of the tokens: not per query, no cache before them."""
    return (
        isinstance(mask, torch.Tensor)
        and mask.dim() != 4
        and tokens is not None
        and kwargs.get("cache", kwargs.get("past_key_values")) is None
        and not is_traced()
    )


def block_mask(cu_seqlens, mask, tokens) -> torch.Tensor:
    """`(1, 1, T, T)` bool of packed input: rows of one sequence see each other."""
    packed_by_caller(mask, cu_seqlens, None, None, None, tokens.shape[:2])
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    sequence = torch.bucketize(rows, cu_seqlens[1:], right=True)
    return (sequence[:, None] == sequence[None, :])[None, None]


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask per query as the additive mask every attention of transformers takes."""
    blocked = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, blocked)


_eager_lock = threading.RLock()


@contextlib.contextmanager
def eager_attention(config):
    """Attention weights exist in transformers' eager attention only; elsewhere it returns none."""
    with _eager_lock:
        before = config._attn_implementation
        config._attn_implementation = "eager"
        try:
            yield
        finally:
            config._attn_implementation = before
