"""From a padded batch to packed rows and back. The only place that may wait for the device.

Letters: B batch, S padded length, T packed rows.

A packed row is one token that is computed; rows of one sequence lie together, first its real
tokens in order, then its query-only rows: padded positions that a head reads (question answering's
softmax over all positions, a label on padding, the pooler's position 0 under left padding). They
attend to the real tokens and nobody attends to them, so they come out as in a padded model.
"""

from dataclasses import dataclass, replace

import torch

from fastbert import dispatch
from fastbert.ops import index_flags
from fastbert.ops.unpad import pad, unpad


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Where the packed rows of a batch come from.

    Attributes:
        batch_size: B. seqlen: S.
        num_rows: T, rows computed; B·S while a graph is traced, where the rows behind
            `cu_seqlens_q[-1]` are idle.
        indices: `(T,)` int64, flat position b·S + s of each packed row; None where packed row i
            is position i.
        cu_seqlens_q: `(B+1,)` int32, first row of each sequence.
        cu_seqlens_k: `(B+1,)` int32, the same for the real rows alone.
        kv_indices: `(Tk,)` int64, packed rows that are real tokens; None if all are.
        real: `(B·S,)` bool, True at real tokens; None if all are.
        max_seqlen: bound of every sequence's length, known on the host.
        num_required: True elements of `required_rows`, where they were given and counted.
    """

    batch_size: int
    seqlen: int
    num_rows: int
    indices: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    kv_indices: torch.Tensor | None
    real: torch.Tensor | None
    max_seqlen: int
    num_required: int | None = None

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of a padded tensor: `(B, S, ...)` to `(T, ...)`; `(1, S, ...)` is broadcast."""
        if x.shape[0] != self.batch_size:
            x = x.expand(self.batch_size, *x.shape[1:])
        rows = x.reshape(self.batch_size * self.seqlen, *x.shape[2:])
        if self.indices is None:
            return rows
        return unpad(rows, self.indices) if rows.is_floating_point() else rows[self.indices]

    def pad(self, rows: torch.Tensor, *, keep_query_only: bool = False) -> torch.Tensor:
        """Packed rows put back: `(T, ...)` to `(B, S, ...)`, 0 at padding.

        Args:
            rows: `(T, ...)`.
            keep_query_only: fill the positions of query-only rows too.
        """
        indices = self.indices
        num_rows = self.batch_size * self.seqlen
        if indices is not None and self.num_rows == num_rows:
            # Traced, or every position computed: a permutation, so padding is cleared after it.
            rows = pad(rows, indices, num_rows)
            if self.real is not None and not keep_query_only:
                rows = rows.masked_fill(~self.real.view(-1, *[1] * (rows.dim() - 1)), 0)
        elif indices is not None:
            if self.kv_indices is not None and not keep_query_only:
                rows, indices = unpad(rows, self.kv_indices), indices[self.kv_indices]
            rows = pad(rows, indices, num_rows)
        return rows.view(self.batch_size, self.seqlen, *rows.shape[1:])

    def pad_with(self, rows: torch.Tensor, blank: torch.Tensor) -> torch.Tensor:
        """Packed rows put back among copies of one row: `(T, V)` and `(1, V)` to `(B, S, V)`."""
        if self.indices is not None:
            padded = blank.expand(self.batch_size * self.seqlen, -1)
            rows = padded.index_copy(0, self.indices, rows)
        return rows.view(self.batch_size, self.seqlen, rows.shape[-1])

    def first_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Each sequence's position 0: `(T, C)` to `(B, C)`. Position 0 must have been computed."""
        if self.indices is None:
            return rows.view(self.batch_size, self.seqlen, rows.shape[-1])[:, 0]
        first = self.cu_seqlens_q[:-1].long()
        if self.kv_indices is not None:
            # Where position 0 is padding it is the first of the query-only rows.
            is_real = self.real.view(self.batch_size, self.seqlen)[:, 0]
            first = torch.where(is_real, first, first + self.cu_seqlens_k.diff())
        return unpad(rows, first)

    def required(self, mask: torch.Tensor) -> torch.Tensor:
        """Indices of the packed rows where `mask` `(T,)`, the packed required_rows, is True."""
        return _nonzero(mask, self.num_required)


def dense_batch(batch_size: int, seqlen: int, device: torch.device) -> PackedBatch:
    """A batch without padding: nothing to gather, nothing to wait for."""
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seqlen
    return PackedBatch(
        batch_size, seqlen, batch_size * seqlen, None, cu_seqlens, cu_seqlens, None, None, seqlen
    )


def pack_batch(
    attention_mask: torch.Tensor | None,
    batch_size: int,
    seqlen: int,
    device: torch.device,
    *,
    required_rows: torch.Tensor | None = None,
    first_rows: bool = False,
) -> PackedBatch:
    """Finds the rows to compute. Waits for the device once, where there is anything to count.

    Args:
        attention_mask: `(B, S)` bool, integer or float, nonzero at real tokens; None: all real.
        batch_size, seqlen: B and S.
        device: of the ids.
        required_rows: `(B, S)` bool, positions read by a head even where they are padding.
        first_rows: position 0 of every sequence is read too.

    Raises:
        ValueError: a mask or required_rows of another shape.
    """
    required = None
    if required_rows is not None:
        check_mask_shape("required_rows", required_rows, batch_size, seqlen)
        required = required_rows.to(device).reshape(-1)
    if attention_mask is None:
        batch = dense_batch(batch_size, seqlen, device)
        if required is None or dispatch.is_symbolic(required):
            return batch
        return replace(batch, num_required=int(required.sum()))
    check_mask_shape("attention_mask", attention_mask, batch_size, seqlen)
    real = (attention_mask.to(device) != 0).reshape(-1)
    computed = real if required is None else real | required
    if first_rows:
        computed = computed.view(batch_size, seqlen).clone()
        computed[:, :1] = True
        computed = computed.view(-1)
    if dispatch.is_symbolic(real):
        return _pack_traced(real, computed, batch_size, seqlen)
    return _pack_counted(real, computed, required, batch_size, seqlen)


def check_mask_shape(name: str, mask: torch.Tensor, batch_size: int, seqlen: int) -> None:
    """Raises ValueError unless `mask` is `(B, S)`."""
    if mask.shape != (batch_size, seqlen):
        raise ValueError(
            f"{name} must have shape ({batch_size}, {seqlen}) like the input, got "
            f"{tuple(mask.shape)}"
        )


def _pack_counted(real, computed, required, batch_size: int, seqlen: int) -> PackedBatch:
    num_rows = batch_size * seqlen
    flag = index_flags.pending(real.device)
    counted = [m.sum() for m in (real, computed, required) if m is not None]
    counts = torch.stack([*counted, *([] if flag is None else [flag])]).tolist()
    if flag is not None and counts.pop():
        index_flags.raise_pending(real.device)
    num_real, num_computed, num_required = (*counts, None)[:3]
    if num_real == num_rows:
        batch = dense_batch(batch_size, seqlen, real.device)
        return replace(batch, num_required=num_required)
    cu_seqlens_q = cu_seqlens_k = _cu_seqlens(computed, batch_size, seqlen)
    kv_indices = None
    if num_computed == num_real:
        indices = _nonzero(real, num_real)
    else:
        indices = _order(real, computed, batch_size, seqlen)[:num_computed]
        kv_indices = _nonzero(real[indices], num_real)
        cu_seqlens_k = _cu_seqlens(real, batch_size, seqlen)
    return PackedBatch(
        batch_size,
        seqlen,
        num_computed,
        indices,
        cu_seqlens_q,
        cu_seqlens_k,
        kv_indices,
        real,
        seqlen,
        num_required,
    )


def _pack_traced(real, computed, batch_size: int, seqlen: int) -> PackedBatch:
    """The same with static shapes: T = B·S, idle rows last."""
    indices = _order(real, computed, batch_size, seqlen)
    kv_indices = None
    if computed is not real:
        kv_indices = torch.argsort((~real[indices]).long(), stable=True)
    return PackedBatch(
        batch_size,
        seqlen,
        batch_size * seqlen,
        indices,
        _cu_seqlens(computed, batch_size, seqlen),
        _cu_seqlens(real, batch_size, seqlen),
        kv_indices,
        real,
        seqlen,
    )


def _order(real, computed, batch_size: int, seqlen: int) -> torch.Tensor:
    """All positions: per sequence its real tokens, then its query-only rows; idle ones last."""
    sequence = torch.arange(batch_size, device=real.device).repeat_interleave(
        seqlen, output_size=batch_size * seqlen
    )
    key = torch.where(computed, 2 * sequence + (~real).long(), 2 * batch_size)
    return torch.argsort(key, stable=True)


def _cu_seqlens(rows: torch.Tensor, batch_size: int, seqlen: int) -> torch.Tensor:
    lengths = rows.view(batch_size, seqlen).sum(1, dtype=torch.int32)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _nonzero(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the True elements, whose number the host knows already."""
    if mask.device.type == "cpu":
        return mask.nonzero().view(-1)
    return torch.nonzero_static(mask, size=count).view(-1)


def restarting_positions(cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`(1, T)` position of each packed row within its sequence."""
    rows = torch.arange(num_rows, device=cu_seqlens.device)
    sequence = torch.bucketize(rows, cu_seqlens[1:], right=True)
    starts = cu_seqlens[:-1].long()
    return (rows - starts[sequence])[None] if starts.numel() else rows[None]


def packed_input(
    cu_seqlens: torch.Tensor, batch_size: int, seqlen: int, max_seqlen: int | None
) -> PackedBatch:
    """A batch that comes packed, `(1, T)` ids with `cu_seq_lens_q`, as
    `transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives it.

    Raises:
        ValueError: not one row of ids, or cu_seq_lens_q that do not cover it.
    """
    if batch_size != 1:
        raise ValueError(
            f"cu_seq_lens_q describes one packed row of ids, input_ids must be (1, T), got "
            f"({batch_size}, {seqlen})"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seq_lens_q must be a 1D integer tensor, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    if dispatch.is_checkable(cu_seqlens):
        steps = cu_seqlens.diff()
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != seqlen or (steps < 0).any():
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens {seqlen}, got "
                f"{cu_seqlens.tolist()}"
            )
        if max_seqlen is not None and steps.numel() and max_seqlen < int(steps.max()):
            raise ValueError(
                f"max_length_q is {max_seqlen}, but cu_seq_lens_q has a sequence of "
                f"{int(steps.max())} tokens"
            )
    cu_seqlens = cu_seqlens.to(torch.int32)
    bound = seqlen if max_seqlen is None else int(max_seqlen)
    return PackedBatch(1, seqlen, seqlen, None, cu_seqlens, cu_seqlens, None, None, bound)
