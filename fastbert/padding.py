"""From a padded batch to packed rows and back, and sequences packed beforehand into fixed shapes.
The only place that may wait for the device.

Letters: B batch, S padded length, T packed rows.

A packed row is one token that is computed; rows of one sequence lie together, first its real
tokens in order, then its query-only rows: padded positions that a head reads (question answering's
softmax over all positions, a label on padding, the pooler's position 0 under left padding). They
attend to the real tokens and nobody attends to them, so they come out as in a padded model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastbert import dispatch
from fastbert.ops import index_flags
from fastbert.ops.unpad import pad, unpad

IGNORE_INDEX = -100
"""Label of a position without one, as in transformers and torch."""


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
        real: `(B·S,)` bool, True at real tokens; None if all are. Without `indices` the others
            are idle rows behind the last sequence.
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
        if self.num_rows == num_rows:
            # Traced, packed beforehand, or every position computed: padding is cleared afterwards.
            if indices is not None:
                rows = pad(rows, indices, num_rows)
            if self.real is not None and (indices is None or not keep_query_only):
                rows = rows.masked_fill(~self.real.view(-1, *[1] * (rows.dim() - 1)), 0)
        else:
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


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The packed rows that a layer computes where not all are wanted.

    Attributes:
        rows: `(R,)` int64, rising. cu_seqlens: `(B+1,)` int32, first of each sequence among them.
    """

    rows: torch.Tensor
    cu_seqlens: torch.Tensor


def query_rows(rows: torch.Tensor, batch: PackedBatch) -> QueryRows:
    """Those of a packed batch.

    Args:
        rows: `(R,)` int64, packed rows, rising.
        batch: packed beforehand.

    Raises:
        ValueError: not one-dimensional int64; on a CPU, rows that do not rise or are none.
    """
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(
            f"last_layer_rows must be one-dimensional int64, got {rows.dtype} of shape "
            f"{tuple(rows.shape)}"
        )
    if dispatch.is_checkable(rows) and not _rises_within(rows, batch.num_rows):
        raise ValueError(
            f"last_layer_rows must rise within 0 to {batch.num_rows - 1}, each row once; sort them "
            "(fastbert.padding.pack does)"
        )
    starts = torch.searchsorted(rows, batch.cu_seqlens_q.long(), out_int32=True)
    return QueryRows(rows, starts)


def _rises_within(rows: torch.Tensor, num_rows: int) -> bool:
    bounds = rows.new_tensor([-1, num_rows])
    return bool((torch.cat([bounds[:1], rows, bounds[1:]]).diff() > 0).all())


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


def rows_are_neighbours(batch: PackedBatch) -> bool:
    """Whether the packed rows of each sequence lie side by side in the padded batch, so that two of
    them are as far apart here as there. Waits for the device, where there is padding."""
    if batch.indices is None:
        return True
    apart = batch.indices.diff() != 1
    starts = torch.zeros(batch.num_rows + 1, dtype=torch.bool, device=apart.device)
    starts[batch.cu_seqlens_q.long()] = True
    return not (apart & ~starts[1:-1]).any()


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
    """`(1, T)` position of each packed row within its sequence; 0 of idle rows behind the last."""
    rows = torch.arange(num_rows, device=cu_seqlens.device)
    sequence = torch.bucketize(rows, cu_seqlens[1:], right=True)
    starts = cu_seqlens.long()
    # Behind the last sequence each row is its own start.
    return (rows - torch.where(rows < starts[-1], starts[sequence], rows))[None]


def packed_input(
    cu_seqlens: torch.Tensor,
    batch_size: int,
    seqlen: int,
    max_seqlen: int | None,
    attention_mask: torch.Tensor | None = None,
) -> PackedBatch:
    """A batch that comes packed, `(1, T)` ids with `cu_seq_lens_q`, as
    `transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)` or `pack` gives it.

    Args:
        cu_seqlens: `(B+1,)` integers, first row of each sequence.
        batch_size, seqlen: 1 and T.
        max_seqlen: bound of the lengths; None: T.
        attention_mask: `(1, T)`, 0 at idle rows behind the last sequence; None: there are none.

    Raises:
        ValueError: not one row of ids, cu_seq_lens_q that do not cover it, or a mask that says
            otherwise.
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
    if attention_mask is not None:
        check_mask_shape("attention_mask", attention_mask, batch_size, seqlen)
    if dispatch.is_checkable(cu_seqlens):
        _check_cu_seqlens(cu_seqlens, seqlen, max_seqlen, attention_mask)
    cu_seqlens = cu_seqlens.to(torch.int32)
    bound = seqlen if max_seqlen is None else int(max_seqlen)
    real = None if attention_mask is None else (attention_mask != 0).view(-1)
    return PackedBatch(1, seqlen, seqlen, None, cu_seqlens, cu_seqlens, None, real, bound)


def _check_cu_seqlens(cu_seqlens, seqlen: int, max_seqlen: int | None, attention_mask) -> None:
    steps = cu_seqlens.diff()
    num_real = int(cu_seqlens[-1])
    if cu_seqlens[0] != 0 or num_real > seqlen or (steps < 0).any():
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to the number of tokens {seqlen}, got "
            f"{cu_seqlens.tolist()}"
        )
    if attention_mask is None and num_real < seqlen:
        raise ValueError(
            f"cu_seq_lens_q ends at {num_real}, but there are {seqlen} tokens; if those behind it "
            "are filling, say so by an attention_mask that is 0 there (fastbert.padding.pack does)"
        )
    if attention_mask is not None:
        real = attention_mask.cpu().view(-1) != 0
        if not real[:num_real].all() or real[num_real:].any():
            raise ValueError(
                "attention_mask beside cu_seq_lens_q must be 1 in the sequences and 0 behind them: "
                f"the sequences end at {num_real}, the mask has {int(real.sum())} ones"
            )
    if max_seqlen is not None and steps.numel() and max_seqlen < int(steps.max()):
        raise ValueError(
            f"max_length_q is {max_seqlen}, but cu_seq_lens_q has a sequence of "
            f"{int(steps.max())} tokens"
        )


# --- packed beforehand ----------------------------------------------------------------------------

TOKEN_COLUMNS = ("input_ids", "token_type_ids", "position_ids", "labels")
SEQUENCE_COLUMNS = ("labels", "next_sentence_label")


def pack(
    features: Sequence[Mapping],
    *,
    num_tokens: int,
    num_sequences: int,
    num_labels: int | None = None,
    max_seqlen: int | None = None,
    pad_token_id: int = 0,
    first_position: int = 0,
    last_layer_subset: bool = False,
) -> dict[str, torch.Tensor | int]:
    """Sequences laid end to end in tensors whose shapes do not depend on the lengths.

    The result is the keyword arguments of a model. Nothing in a step on it waits for the device or
    depends on how many tokens are real, so that one CUDA graph serves every batch
    (`fastbert.train.GraphedStep`). What is not filled is idle: rows behind the last sequence that
    nothing attends to, empty sequences, labels that are ignored.

    Args:
        features: one mapping a sequence, as a tokenizer gives it without padding: `input_ids`, and
            where wanted `token_type_ids`, `position_ids`, `labels` (one per token, or one integer
            for the sequence) and `next_sentence_label`. An `attention_mask` must be all ones.
        num_tokens: T, rows of the result.
        num_sequences: B, sequences of the result.
        num_labels: P, labelled tokens of the result; None leaves `label_rows` out, and the model
            then counts the labels itself, which waits for the device.
        max_seqlen: longest sequence allowed, part of what a graph is captured for; None: T.
        pad_token_id: input id of idle rows.
        first_position: position id of each sequence's first token where the features have none: a
            model's own (`model.base_model.first_position`), which RoBERTa's is not 0.
        last_layer_subset: add `last_layer_rows`, the labelled rows and the first of each sequence,
            to which the model then limits its last layer; needs num_labels.

    Returns:
        `input_ids`, `position_ids`, `attention_mask` (0 at idle rows) and the columns given, each
        `(1, T)` int64; per-sequence columns `(B,)` int64, -100 for empty sequences;
        `cu_seq_lens_q` `(B+1,)` int32, padded by repeating the last offset; `max_length_q` int;
        `pooled_rows` `(B,)` int64, the first row of each sequence, which the pooler reads;
        `label_rows` `(P,)` int64, the labelled rows; and `last_layer_rows` `(min(P+B, T),)` int64,
        rising. All three are unique: places not needed hold rows without a label or sequence.

    Raises:
        ValueError: a batch over one of the capacities, no or empty sequences, columns that are
            unknown, missing in some sequences or of another length than input_ids.
    """
    ids, lengths = _check_features(features)
    of_tokens, of_sequences = {"input_ids": np.concatenate(ids)}, {}
    for name in features[0].keys() - {"input_ids", "attention_mask"}:
        values = [np.asarray(feature[name]) for feature in features]
        if name in SEQUENCE_COLUMNS and all(v.ndim == 0 for v in values):
            of_sequences[name] = np.stack(values)
        else:
            of_tokens[name] = _end_to_end(name, values, lengths)
    return pack_columns(
        of_tokens,
        of_sequences,
        lengths,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_labels=num_labels,
        max_seqlen=max_seqlen,
        pad_token_id=pad_token_id,
        first_position=first_position,
        last_layer_subset=last_layer_subset,
    )


def pack_columns(
    of_tokens: Mapping[str, np.ndarray],
    of_sequences: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    *,
    num_tokens: int,
    num_sequences: int,
    num_labels: int | None = None,
    max_seqlen: int | None = None,
    pad_token_id: int = 0,
    first_position: int = 0,
    last_layer_subset: bool = False,
) -> dict[str, torch.Tensor | int]:
    """`pack` for N sequences that lie end to end already.

    Args:
        of_tokens: `(sum of lengths,)` integers under the names of `pack`'s features, `input_ids`
            among them. of_sequences: `(N,)` integers: `next_sentence_label`, or `labels`.
        lengths: `(N,)` tokens of each sequence.
        num_tokens, num_sequences, num_labels, max_seqlen, pad_token_id, first_position,
            last_layer_subset: as in `pack`.

    Returns, Raises: as `pack`.
    """
    _check_columns(of_tokens, of_sequences, lengths)
    count, limit = int(lengths.sum()), num_tokens if max_seqlen is None else max_seqlen
    _check_capacity("tokens", count, num_tokens, "num_tokens")
    _check_capacity("sequences", len(lengths), num_sequences, "num_sequences")
    _check_capacity("tokens in one sequence", int(lengths.max()), limit, "max_seqlen")
    cu_seqlens = np.full(num_sequences + 1, count, dtype=np.int32)
    firsts = cu_seqlens[: len(lengths)] = np.cumsum(lengths) - lengths

    fills = {"input_ids": pad_token_id, "labels": IGNORE_INDEX}
    positions = np.arange(count) - np.repeat(firsts, lengths) + first_position
    packed = {
        name: _filled(values, num_tokens, fills.get(name, 0))[None]
        for name, values in of_tokens.items()
    }
    packed.setdefault("position_ids", _filled(positions, num_tokens, 0)[None])
    packed["attention_mask"] = _filled(np.ones(count), num_tokens, 0)[None]
    for name, values in of_sequences.items():
        packed[name] = _filled(values, num_sequences, IGNORE_INDEX)
    packed |= {
        "cu_seq_lens_q": torch.from_numpy(cu_seqlens),
        "max_length_q": limit,
        "pooled_rows": torch.from_numpy(_unique_rows(firsts, num_sequences, num_tokens)),
    }
    if num_labels is not None:
        rows = _labelled_rows(of_tokens, num_labels)
        packed["label_rows"] = torch.from_numpy(_unique_rows(rows, num_labels, num_tokens))
    if last_layer_subset:
        if num_labels is None:
            raise ValueError("pack: last_layer_subset needs num_labels, the room for its rows")
        capacity = min(num_labels + num_sequences, num_tokens)
        computed = _unique_rows(np.union1d(rows, firsts), capacity, num_tokens)
        packed["last_layer_rows"] = torch.from_numpy(np.sort(computed))
    return packed


def _check_columns(of_tokens, of_sequences, lengths: np.ndarray) -> None:
    if not len(lengths):
        raise ValueError("pack: there is no sequence; a batch needs at least one")
    if lengths.min() < 1:
        raise ValueError(f"pack: every sequence needs at least one token, got lengths {lengths}")
    for columns, size in ((of_tokens, int(lengths.sum())), (of_sequences, len(lengths))):
        for name, values in columns.items():
            if values.dtype.kind not in "iu":
                raise ValueError(
                    f"pack: {name} must be an integer each, got {values.dtype}; what is not filled "
                    "is marked by -100, which a regression loss does not know"
                )
            if values.shape != (size,):
                raise ValueError(
                    f"pack: {name} must have shape ({size},) by the lengths, got {values.shape}"
                )


def _check_features(features) -> tuple[list[np.ndarray], np.ndarray]:
    """The ids and lengths of the sequences."""
    if not features:
        raise ValueError("pack: features holds no sequence; a batch needs at least one")
    names = features[0].keys()
    known = {*TOKEN_COLUMNS, *SEQUENCE_COLUMNS, "attention_mask"}
    if "input_ids" not in names or names - known:
        raise ValueError(
            f"pack: features must have input_ids and may have {', '.join(sorted(known))}; got "
            f"{', '.join(sorted(names))}"
        )
    for i, feature in enumerate(features):
        if feature.keys() != names:
            raise ValueError(
                f"pack: sequence {i} has the columns {sorted(feature)}, the first has "
                f"{sorted(names)}; give all sequences the same"
            )
        if "attention_mask" in names and not np.all(np.asarray(feature["attention_mask"]) != 0):
            raise ValueError(
                f"pack: attention_mask of sequence {i} is 0 somewhere; tokenize without padding"
            )
    ids = [np.asarray(feature["input_ids"]) for feature in features]
    for i, row in enumerate(ids):
        if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "iu":
            raise ValueError(
                f"pack: input_ids of sequence {i} must be one or more integers in one dimension, "
                f"got {row.dtype} of shape {row.shape}"
            )
    return ids, np.array([row.size for row in ids])


def _check_capacity(what: str, count: int, capacity: int, name: str) -> None:
    if count > capacity:
        raise ValueError(
            f"pack: {count} {what}, but {name} is {capacity}; put fewer into a batch or raise it"
        )


def _end_to_end(name: str, values: Sequence[np.ndarray], lengths: np.ndarray) -> np.ndarray:
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if value.shape != (length,) or name not in TOKEN_COLUMNS:
            raise ValueError(
                f"pack: {name} of sequence {i} has shape {value.shape}, its input_ids ({length},)"
            )
    return np.concatenate(values)


def _filled(values: np.ndarray, capacity: int, fill: int) -> torch.Tensor:
    """`(capacity,)` int64: the values, then `fill`."""
    row = np.full(capacity, fill, np.int64)
    row[: len(values)] = values
    return torch.from_numpy(row)


def rows_beside(rows: np.ndarray, count: int, num_rows: int) -> np.ndarray:
    """`(count,)` int64: the last rows of `num_rows` that are not among `rows`: idle ones first.

    Raises:
        ValueError: fewer are left.
    """
    if len(rows) + count > num_rows:
        raise ValueError(f"{count} rows beside {len(rows)} are more than the {num_rows} there are")
    others = np.ones(num_rows, dtype=bool)
    others[rows] = False
    return np.flatnonzero(others)[num_rows - len(rows) - count :]


def _unique_rows(rows: np.ndarray, capacity: int, num_tokens: int) -> np.ndarray:
    """`(capacity,)` int64: `rows`, then rows that are not among them."""
    _check_capacity("rows to point at", capacity, num_tokens, "num_tokens")
    others = rows_beside(rows, capacity - len(rows), num_tokens)
    return np.concatenate([rows, others]).astype(np.int64)


def _labelled_rows(of_tokens: Mapping[str, np.ndarray], num_labels: int) -> np.ndarray:
    if "labels" not in of_tokens:
        raise ValueError("pack: num_labels is for labels of tokens, which these features lack")
    rows = np.flatnonzero(of_tokens["labels"] != IGNORE_INDEX)
    _check_capacity("labelled tokens", len(rows), num_labels, "num_labels")
    return rows
