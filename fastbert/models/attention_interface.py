"""`attn_implementation="fastbert"`: our attention for any encoder of transformers.

Letters: B batch, Sq, Sk padded lengths of queries and keys, N heads, D head dim.

For models without an adapter. Their other layers go on computing padding, so every query is
computed, against the real keys alone: the numbers are those of `sdpa` at every position, also at
padding, which some heads read.
"""

from dataclasses import dataclass

import torch
import transformers
from transformers import masking_utils

from fastbert import dispatch
from fastbert.ops.attention import attention
from fastbert.ops.philox import draw_rng_state
from fastbert.padding import PackedBatch, dense_batch, pack_batch, packed_input

NAME = "fastbert"


def register_attention() -> str:
    """Makes `attn_implementation="fastbert"` known to transformers, for every model there.

    As other names are: `AutoModel.from_pretrained(folder, attn_implementation="fastbert")` or
    `model.set_attn_implementation("fastbert")`. Bidirectional attention with padding, cross
    attention, grouped keys and packed input (`cu_seq_lens_q`) run our op, counted as
    `attention_interface`; what it cannot express (causal attention, windows, masks per query,
    position biases, export, padding under torch.compile) runs transformers' `sdpa` with the same
    numbers, and the reason is logged once. Calling it again changes nothing.

    Models whose attention does not go through transformers' interface (DeBERTa, MPNet,
    BigBird) take the name and run their own; `set_attn_implementation` says so.

    Returns:
        "fastbert".
    """
    transformers.AttentionInterface.register(NAME, fastbert_attention_forward)
    transformers.AttentionMaskInterface.register(NAME, fastbert_mask)
    return NAME


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Rows of the queries and of the keys of each sequence."""

    queries: PackedBatch
    keys: PackedBatch


def fastbert_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """The mask of transformers' `sdpa`, which where it is mere padding says where the keys are.

    The lengths travel as an attribute of the tensor: a model that changes the mask makes a tensor
    without it, and so gets `sdpa`.

    Args: as transformers' mask functions take them; attention_mask `(B, Sk)` bool.

    Returns:
        `(B, 1, Sq, Sk)` bool, or None where `sdpa` needs no mask.
    """
    mask = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    if mask is None or _is_traced() or dispatch.is_symbolic(mask):
        return mask
    is_padding = (
        mask_function is masking_utils.bidirectional_mask_function
        and not (isinstance(q_offset, torch.Tensor) or q_offset or kv_offset)
        and (attention_mask is None or attention_mask.shape == (batch_size, kv_length))
    )
    if is_padding:
        mask.fastbert_sequences = _Sequences(
            dense_batch(batch_size, q_length, mask.device),
            pack_batch(attention_mask, batch_size, kv_length, mask.device),
        )
    return mask


def fastbert_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the layer, for `num_key_value_groups` and `is_causal`.
        query: `(B, N, Sq, D)`. key, value: `(B, N / groups, Sk, D)`.
        attention_mask: from `fastbert_mask`, or any mask `sdpa` takes.
        dropout, scaling, is_causal: as `sdpa`.
        kwargs: `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` of packed input,
            B = 1; whatever else a model passes on.

    Returns:
        `(B, Sq, N, D)`, 0 for a sequence without a real key; and None, there are no weights.

    Raises:
        ValueError: packed input that does not fit, or softcap, as `sdpa` does.
        NotImplementedError: packed input where the sequences could only be told apart by our op.
    """
    heads = query, key, value
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # As sdpa: a mask says all there is to say.
    causal = causal and attention_mask is None and query.shape[2] > 1
    packed = kwargs.get("cu_seq_lens_q") is not None
    reason = _why_not_ours(*heads, attention_mask, causal, packed, kwargs)
    if reason is not None:
        if packed:
            raise NotImplementedError(
                f"{type(module).__name__}: cu_seq_lens_q was given, and {reason}; without our "
                "attention the sequences of the row would see each other: pass a padded batch"
            )
        dispatch.log_once("attn_implementation='fastbert'", "our attention", reason)
        dispatch.count("attention_interface", "sdpa")
        return transformers.AttentionInterface()["sdpa"](
            module, *heads, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    dispatch.count("attention_interface", "fastbert")
    sequences = _sequences(query, key, attention_mask, kwargs)
    return _attend(heads, sequences, dropout, scaling), None


def _why_not_ours(query, key, value, attention_mask, causal, packed, kwargs) -> str | None:
    if _is_traced():
        return "the model is being traced or exported"
    if torch._C._are_functorch_transforms_active():
        return "a functorch transform is active"
    for name in ("position_bias", "softcap", "s_aux", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            return f"the model passes {name}"
    if causal:
        return "the attention is causal"
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return "queries, keys and values differ in head dim"
    if query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        return "queries and keys differ in batch or heads"
    if (
        dispatch.autocast_dtype(query.device) is None
        and len({x.dtype for x in (query, key, value)}) > 1
    ):
        return "queries, keys and values differ in dtype"
    if attention_mask is None:
        return None
    if packed:
        return "there is an attention_mask beside it"
    sequences = getattr(attention_mask, "fastbert_sequences", None)
    if sequences is None:
        return "attention_mask is more than padding"
    expected = (sequences.queries, query), (sequences.keys, key)
    if any((b.batch_size, b.seqlen) != (x.shape[0], x.shape[2]) for b, x in expected):
        return "attention_mask is for other lengths"
    return None


def _sequences(query, key, attention_mask, kwargs) -> _Sequences:
    if attention_mask is not None:
        return attention_mask.fastbert_sequences
    if kwargs.get("cu_seq_lens_q") is not None:
        starts = kwargs["cu_seq_lens_q"]
        starts_k = kwargs.get("cu_seq_lens_k")
        return _Sequences(
            packed_input(starts, query.shape[0], query.shape[2], kwargs.get("max_length_q")),
            packed_input(
                starts if starts_k is None else starts_k,
                key.shape[0],
                key.shape[2],
                kwargs.get("max_length_k"),
            ),
        )
    return _Sequences(*(dense_batch(x.shape[0], x.shape[2], x.device) for x in (query, key)))


def _attend(heads, sequences: _Sequences, dropout: float, scaling: float | None) -> torch.Tensor:
    query, key, value = heads
    dtype = dispatch.autocast_dtype(query.device)
    if dtype is not None:
        # As autocast does for sdpa.
        query, key, value = (x.to(dtype) for x in heads)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    batch_size, num_heads, seqlen, head_dim = query.shape
    queries, keys = sequences.queries, sequences.keys
    out, _ = attention(
        queries.unpad(query.transpose(1, 2)),
        *(keys.unpad(x.transpose(1, 2)) for x in (key, value)),
        queries.cu_seqlens_q,
        keys.cu_seqlens_k,
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        softmax_scale=scaling,
        dropout_p=dropout,
        rng_state=draw_rng_state(query) if dropout > 0 else None,
    )
    return out.view(batch_size, seqlen, num_heads, head_dim)


def _is_traced() -> bool:
    return torch.jit.is_tracing() or torch.compiler.is_exporting()
