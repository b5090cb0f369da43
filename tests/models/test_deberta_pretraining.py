"""DeBERTa's enhanced mask decoder and its discriminator against transformers' modules in float64.

The oracle of the decoder calls transformers' layers as the paper has them
(`fastbert.testing.deberta`), that of the discriminator transformers' model.
"""

import copy

import pytest
import torch
import transformers
from torch import nn

import fastbert
from fastbert.models.deberta_pretraining import PlainDebertaDetection, PlainDebertaV2Detection
from fastbert.padding import pack
from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran
from fastbert.testing.deberta import DecodingDeberta, DecodingDebertaV2
from fastbert.testing.dropout import StreamDropout
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import assert_packed, gradients, lively_
from fastbert.testing.parity import check_dropout_parity, check_parity

LENGTHS = (19, 1, 16, 5)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
COUNTERS = {"DebertaV2": "deberta_v2_model", "Deberta": "deberta_model"}
OPS = ("disentangled_attention_fwd", "disentangled_attention_bwd")


ORACLES = {"DebertaV2": DecodingDebertaV2, "Deberta": DecodingDeberta}
PLAIN = {"DebertaV2": PlainDebertaV2Detection, "Deberta": PlainDebertaDetection}


def _config(family="DebertaV2", **overrides):
    size = {"num_hidden_layers": 3, "hidden_size": 48}
    return small_config(family, **{**size, **NO_DROPOUT, **overrides})


def _generators(config, dtype=torch.float32):
    """Ours, and the oracle's, with the same weights; both in training."""
    family = type(config).__name__.removesuffix("Config")
    return _pair(f"{family}ForEnhancedMaskedLM", ORACLES[family], config, dtype)


def _discriminators(config, dtype=torch.float32):
    family = type(config).__name__.removesuffix("Config")
    return _pair(f"{family}ForPreTraining", PLAIN[family], config, dtype)


def _pair(name, oracle, config, dtype):
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    theirs = oracle(copy.deepcopy(config))
    lively_(theirs, 1)
    ours = getattr(fastbert, name)(copy.deepcopy(config))
    ours.load_state_dict(theirs.state_dict())
    return ours.to(dtype).train(), theirs.to(dtype).train()


def _batch(lengths=LENGTHS, side="right"):
    """With labels of masked tokens."""
    inputs = padded_batch(lengths, 99, side=side, seed=1)
    chosen = torch.rand(inputs["input_ids"].shape, generator=torch.Generator().manual_seed(2)) < 0.4
    chosen &= inputs["attention_mask"] != 0
    chosen[0, 0] = True
    inputs["labels"] = inputs["input_ids"].masked_fill(~chosen, -100)
    return inputs


def _detection_batch(lengths=LENGTHS, side="right"):
    inputs = padded_batch(lengths, 99, side=side, seed=1)
    shape = inputs["input_ids"].shape
    inputs["labels"] = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3))
    return inputs


# --- generator ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("DebertaV2", {}),
        ("DebertaV2", {"legacy": False, "type_vocab_size": 0}),
        ("DebertaV2", {"embedding_size": 24, "share_att_key": False}),
        ("DebertaV2", {"num_hidden_layers": 1}),
        ("DebertaV2", {"conv_kernel_size": 3, "conv_act": "gelu"}),
        ("DebertaV2", {"relative_attention": False}),
        ("Deberta", {}),
    ],
    ids=str,
)
def test_decoder_matches_the_paper(family, overrides):
    """Logits, loss and every gradient of ragged texts, those of absolute positions among them."""
    config = _config(family, **overrides)
    ours, theirs = _generators(config)
    inputs = _batch()
    check_parity(ours, theirs, inputs, counter=COUNTERS[family], ops=OPS[:1])
    # Keys and values are without positions, so those of labels alone are learned.
    reached = ours.deberta.embeddings.position_embeddings.weight.grad.any(1)
    assert torch.equal(reached[: max(LENGTHS)], (inputs["labels"] != -100).any(0))


def test_decoder_runs_the_kernels():
    """A call of the attention for each layer below the last, and two."""
    ours, _ = _generators(_config())
    before = fastbert.dispatch.counters()
    with assert_packed(COUNTERS["DebertaV2"]):
        ours(**_batch()).loss.backward()
    made = fastbert.dispatch.counters() - before
    for op in OPS:
        assert made[op, "cpu"] == 4, op


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoder_in_half_precision(dtype):
    ours, theirs = _generators(_config(), dtype)
    check_parity(ours, theirs, _batch(), counter=COUNTERS["DebertaV2"])


@pytest.mark.parametrize("overrides", [{}, {"embedding_size": 24}], ids=str)
def test_decoder_under_autocast(overrides):
    ours, theirs = _generators(_config(**overrides))
    check_parity(ours, theirs, _batch(), counter=COUNTERS["DebertaV2"], autocast=torch.bfloat16)
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["DebertaV2", "Deberta"])
def test_dropout_of_the_decoder(family, checkpointed):
    """Every run drops elements of its own: the oracle under our masks."""
    p, size, length = 0.25, 3, 19
    config = _config(family, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    if family == "DebertaV2":
        config.embedding_size = 24
    ours, theirs = _generators(config)
    if checkpointed:
        ours.gradient_checkpointing_enable()
    inputs = _batch((length,) * size)
    state = torch.tensor([99, 3])
    theirs.deberta.embeddings.dropout = StreamDropout(state, [SITE_EMBEDDING], p)
    layers = theirs.deberta.encoder.layer
    for index, layer in enumerate(layers):
        runs = [index] if index < len(layers) - 1 else [index, index + 1]
        layer.attention.self.pos_dropout = StreamDropout(state, [8 * r + 4 for r in runs], p)
        layer.attention.output.dropout = StreamDropout(state, [8 * r + 1 for r in runs], p)
        layer.output.dropout = StreamDropout(state, [8 * r + 2 for r in runs], p)
    theirs.config.num_hidden_layers += 1
    check_dropout_parity(ours, theirs, inputs, state, counter=COUNTERS[family])


@pytest.mark.parametrize("family", ["DebertaV2", "Deberta"])
def test_decoder_of_some_rows(family):
    """The labelled rows alone: the same loss and gradients, and 0 elsewhere."""
    ours, _ = _generators(_config(family))
    inputs = _batch()
    features = [
        {"input_ids": ids[:n].tolist(), "labels": labels[:n].tolist()}
        for ids, labels, n in zip(inputs["input_ids"], inputs["labels"], LENGTHS, strict=True)
    ]
    packed = pack(features, num_tokens=60, num_sequences=6, num_labels=40)
    results = []
    for rows in (None, packed["label_rows"].sort().values):
        ours.zero_grad()
        loss = ours(**packed, last_layer_rows=rows).loss
        loss.backward()
        results.append((loss, {k: v.clone() for k, v in gradients(ours).items() if v is not None}))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    rows = torch.tensor([0, 3, 21])
    del packed["labels"], packed["label_rows"]
    states = ours.deberta(**packed, last_layer_rows=rows).last_hidden_state[0]
    assert states.any(1).nonzero().flatten().tolist() == rows.tolist()
    with pytest.raises(ValueError, match="last_layer_rows must rise"):
        ours.deberta(**packed, last_layer_rows=rows.flip(0))


def test_decoder_is_left_out_by_transformers(tmp_path):
    """The folder is a masked-LM model there and here, and its decoder is read again here."""
    ours, _ = _generators(_config())
    ours.eval().save_pretrained(tmp_path)
    inputs = _batch()
    with torch.no_grad():
        again = fastbert.DebertaV2ForEnhancedMaskedLM.from_pretrained(tmp_path).eval()
        assert_bitwise_equal(again(**inputs).logits, ours(**inputs).logits, "logits")
        kinds = (transformers.AutoModelForMaskedLM, fastbert.DebertaV2ForMaskedLM)
        without = [kind.from_pretrained(tmp_path).eval() for kind in kinds]
        logits = [model(**inputs).logits for model in without]
    assert type(without[0]) is transformers.DebertaV2ForMaskedLM
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(logits[1][real], logits[0][real], rtol=0, atol=2e-5)
    assert not torch.allclose(logits[1][real], ours(**inputs).logits[real], atol=1e-2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"position_biased_input": True}, "config.position_biased_input is True"),
        ({"num_hidden_layers": 1, "conv_kernel_size": 3}, "config.num_hidden_layers is 1"),
    ],
)
def test_configurations_without_a_decoder(overrides, message):
    with pytest.raises(ValueError, match=message):
        fastbert.DebertaV2ForEnhancedMaskedLM(_config(**overrides))


@pytest.mark.parametrize("asked", [{"output_attentions": True}, {"attention_mask": "holes"}])
def test_decoder_of_what_cannot_be_packed(asked):
    """No other numbers in its place."""
    ours, _ = _generators(_config())
    inputs = _batch(side=asked.pop("attention_mask", "right")) | asked
    with pytest.raises(NotImplementedError, match="enhanced mask decoder runs on packed rows"):
        ours(**inputs)


def test_positions_beyond_the_table():
    ours, _ = _generators(_config(max_position_embeddings=12))
    with pytest.raises(ValueError, match="position_ids holds 12 at"):
        ours(**_batch())


# --- discriminator --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["DebertaV2", "Deberta"])
@pytest.mark.parametrize(("side", "packed"), [("right", True), ("left", True), ("holes", False)])
def test_discriminator_matches(family, side, packed):
    ours, theirs = _discriminators(_config(family))
    with assert_ran("linear_gelu_fwd"):
        ours(**_detection_batch())
    inputs = _detection_batch(side=side)
    check_parity(ours, theirs, inputs, counter=COUNTERS[family], ops=OPS[:1], packed=packed)


@pytest.mark.parametrize("overrides", [{"hidden_act": "relu"}, {"hidden_act": "gelu_new"}], ids=str)
def test_discriminator_of_another_activation(overrides):
    ours, theirs = _discriminators(_config(**overrides))
    check_parity(ours, theirs, _detection_batch(), counter=COUNTERS["DebertaV2"])


def test_discriminator_under_autocast():
    ours, theirs = _discriminators(_config())
    inputs = _detection_batch()
    check_parity(ours, theirs, inputs, counter=COUNTERS["DebertaV2"], autocast=torch.bfloat16)


def test_discriminator_on_packed_rows():
    """Texts end to end, with empty ones and idle rows behind them: the loss of the padded batch."""
    ours, _ = _discriminators(_config())
    inputs = _detection_batch()
    real = inputs["attention_mask"] != 0
    expected = ours(**inputs)
    filled = {k: nn.functional.pad(v[real], (0, 4))[None] for k, v in inputs.items()}
    count = int(real.sum())
    starts = torch.tensor([0, *LENGTHS, 0, 0]).cumsum(0)
    with assert_packed(COUNTERS["DebertaV2"]):
        actual = ours(**filled, cu_seq_lens_q=starts)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.logits[0, :count], expected.logits[real], rtol=0, atol=1e-5)
    assert not actual.logits[0, count:].any() and not expected.logits[~real].any()


def test_discriminator_loads_in_transformers(tmp_path):
    ours, theirs = _discriminators(_config())
    ours.eval().save_pretrained(tmp_path)
    inputs = _detection_batch()
    labels = inputs.pop("labels")
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()
    assert type(model) is transformers.DebertaV2Model
    again = fastbert.DebertaV2ForPreTraining.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
        expected = theirs.deberta.eval()(**inputs).last_hidden_state
        assert_bitwise_equal(states, expected, "last_hidden_state")
        assert_bitwise_equal(again(**inputs).logits, ours(**inputs).logits, "logits")
        tuples = ours(**inputs, labels=labels, return_dict=False)
    assert_bitwise_equal(tuples[0], again(**inputs, labels=labels).loss, "loss")
    classifier = transformers.DebertaV2ForSequenceClassification.from_pretrained(tmp_path)
    layers = zip(classifier.deberta.parameters(), ours.deberta.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in layers)


def test_discriminator_is_exported():
    """The plain forward in its place."""
    ours, _ = _discriminators(_config(num_hidden_layers=1))
    inputs = _detection_batch((9, 9))
    del inputs["labels"]
    exported = torch.export.export(ours.eval(), (), inputs, strict=False).module()
    with torch.no_grad():
        actual, expected = exported(**inputs).logits, ours(**inputs).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_generators, _discriminators])
def test_compile_fullgraph(make):
    ours, theirs = make(_config(num_hidden_layers=1))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    inputs = padded_batch((9, 9), 99, seed=1)
    del inputs["attention_mask"]
    labels = inputs["input_ids"] if make is _generators else inputs["input_ids"] % 2
    losses = [model(**inputs, labels=labels).loss for model in (compiled, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for name, gradient in gradients(theirs).items():
        mine = ours.get_parameter(name).grad
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5, msg=name)
