"""Sequences packed beforehand into fixed shapes: what `pack` makes, and models on it."""

import numpy as np
import pytest
import torch

from fastbert.padding import pack, pack_columns
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, head_inputs, model_pair

CAPACITY = {"num_tokens": 40, "num_sequences": 6, "max_seqlen": 16}
LENGTHS = (9, 1, 14)


def _features(inputs, lengths=LENGTHS):
    """A right-padded batch as one mapping a sequence, without padding."""
    names = inputs.keys() - {"attention_mask"}
    return [
        {n: inputs[n][i] if inputs[n].dim() == 1 else inputs[n][i, :length] for n in names}
        for i, length in enumerate(lengths)
    ]


def test_pack_lays_sequences_end_to_end():
    features = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "next_sentence_label": 1},
        {"input_ids": np.array([8]), "labels": [8], "next_sentence_label": 0},
    ]
    batch = pack(features, num_tokens=6, num_sequences=3, num_labels=3, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, -100, -100]]
    assert batch["next_sentence_label"].tolist() == [1, 0, -100]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 4]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == 6
    assert batch["pooled_rows"].tolist() == [0, 3, 5]
    assert batch["label_rows"].tolist() == [1, 3, 5]


def test_pack_full_to_the_last_place():
    features = [{"input_ids": [1, 2], "labels": [1, 2]}] * 2
    batch = pack(features, num_tokens=4, num_sequences=2, num_labels=4, max_seqlen=2)
    assert batch["attention_mask"].all()
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 4]
    assert batch["label_rows"].tolist() == [0, 1, 2, 3]


def test_pack_names_the_rows_of_the_last_layer():
    """Labelled rows and first ones, each once, idle ones where there is room, all rising."""
    features = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
        {"input_ids": [8, 9], "labels": [8, -100]},
    ]
    batch = pack(features, num_tokens=9, num_sequences=3, num_labels=2, last_layer_subset=True)
    assert batch["last_layer_rows"].tolist() == [0, 1, 3, 7, 8]
    batch = pack(features, num_tokens=5, num_sequences=3, num_labels=5, last_layer_subset=True)
    assert batch["last_layer_rows"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("of_tokens", "of_sequences", "lengths", "words"),
    [
        ({"input_ids": np.arange(3)}, {}, np.array([2]), r"input_ids must have shape \(2,\)"),
        ({"input_ids": np.ones(2)}, {}, np.array([2]), "input_ids must be an integer each"),
        (
            {"input_ids": np.arange(2)},
            {"next_sentence_label": np.arange(2)},
            np.array([2]),
            r"next_sentence_label must have shape \(1,\)",
        ),
        ({"input_ids": np.arange(2)}, {}, np.array([2, 0]), "at least one token"),
        ({"input_ids": np.arange(0)}, {}, np.array([], np.int64), "no sequence"),
    ],
)
def test_pack_columns_refuses(of_tokens, of_sequences, lengths, words):
    with pytest.raises(ValueError, match=words):
        pack_columns(of_tokens, of_sequences, lengths, **CAPACITY)


ONE = {"input_ids": [1, 2, 3], "labels": [1, 2, -100]}


@pytest.mark.parametrize(
    ("features", "change", "words"),
    [
        ([ONE] * 14, {"num_sequences": 14}, "42 tokens, but num_tokens is 40"),
        ([ONE] * 7, {}, "7 sequences, but num_sequences is 6"),
        ([ONE], {"max_seqlen": 2}, "3 tokens in one sequence, but max_seqlen is 2"),
        ([ONE] * 2, {"num_labels": 3}, "4 labelled tokens, but num_labels is 3"),
        ([ONE], {"num_labels": 41}, "41 rows to point at, but num_tokens is 40"),
        ([], {}, "at least one"),
        ([{"ids": [1]}], {}, "must have input_ids"),
        ([{**ONE, "special_tokens_mask": [1, 0, 1]}], {}, "special_tokens_mask"),
        ([ONE, {"input_ids": [1]}], {}, "sequence 1 has the columns"),
        ([{"input_ids": []}], {}, "one or more integers"),
        ([{"input_ids": [[1, 2]]}], {}, "one or more integers"),
        ([{"input_ids": [0.5]}], {}, "one or more integers"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], {}, "without padding"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, r"labels of sequence 0 has shape \(1,\)"),
        ([{"input_ids": [1, 2], "token_type_ids": 0}], {}, "token_type_ids of sequence 0"),
        ([{"input_ids": [1, 2], "labels": 0.5}], {}, "must be an integer"),
        ([{"input_ids": [1, 2], "labels": 1}], {"num_labels": 2}, "labels of tokens"),
        ([ONE], {"last_layer_subset": True}, "last_layer_subset needs num_labels"),
    ],
)
def test_pack_refuses(features, change, words):
    with pytest.raises(ValueError, match=words):
        pack(features, **{**CAPACITY, **change})


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForNextSentencePrediction",
    ],
)
def test_pack_trains_as_the_padded_batch(name, dropout):
    """Loss and every gradient, with the same dropped elements: rows have the same places."""
    config = small_bert_config(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, classifier_dropout=0.0
    )
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    inputs = head_inputs(name, padded_batch(LENGTHS, config.vocab_size, seed=3), config)
    if name == "BertForTokenClassification":
        inputs["labels"][inputs["attention_mask"] == 0] = -100
    has_mlm = name in ("BertForMaskedLM", "BertForPreTraining")
    batch = pack(_features(inputs), **CAPACITY, num_labels=20 if has_mlm else None)
    rng_state = torch.tensor([11, 5])
    losses = {}
    reference = theirs if dropout == 0 else ours
    extra = {} if dropout == 0 else {"rng_state": rng_state}
    losses["padded"] = reference(**inputs, **extra).loss
    expected = torch.autograd.grad(losses["padded"], list(reference.parameters()))
    with assert_packed():
        loss = ours(**batch, rng_state=rng_state).loss
    torch.testing.assert_close(loss, losses["padded"], rtol=2e-6, atol=2e-6)
    actual = torch.autograd.grad(loss, list(ours.parameters()))
    for (parameter, _), mine, wanted in zip(ours.named_parameters(), actual, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6, msg=parameter)


def test_pack_gives_the_same_bits_as_a_padded_batch():
    ours, _ = model_pair("BertModel", small_bert_config())
    inputs = padded_batch(LENGTHS, 99, seed=4)
    batch = pack(_features(inputs), **CAPACITY)
    with torch.no_grad():
        padded = ours(**inputs, output_hidden_states=True)
        packed = ours(**batch, output_hidden_states=True)
    real = inputs["attention_mask"] != 0
    for mine, wanted in zip(packed.hidden_states, padded.hidden_states, strict=True):
        assert torch.equal(mine[0, : real.sum()], wanted[real])
        assert not mine[0, real.sum() :].any()
    assert torch.equal(packed.pooler_output[:3], padded.pooler_output)
    assert packed.pooler_output.shape[0] == 6


def test_pack_on_transformers_own_path():
    """What cannot run packed has the same numbers, pooled rows and labels included."""
    ours, _ = model_pair("BertForPreTraining", small_bert_config())
    inputs = head_inputs("BertForPreTraining", padded_batch(LENGTHS, 99, seed=5), ours.config)
    batch = pack(_features(inputs), **CAPACITY, num_labels=20)
    with torch.no_grad():
        packed = ours(**batch)
        own = ours(**batch, output_attentions=True)
    assert len(own.attentions) == 3
    torch.testing.assert_close(own.loss, packed.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        own.seq_relationship_logits[:3], packed.seq_relationship_logits[:3], rtol=1e-5, atol=1e-5
    )


def test_pack_arguments_out_of_place_are_refused():
    ours, _ = model_pair("BertForMaskedLM", small_bert_config())
    inputs = head_inputs("BertForMaskedLM", padded_batch(LENGTHS, 99, seed=6), ours.config)
    batch = pack(_features(inputs), **CAPACITY, num_labels=20)
    rows = batch["label_rows"]
    with pytest.raises(ValueError, match="label_rows are rows of packed input"):
        ours(**inputs, label_rows=rows)
    with pytest.raises(ValueError, match="pooled_rows are rows of packed input"):
        ours.bert(inputs["input_ids"], pooled_rows=rows)
    with pytest.raises(ValueError, match="must list every labelled row once"):
        ours(**{**batch, "label_rows": rows[1:]})
    with pytest.raises(ValueError, match="ends at 24, but there are 40 tokens"):
        ours(**{**batch, "attention_mask": None})
    wrong = batch["attention_mask"].clone()
    wrong[0, 30] = 1
    with pytest.raises(ValueError, match="1 in the sequences and 0 behind them"):
        ours(**{**batch, "attention_mask": wrong})
    ours.config._attn_implementation = "flash_attention_2"
    with pytest.raises(NotImplementedError, match="reads one of the two"):
        ours(**batch, unknown_keyword=1)
