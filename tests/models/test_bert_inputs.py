"""Masks, positions, embeddings, packed input; and bad input, refused before any kernel runs."""

import pytest
import torch
import transformers

from fastbert import use_backend
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair

LENGTHS = (7, 1, 12, 4)


@pytest.fixture
def pair():
    return model_pair("BertModel", small_bert_config())


@pytest.fixture
def inputs():
    return head_inputs("BertModel", padded_batch(LENGTHS, 99, seed=1), None)


def _states(model, **inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def _close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float])
def test_mask_dtypes_mean_the_same(pair, inputs, dtype):
    expected = _states(pair[0], **inputs)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    with assert_packed():
        assert torch.equal(_states(pair[0], **inputs), expected)


def test_no_mask_means_all_real(pair, inputs):
    mask = inputs.pop("attention_mask")
    with assert_packed():
        alone = _states(pair[0], **inputs)
        ones = _states(pair[0], **inputs, attention_mask=torch.ones_like(mask))
    assert torch.equal(alone, ones)
    _close(alone, _states(pair[1], **inputs))


def test_padding_content_and_amount_are_invisible(pair, inputs):
    real = inputs["attention_mask"] != 0
    expected = _states(pair[0], **inputs)[real]
    other = dict(inputs, input_ids=inputs["input_ids"].masked_fill(~real, 42))
    assert torch.equal(_states(pair[0], **other)[real], expected)
    wide = {k: torch.nn.functional.pad(v, (0, 11)) for k, v in inputs.items()}
    assert torch.equal(_states(pair[0], **wide)[:, : real.shape[1]][real], expected)


def test_a_row_alone_and_in_a_batch(pair, inputs):
    together = _states(pair[0], **inputs)
    for row, length in enumerate(LENGTHS):
        alone = _states(pair[0], **{k: v[row : row + 1, :length] for k, v in inputs.items()})
        _close(alone[0], together[row, :length])


def test_all_masked_row_is_finite(pair, inputs):
    inputs["attention_mask"] = inputs["attention_mask"].clone()
    inputs["attention_mask"][2] = 0
    with torch.no_grad(), assert_packed():
        outputs = pair[0](**inputs)
    assert outputs.last_hidden_state.isfinite().all() and outputs.pooler_output.isfinite().all()
    real = inputs["attention_mask"] != 0
    _close(outputs.last_hidden_state[real], _states(pair[1], **inputs)[real])


def test_empty_batch(pair):
    ids = torch.zeros(0, 5, dtype=torch.long)
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids)):
            outputs = pair[0](ids, attention_mask=mask)
            assert outputs.last_hidden_state.shape == (0, 5, pair[0].config.hidden_size)
            assert outputs.pooler_output.shape == (0, pair[0].config.hidden_size)


@pytest.mark.parametrize("shape", [(4, 13), (4, 11), (3, 12), (12,), (4, 12, 1), ()])
def test_wrong_mask_shape_raises(pair, inputs, shape):
    inputs["attention_mask"] = torch.ones(shape)
    with pytest.raises((ValueError, RuntimeError)):
        _states(pair[0], **inputs)


@pytest.mark.parametrize(
    ("name", "value"),
    [("input_ids", 99), ("input_ids", -1), ("token_type_ids", 2), ("position_ids", 64)],
)
def test_ids_out_of_range_raise(pair, inputs, name, value):
    inputs.setdefault("position_ids", torch.arange(12).expand(4, -1))
    inputs[name] = inputs[name].clone()
    inputs[name][0, 1] = value
    with pytest.raises(ValueError, match=rf"{name} holds {value} at \(0, 1\)"):
        _states(pair[0], **inputs)


def test_ids_out_of_range_at_padding_are_not_read(pair, inputs):
    expected = _states(pair[0], **inputs)
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    assert torch.equal(_states(pair[0], **{**inputs, "input_ids": ids}), expected)


@pytest.mark.parametrize("name", ["input_ids", "token_type_ids", "position_ids"])
def test_ids_that_are_no_integers_raise(pair, inputs, name):
    inputs[name] = torch.zeros(4, 12)
    with pytest.raises(TypeError, match=rf"{name} must be int64 or int32.*\(4, 12\)"):
        _states(pair[0], **inputs)


def test_ids_out_of_range_on_a_device_that_must_not_be_waited_for(pair, inputs, monkeypatch):
    """They are clamped, gradients too, and the next forward that reads from the device raises."""
    from fastbert import dispatch
    from fastbert.ops import index_flags

    monkeypatch.setattr(index_flags, "must_not_wait", lambda tensor: True)
    monkeypatch.setattr(dispatch, "is_checkable", lambda tensor: False)
    with use_backend("reference"):
        _clamps_and_raises_later(pair, inputs, index_flags)


def _clamps_and_raises_later(pair, inputs, index_flags):
    wrong = dict(inputs, input_ids=inputs["input_ids"].clone())
    wrong["input_ids"][0, 1] = 1000
    pair[0](**inputs)
    pair[0](**inputs)
    outputs = pair[0](**wrong)
    outputs.last_hidden_state.sum().backward()
    assert outputs.last_hidden_state.isfinite().all()
    with pytest.raises(IndexError, match="earlier forward on cpu had input_ids"):
        pair[0](**inputs)
    pair[0](**inputs)
    ours, theirs = model_pair("BertForMaskedLM", small_bert_config())
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    torch.testing.assert_close(
        ours(**inputs, labels=labels).loss, theirs(**inputs, labels=labels).loss
    )
    labels[0, 0] = 99
    ours(**inputs, labels=labels).loss.backward()
    with pytest.raises(IndexError, match="labels"):
        ours(**inputs)
    index_flags._flags.clear()


def test_too_long_raises(pair):
    limit = pair[0].config.max_position_embeddings
    with pytest.raises(ValueError, match=str(limit)):
        _states(pair[0], input_ids=torch.ones(1, limit + 1, dtype=torch.long))


def test_ids_and_embeds_exclude_one_another(pair, inputs):
    embeds = pair[0].get_input_embeddings()(inputs["input_ids"])
    with pytest.raises(ValueError, match="exactly one"):
        pair[0](**inputs, inputs_embeds=embeds)
    with pytest.raises(ValueError, match="exactly one"):
        pair[0](attention_mask=inputs["attention_mask"])


def test_inputs_embeds_and_their_gradient(pair, inputs):
    ids = inputs.pop("input_ids")
    real = inputs["attention_mask"] != 0
    grads = []
    for model in pair:
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        states = model(**inputs, inputs_embeds=embeds).last_hidden_state
        (states[real] ** 2).sum().backward()
        grads.append((states[real].detach(), embeds.grad))
    _close(grads[0][0], grads[1][0])
    _close(grads[0][1][real], grads[1][1][real], atol=1e-3)
    assert not grads[0][1][~real].any()


@pytest.mark.parametrize("rows", [1, 4])
def test_position_ids_as_given(pair, inputs, rows):
    inputs["position_ids"] = torch.arange(12).flip(0).expand(rows, -1)
    real = inputs["attention_mask"] != 0
    with assert_packed():
        actual = _states(pair[0], **inputs)
    _close(actual[real], _states(pair[1], **inputs)[real])


def test_one_row_of_ids_stands_for_all(pair, inputs):
    types = torch.arange(12) % 2
    inputs["token_type_ids"] = types
    inputs["position_ids"] = torch.arange(12).flip(0)
    real = inputs["attention_mask"] != 0
    with assert_packed():
        actual = _states(pair[0], **inputs)
    _close(actual[real], _states(pair[1], **inputs)[real])
    inputs["token_type_ids"] = types[:7]
    with pytest.raises(ValueError, match="token_type_ids must have shape"):
        _states(pair[0], **inputs)


def test_float64():
    """Every op widens to float64 for float64: the oracle of all other tests is the same path."""
    ours, theirs = model_pair("BertForMaskedLM", small_bert_config(), dtype=torch.float64)
    ids = torch.randint(99, (2, 9))
    for model in (ours, theirs):
        model(ids, labels=ids).loss.backward()
    for (name, mine), (_, expected) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=0, atol=1e-12, msg=name)


def test_packed_input_from_the_flattening_collator(pair, inputs):
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    rows = [{"input_ids": inputs["input_ids"][i, :n].tolist()} for i, n in enumerate(LENGTHS)]
    flat = {k: v for k, v in collator(rows).items() if k != "labels"}
    with torch.no_grad(), assert_packed():
        packed = pair[0](**flat).last_hidden_state[0]
        without_positions = dict(flat, position_ids=None)
        assert torch.equal(pair[0](**without_positions).last_hidden_state[0], packed)
    inputs.pop("token_type_ids")
    expected = _states(pair[0], **inputs)[inputs["attention_mask"] != 0]
    _close(packed, expected)


def test_packed_input_on_transformers_path_keeps_sequences_apart(pair):
    """Attention weights need transformers' forward, whose sdpa ignores cu_seq_lens_q."""
    ids = torch.randint(1, 99, (1, 12))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    with torch.no_grad():
        packed = pair[0](ids, cu_seq_lens_q=starts)
        padded = pair[0](ids, cu_seq_lens_q=starts, output_attentions=True)
    _close(padded.last_hidden_state, packed.last_hidden_state)
    assert not padded.attentions[0][..., :5, 5:].any()


@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 3], [1, 12], [0, 9, 5, 12], [0.0, 12.0]],
    ids=["short", "start", "falls", "float"],
)
def test_packed_input_that_does_not_fit_raises(pair, cu_seqlens):
    ids = torch.ones(1, 12, dtype=torch.long)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        pair[0](ids, cu_seq_lens_q=torch.tensor(cu_seqlens))


def test_packed_input_with_too_small_a_bound_raises(pair):
    ids = torch.ones(1, 12, dtype=torch.long)
    with pytest.raises(ValueError, match="max_length_q"):
        pair[0](ids, cu_seq_lens_q=torch.tensor([0, 12], dtype=torch.int32), max_length_q=8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float])
def test_mask_per_query_takes_transformers_path(pair, inputs, dtype):
    """A block-diagonal 4D mask packs two texts into a row; bool and additive mean the same."""
    inputs.pop("attention_mask")
    blocks = torch.zeros(4, 1, 12, 12, dtype=torch.bool)
    blocks[:, :, :5, :5] = True
    blocks[:, :, 5:, 5:] = True
    additive = torch.zeros(blocks.shape).masked_fill(~blocks, torch.finfo(torch.float).min)
    actual = _states(pair[0], **inputs, attention_mask=blocks if dtype == torch.bool else additive)
    _close(actual, _states(pair[1], **inputs, attention_mask=additive))


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64])
def test_every_length(pair, length):
    ids = torch.randint(99, (2, length))
    with assert_packed():
        actual = _states(pair[0], input_ids=ids)
    _close(actual, _states(pair[1], input_ids=ids))


@pytest.mark.parametrize(
    "name",
    ["input_ids", "attention_mask", "token_type_ids", "position_ids", "cu_seq_lens_q", "labels"],
)
def test_lists_and_arrays_raise(name):
    ours, _ = model_pair("BertForMaskedLM", small_bert_config())
    ids = torch.ones(2, 5, dtype=torch.long)
    for value in ([[1] * 5] * 2, ids.numpy()):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got a (list|ndarray)"):
            ours(**{"input_ids": ids, name: value})


def test_nothing_raises(pair):
    with pytest.raises(ValueError, match="0 positions"):
        pair[0](torch.ones(2, 0, dtype=torch.long))


def test_wrong_label_shape_raises():
    ours, _ = model_pair("BertForMaskedLM", small_bert_config())
    with pytest.raises(ValueError, match="labels"):
        ours(torch.ones(2, 5, dtype=torch.long), labels=torch.ones(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("BertForTokenClassification", (2, 5), 3),
        ("BertForSequenceClassification", (2,), 3),
        ("BertForNextSentencePrediction", (2,), 2),
        ("BertForMultipleChoice", (2,), 4),
    ],
)
def test_labels_that_are_no_classes_raise(name, shape, count):
    config = small_bert_config(num_labels=3, problem_type="single_label_classification")
    ours, _ = model_pair(name, config)
    ids = torch.ones((2, 4, 5) if "Choice" in name else (2, 5), dtype=torch.long)
    labels = torch.full(shape, -100)
    for wrong in (count, -1):
        labels[0] = wrong
        with pytest.raises(ValueError, match=f"labels hold {wrong}, but there are {count} classes"):
            ours(input_ids=ids, labels=labels)
    labels[0] = count - 1
    assert ours(input_ids=ids, labels=labels).loss.isfinite()
    with pytest.raises(TypeError, match="labels must be int64"):
        ours(input_ids=ids, labels=labels.float())
    if "Token" in name:
        with pytest.raises(ValueError, match=r"labels must have shape \(2, 5\) like the input"):
            ours(input_ids=ids, labels=labels[:, :4])


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("BertForPreTraining", "next_sentence_label"),
        ("AlbertForPreTraining", "sentence_order_label"),
    ],
)
def test_labels_of_pairs_that_are_no_classes_raise(name, argument):
    config = small_bert_config()
    if name.startswith("Albert"):
        config = transformers.AlbertConfig(**config.to_diff_dict(), embedding_size=16)
    ours, theirs = model_pair(name, config)
    ids, labels = torch.ones(2, 5, dtype=torch.long), torch.tensor([0, 2])
    with pytest.raises(ValueError, match=f"{argument} hold 2, but there are 2 classes"):
        ours(ids, labels=ids, **{argument: labels})
    with pytest.raises(TypeError, match=f"{argument} must be int64, the numbers of classes"):
        ours(ids, labels=ids, **{argument: labels.float()})
    # Without the other labels there is no loss, and transformers does not look at these.
    assert ours(ids, **{argument: labels}).loss is None
    labels[1] = -100
    _close(
        ours(ids, labels=ids, **{argument: labels}).loss,
        theirs(ids, labels=ids, **{argument: labels}).loss,
    )


def test_positions_of_answers_are_taken_as_transformers_takes_them():
    ours, theirs = model_pair("BertForQuestionAnswering", small_bert_config())
    ids = torch.arange(1, 11).view(2, 5)
    for start, end in ((1, 4), (-100, 3), (-1, 99), (0, 5), (99, 2)):
        positions = {
            "start_positions": torch.tensor([1, start]),
            "end_positions": torch.tensor([[2], [end]]),
        }
        _close(ours(ids, **positions).loss, theirs(ids, **positions).loss)
    good = torch.tensor([1, 2])
    with pytest.raises(TypeError, match="end_positions must be int64, the numbers of classes"):
        ours(ids, start_positions=good, end_positions=good.float())
    with pytest.raises(ValueError, match=r"start_positions must have shape \(2,\), .* got \(3,\)"):
        ours(ids, start_positions=torch.ones(3, dtype=torch.long), end_positions=good)


def test_embeddings_of_another_dtype_raise(pair):
    ours, embeds = pair[0], torch.zeros(2, 5, 48)
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        message = f"inputs_embeds must be torch.float32 like the model's weights, got {dtype}"
        with pytest.raises(TypeError, match=message):
            ours(inputs_embeds=embeds.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert _states(ours, inputs_embeds=embeds.bfloat16()).isfinite().all()


def test_labels_that_are_numbers_are_left_alone():
    ours, theirs = model_pair("BertForSequenceClassification", small_bert_config(num_labels=3))
    ids, labels = torch.ones(2, 5, dtype=torch.long), torch.full((2, 3), 7.5)
    _close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss)
