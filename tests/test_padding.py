"""Packed rows: which, in which order, and back."""

import pytest
import torch

from fastbert.padding import dense_batch, pack_batch, packed_input, restarting_positions

CPU = torch.device("cpu")


def _mask(rows):
    return torch.tensor([[int(c) for c in row] for row in rows])


def test_padding_indices_follow_the_rows():
    batch = pack_batch(_mask(["1100", "0000", "1011"]), 3, 4, CPU)
    assert batch.indices.tolist() == [0, 1, 8, 10, 11]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 2, 5]
    assert batch.cu_seqlens_q.dtype == torch.int32
    assert batch.kv_indices is None
    assert (batch.num_rows, batch.max_seqlen) == (5, 4)


def test_padding_query_only_rows_come_after_the_real_ones():
    required = _mask(["0010", "1000", "0100"]).bool()
    batch = pack_batch(_mask(["1100", "0000", "1011"]), 3, 4, CPU, required_rows=required)
    assert batch.indices.tolist() == [0, 1, 2, 4, 8, 10, 11, 9]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 8]
    assert batch.cu_seqlens_k.tolist() == [0, 2, 2, 5]
    assert batch.kv_indices.tolist() == [0, 1, 4, 5, 6]
    assert batch.num_required == 3


def test_padding_and_back():
    mask = _mask(["1100", "0000", "1011"])
    x = torch.randn(3, 4, 5)
    for required in (None, _mask(["0010", "1000", "0100"]).bool()):
        batch = pack_batch(mask, 3, 4, CPU, required_rows=required)
        rows = batch.unpad(x)
        assert torch.equal(batch.pad(rows), x * mask[..., None])
        kept = mask.bool() if required is None else mask.bool() | required
        assert torch.equal(batch.pad(rows, keep_query_only=True), x * kept[..., None])


def test_padding_first_rows():
    mask = _mask(["1100", "0011", "0000"])
    batch = pack_batch(mask, 3, 4, CPU, first_rows=True)
    x = torch.randn(3, 4, 5)
    assert torch.equal(batch.first_rows(batch.unpad(x)), x[:, 0])


def test_padding_traced_has_static_shapes(monkeypatch):
    """Under torch.compile idle rows lie behind the last sequence; results are the same."""
    mask = _mask(["1100", "0000", "1011"])
    x = torch.randn(3, 4, 5)
    for required in (None, _mask(["0010", "1000", "0100"]).bool()):
        eager = pack_batch(mask, 3, 4, CPU, required_rows=required)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            traced = pack_batch(mask, 3, 4, CPU, required_rows=required)
        assert traced.num_rows == 12
        assert torch.equal(traced.indices[: eager.num_rows], eager.indices)
        assert torch.equal(traced.cu_seqlens_q, eager.cu_seqlens_q)
        assert torch.equal(traced.cu_seqlens_k, eager.cu_seqlens_k)
        assert torch.equal(traced.pad(traced.unpad(x)), x * mask[..., None])


def test_padding_without_padding_gathers_nothing():
    for batch in (pack_batch(None, 2, 3, CPU), pack_batch(torch.ones(2, 3), 2, 3, CPU)):
        assert batch.indices is None
        x = torch.randn(2, 3, 4)
        assert batch.unpad(x).data_ptr() == x.data_ptr()
        assert batch.pad(batch.unpad(x)).data_ptr() == x.data_ptr()


def test_padding_broadcasts_one_row_of_positions():
    batch = pack_batch(_mask(["110", "011"]), 2, 3, CPU)
    assert batch.unpad(torch.tensor([[5, 6, 7]])).tolist() == [5, 6, 6, 7]


def test_padding_restarting_positions():
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert restarting_positions(starts, 5).tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (6,)])
def test_padding_wrong_shapes_raise(shape):
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 3\)"):
        pack_batch(torch.ones(shape), 2, 3, CPU)
    with pytest.raises(ValueError, match="required_rows"):
        pack_batch(torch.ones(2, 3), 2, 3, CPU, required_rows=torch.ones(shape, dtype=torch.bool))


def test_padding_packed_input_is_checked():
    starts = torch.tensor([0, 2, 5])
    batch = packed_input(starts, 1, 5, None)
    assert (batch.max_seqlen, batch.cu_seqlens_q.dtype) == (5, torch.int32)
    with pytest.raises(ValueError, match=r"\(1, T\)"):
        packed_input(starts, 2, 5, None)
    with pytest.raises(ValueError, match="ends at 5, but there are 6 tokens"):
        packed_input(starts, 1, 6, None)


def test_padding_empty_batch():
    assert dense_batch(0, 5, CPU).cu_seqlens_q.tolist() == [0]
    batch = pack_batch(torch.ones(0, 5), 0, 5, CPU, first_rows=True)
    assert batch.first_rows(torch.randn(0, 7)).shape == (0, 7)
