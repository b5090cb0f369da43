"""DeBERTa-v2/v3 against transformers on the same weights: outputs, gradients, dropout, memory.

The oracle is transformers in float64; our error may be twice that of transformers in the dtype
under test (fastbert.testing.compare).
"""

import functools

import pytest
import torch
import transformers

import fastbert
from fastbert.padding import pack
from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing.dropout import StreamDropout
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.memory import saved_bytes
from fastbert.testing.models import (
    DEBERTA_V2_HEADS,
    assert_packed,
    gradients,
    head_inputs,
    model_pair,
)
from fastbert.testing.parity import check_dropout_parity, check_parity

# Longer than the distances told apart, one token, shorter.
LENGTHS = (19, 1, 16, 5)
COUNTER = "deberta_v2_model"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _config(**overrides):
    size = {"num_hidden_layers": 3, "hidden_size": 48}
    return small_config("DebertaV2", **{**size, **NO_DROPOUT, **overrides})


def _batch(name, config, lengths=LENGTHS, side="right", seed=1):
    return head_inputs(name, padded_batch(lengths, config.vocab_size, side=side, seed=seed), config)


_check = functools.partial(check_parity, counter=COUNTER, ops=["disentangled_attention_fwd"])


@pytest.mark.parametrize("name", DEBERTA_V2_HEADS)
def test_heads_match_in_training(name):
    """A softmax over all positions reads padding, so that head runs transformers' forward."""
    config = _config()
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch(name, config), packed="Answering" not in name)


@pytest.mark.parametrize("name", ["DebertaV2Model", *DEBERTA_V2_HEADS])
def test_heads_match_in_eval_without_padding(name):
    config = _config()
    ours, theirs = model_pair(name, config)
    _check(ours, theirs, _batch(name, config, lengths=(19, 19)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["DebertaV2ForMaskedLM", "DebertaV2ForSequenceClassification"])
def test_half_precision(name, dtype):
    config = _config()
    ours, theirs = model_pair(name, config, dtype=dtype)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch(name, config))


def test_autocast():
    config = _config()
    ours, theirs = model_pair("DebertaV2ForMaskedLM", config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch("DebertaV2ForMaskedLM", config), autocast=torch.bfloat16)
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 1152,
            "num_hidden_layers": 2,
        },
        {"hidden_size": 60, "num_attention_heads": 3, "intermediate_size": 77},
        {"pos_att_type": ["c2p"]},
        {"pos_att_type": "p2c"},
        {"share_att_key": False},
        {"share_att_key": False, "pos_att_type": ["c2p"]},
        {"position_buckets": -1},
        {"position_buckets": -1, "max_relative_positions": -1},
        {"relative_attention": False},
        {"norm_rel_ebd": "none", "position_biased_input": True},
        {"type_vocab_size": 0, "legacy": False},
        {"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2},
        {"embedding_size": 24},
        {"hidden_act": "gelu_new"},
    ],
    ids=lambda overrides: "-".join(map(str, overrides)),
)
def test_configurations(overrides):
    config = _config(**overrides)
    ours, theirs = model_pair("DebertaV2ForMaskedLM", config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch("DebertaV2ForMaskedLM", config))


def test_distances_that_logarithms_cannot_tell_apart():
    """Fewer relative positions than half the buckets: transformers' own arithmetic."""
    config = _config(position_buckets=16, max_relative_positions=9)
    ours, theirs = model_pair("DebertaV2Model", config)
    _check(ours, theirs, _batch("DebertaV2Model", config, lengths=(7, 5)), packed=False)


@pytest.mark.parametrize(("side", "packed"), [("left", True), ("holes", False)])
def test_padding_elsewhere(side, packed):
    """Left padding keeps distances. Holes change them: transformers' forward."""
    config = _config()
    ours, theirs = model_pair("DebertaV2ForMaskedLM", config)
    _check(ours, theirs, _batch("DebertaV2ForMaskedLM", config, side=side), packed=packed)


@pytest.mark.parametrize("name", DEBERTA_V2_HEADS[1:])
def test_heads_that_read_padding(name):
    """Position 0 under left padding, a label on padding: transformers' forward, equal numbers."""
    config = _config()
    ours, theirs = model_pair(name, config)
    inputs = _batch(name, config, side="left")
    if "Token" in name:
        inputs["labels"][1, 0] = 2
    _check(ours, theirs, inputs, packed=False)


def test_hidden_states_and_tuples():
    config = _config()
    ours, theirs = model_pair("DebertaV2Model", config)
    inputs = _batch("DebertaV2Model", config)
    mask = inputs["attention_mask"] != 0
    with assert_packed(COUNTER):
        actual = ours(**inputs, output_hidden_states=True)
        last, states = ours(**inputs, output_hidden_states=True, return_dict=False)
    expected = theirs(**inputs, output_hidden_states=True)
    assert len(actual.hidden_states) == config.num_hidden_layers + 1
    for mine, other, theirs_state in zip(
        actual.hidden_states, states, expected.hidden_states, strict=True
    ):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine[mask], theirs_state[mask], rtol=0, atol=2e-5)
        assert not mine[~mask].any()
    assert torch.equal(last, actual.last_hidden_state)
    assert torch.equal(last, actual.hidden_states[-1])
    weights = ours(**inputs, output_attentions=True).attentions
    assert len(weights) == config.num_hidden_layers


def test_inputs_embeds_and_positions():
    config = _config(position_biased_input=True)
    ours, theirs = model_pair("DebertaV2ForMaskedLM", config)
    inputs = _batch("DebertaV2ForMaskedLM", config)
    embeds = theirs.deberta.embeddings.word_embeddings(inputs.pop("input_ids")).detach()
    positions = torch.arange(3, embeds.shape[1] + 3)[None]
    grads = []
    for model in (ours, theirs):
        leaf = embeds.clone().requires_grad_()
        model(inputs_embeds=leaf, position_ids=positions, **inputs).loss.backward()
        grads.append(leaf.grad)
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(grads[0][real], grads[1][real], rtol=1e-4, atol=1e-6)


def test_packed_input_is_each_text_alone():
    """`cu_seq_lens_q`, which reaches the model through a head too."""
    config = _config()
    ours, _ = model_pair("DebertaV2ForTokenClassification", config)
    texts = [torch.randint(3, 99, (1, n)) for n in (20, 7, 33)]
    starts = torch.tensor([0, 20, 27, 60], dtype=torch.int32)
    with torch.no_grad(), assert_packed(COUNTER):
        together = ours(torch.cat(texts, 1), cu_seq_lens_q=starts, max_length_q=33).logits
        alone = torch.cat([ours(text).logits for text in texts], 1)
    assert torch.equal(together, alone)
    with pytest.raises(NotImplementedError, match="packed input"):
        ours(torch.cat(texts, 1), cu_seq_lens_q=starts, output_attentions=True)


def test_packed_labels():
    """`pack` with label rows gives the loss of the padded batch."""
    config = _config()
    ours, _ = model_pair("DebertaV2ForMaskedLM", config)
    inputs = _batch("DebertaV2ForMaskedLM", config)
    del inputs["token_type_ids"]
    features = [
        {"input_ids": ids[:length].tolist(), "labels": labels[:length].tolist()}
        for ids, labels, length in zip(inputs["input_ids"], inputs["labels"], LENGTHS, strict=True)
    ]
    packed = pack(features, num_tokens=60, num_sequences=6, num_labels=40)
    with assert_packed(COUNTER):
        loss = ours(**packed).loss
    torch.testing.assert_close(loss, ours(**inputs).loss, rtol=1e-5, atol=1e-6)


def test_accelerate_auto_and_checkpoints_both_ways(tmp_path):
    config = _config()
    theirs = transformers.DebertaV2ForMaskedLM(config).eval()
    inputs = _batch("DebertaV2ForMaskedLM", config)
    expected = theirs(**inputs)
    theirs.save_pretrained(tmp_path)
    loaded = fastbert.DebertaV2ForMaskedLM.from_pretrained(tmp_path).eval()
    assert fastbert.accelerate(theirs) is theirs
    assert type(theirs) is fastbert.DebertaV2ForMaskedLM
    for model in (theirs, loaded):
        with assert_packed(COUNTER):
            actual = model(**inputs)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.DebertaV2ForMaskedLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(**inputs).loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_kept_weights_follow_the_parameters():
    """What inference keeps of the relative positions is dropped when their embeddings change."""
    config = _config()
    ours, theirs = model_pair("DebertaV2Model", config)
    inputs = _batch("DebertaV2Model", config)
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        for _ in range(2):
            actual = ours(**inputs).last_hidden_state
            expected = theirs(**inputs).last_hidden_state
            torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=2e-5)
            for model in (ours, theirs):
                model.encoder.rel_embeddings.weight.mul_(-1.5)
                model.encoder.layer[0].attention.self.key_proj.weight.mul_(2)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_where_transformers_has_it(checkpointed):
    """transformers' own model with our masks in place of its dropouts: equal loss and gradients.

    On a batch without padding a packed row is a padded row, so the masks fit both.
    """
    p, size, length = 0.25, 3, 19
    config = _config(hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    ours, theirs = model_pair("DebertaV2ForMaskedLM", config)
    ours.train(), theirs.train()
    if checkpointed:
        ours.gradient_checkpointing_enable()
    inputs = _batch("DebertaV2ForMaskedLM", config, lengths=(length,) * size)
    rng_state = torch.tensor([99, 3])

    theirs.deberta.embeddings.dropout = StreamDropout(rng_state, [SITE_EMBEDDING], p)
    for index, layer in enumerate(theirs.deberta.encoder.layer):
        layer.attention.self.pos_dropout = StreamDropout(rng_state, [8 * index + 4], p)
        layer.attention.output.dropout = StreamDropout(rng_state, [8 * index + 1], p)
        layer.output.dropout = StreamDropout(rng_state, [8 * index + 2], p)
    check_dropout_parity(ours, theirs, inputs, rng_state, counter=COUNTER)


def test_memory_grows_with_the_length():
    """What a training forward keeps: four times the tokens, four times the bytes and the position
    tables; transformers' scores grow with the square."""
    config = _config(num_hidden_layers=2, max_position_embeddings=4096)
    ours, _ = model_pair("DebertaV2Model", config)
    sizes = []
    for length in (512, 2048):
        ids = torch.randint(3, 99, (1, length))
        sizes.append(saved_bytes(lambda ids=ids: ours(ids), ours.parameters()))
    assert sizes[1] <= 4.01 * sizes[0]


def test_compile_fullgraph():
    config = _config(num_hidden_layers=1)
    ours, theirs = model_pair("DebertaV2ForMaskedLM", config)
    compiled = torch.compile(ours.train(), fullgraph=True, backend="aot_eager")
    inputs = _batch("DebertaV2ForMaskedLM", config, lengths=(9, 9))
    del inputs["attention_mask"]
    results = []
    for model in (compiled, theirs.train()):
        loss = model(**inputs).loss
        loss.backward()
        results.append(loss)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(theirs).items():
        mine = ours.get_parameter(name).grad
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_inference_is_batch_invariant():
    """A text's bits are the same alone and in a batch."""
    config = _config()
    ours, _ = model_pair("DebertaV2ForMaskedLM", config)
    inputs = padded_batch(LENGTHS, config.vocab_size, seed=4)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), assert_packed(COUNTER):
        together = ours(ids, attention_mask=mask).logits
        for row, length in enumerate(LENGTHS):
            alone = ours(ids[row : row + 1, :length]).logits
            assert torch.equal(alone[0], together[row, :length])
