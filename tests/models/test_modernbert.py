"""ModernBERT against transformers on the same weights: outputs, gradients, dropout, memory.

The oracle is transformers in float64; our error may be twice that of transformers in the dtype
under test (fastbert.testing.compare). Both by sdpa: eager softmaxes in fp32, where float64's masks
are infinite, and gives padding beyond every window the mean of all keys, padding among them.
"""

import functools

import pytest
import torch
import transformers

import fastbert
from fastbert.padding import pack
from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing import models
from fastbert.testing.dropout import StreamDropout
from fastbert.testing.inputs import padded_batch, small_modernbert_config
from fastbert.testing.memory import saved_bytes
from fastbert.testing.models import MODERNBERT_HEADS, assert_packed, gradients, head_inputs
from fastbert.testing.parity import check_dropout_parity, check_parity

# Longer than the window reaches, one token, shorter.
LENGTHS = (19, 1, 16, 5)
COUNTER = "modernbert_model"

model_pair = functools.partial(models.model_pair, attention="sdpa")


def _batch(name, config, lengths=LENGTHS, side="right", seed=1):
    return head_inputs(name, padded_batch(lengths, config.vocab_size, side=side, seed=seed), config)


_check = functools.partial(check_parity, counter=COUNTER, ops=("rotary", "geglu_fwd"))


@pytest.mark.parametrize("name", MODERNBERT_HEADS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_heads_match_in_training(name, pooling):
    if pooling == "mean" and "Classification" not in name and "Choice" not in name:
        pytest.skip("the head does not pool")
    config = small_modernbert_config(classifier_pooling=pooling)
    ours, theirs = model_pair(name, config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch(name, config))


@pytest.mark.parametrize("name", ["ModernBertModel", *MODERNBERT_HEADS])
def test_heads_match_in_eval_without_padding(name):
    config = small_modernbert_config()
    ours, theirs = model_pair(name, config)
    _check(ours, theirs, _batch(name, config, lengths=(19, 19)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["ModernBertForMaskedLM", "ModernBertForSequenceClassification"])
def test_half_precision(name, dtype):
    config = small_modernbert_config()
    ours, theirs = model_pair(name, config, dtype=dtype)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch(name, config))


def test_autocast():
    config = small_modernbert_config()
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    ours.train(), theirs.train()
    _check(ours, theirs, _batch("ModernBertForMaskedLM", config), autocast=torch.bfloat16)
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
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
        {"hidden_activation": "gelu_pytorch_tanh", "decoder_bias": False},
        {"hidden_activation": "silu", "classifier_activation": "relu"},
        {"layer_types": ["sliding_attention"] * 4, "local_attention": 3},
        {"global_rope_theta": 500.0, "local_rope_theta": 50.0},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ],
    ids=["base", "odd", "biases", "tanh", "silu", "local", "theta", "linear rope"],
)
def test_configurations(overrides, request):
    config = small_modernbert_config(**overrides)
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    ours.train(), theirs.train()
    inputs = _batch("ModernBertForMaskedLM", config)
    if "silu" in request.node.name:
        with assert_packed(COUNTER):
            actual, expected = ours(**inputs), theirs(**inputs)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
        return
    _check(ours, theirs, inputs)


@pytest.mark.parametrize("side", ["left", "holes"])
@pytest.mark.parametrize("reach", [4, 32])
def test_padding_elsewhere(side, reach):
    """Left padding keeps distances. Holes change them, and a window counts padded positions: those
    batches run transformers' forward, unless the window is wider than the batch."""
    config = small_modernbert_config(local_attention=2 * reach)
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    inputs = _batch("ModernBertForMaskedLM", config, side=side)
    _check(ours, theirs, inputs, packed=side == "left" or reach == 32)


def test_labels_on_padding_count():
    """As in transformers; beyond a window their rows are no neighbours of the text."""
    config = small_modernbert_config(local_attention=64)
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    inputs = _batch("ModernBertForMaskedLM", config)
    inputs["labels"][1, 7] = 5
    _check(ours, theirs, inputs)


def test_position_ids_are_used_as_given():
    config = small_modernbert_config()
    ours, theirs = model_pair("ModernBertModel", config)
    inputs = _batch("ModernBertModel", config)
    shape = inputs["input_ids"].shape
    for positions in (torch.randint(0, 9000, shape), torch.arange(3, shape[1] + 3)[None]):
        _check(ours, theirs, {**inputs, "position_ids": positions})


def test_inputs_embeds():
    config = small_modernbert_config()
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    inputs = _batch("ModernBertForMaskedLM", config)
    embeds = theirs.model.embeddings.tok_embeddings(inputs.pop("input_ids")).detach()
    grads = []
    for model in (ours, theirs):
        leaf = embeds.clone().requires_grad_()
        model(inputs_embeds=leaf, **inputs).loss.backward()
        grads.append(leaf.grad)
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(grads[0][real], grads[1][real], rtol=1e-4, atol=1e-6)


def test_packed_input_is_each_text_alone():
    """`cu_seq_lens_q`: texts of one row do not see each other, and positions restart."""
    config = small_modernbert_config()
    ours, _ = model_pair("ModernBertModel", config)
    texts = [torch.randint(3, 99, (1, n)) for n in (20, 7, 33)]
    starts = torch.tensor([0, 20, 27, 60], dtype=torch.int32)
    options = {"cu_seq_lens_q": starts, "max_length_q": 33}
    with torch.no_grad(), assert_packed(COUNTER):
        together = ours(torch.cat(texts, 1), **options).last_hidden_state
        alone = torch.cat([ours(text).last_hidden_state for text in texts], 1)
    assert torch.equal(together, alone)
    with torch.no_grad():
        weights = ours(torch.cat(texts, 1), **options, output_attentions=True)
    torch.testing.assert_close(weights.last_hidden_state, alone, rtol=0, atol=1e-4)
    assert len(weights.attentions) == config.num_hidden_layers


def test_sparse_prediction():
    config = small_modernbert_config(sparse_prediction=True)
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    for training in (True, False):
        for model in (ours, theirs):
            model.train(training).zero_grad()
        inputs = _batch("ModernBertForMaskedLM", config)
        actual, expected = ours(**inputs), theirs(**inputs)
        assert actual.logits.shape == expected.logits.shape
        torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_accelerate_and_checkpoints_both_ways(tmp_path):
    config = small_modernbert_config()
    theirs = transformers.ModernBertForMaskedLM(config).eval()
    inputs = _batch("ModernBertForMaskedLM", config)
    expected = theirs(**inputs)
    theirs.save_pretrained(tmp_path)
    loaded = fastbert.ModernBertForMaskedLM.from_pretrained(tmp_path).eval()
    assert fastbert.accelerate(theirs) is theirs
    assert type(theirs) is fastbert.ModernBertForMaskedLM
    for model in (theirs, loaded):
        with assert_packed(COUNTER):
            actual = model(**inputs)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = transformers.ModernBertForMaskedLM.from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(**inputs).loss, expected.loss, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_with_dropout():
    config = small_modernbert_config(mlp_dropout=0.2, attention_dropout=0.2, embedding_dropout=0.1)
    ours, _ = model_pair("ModernBertForMaskedLM", config)
    inputs = _batch("ModernBertForMaskedLM", config)
    ours.train()
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            ours.gradient_checkpointing_enable()
        ours.zero_grad()
        torch.manual_seed(3)
        with assert_packed(COUNTER):
            ours(**inputs).loss.backward()
        results.append({k: v.clone() for k, v in gradients(ours).items()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_dropout_is_where_transformers_has_it():
    """transformers' own model with our masks in place of its dropouts: equal loss and gradients.

    On a batch without padding a packed row is a padded row, so the masks fit both.
    """
    p, length = 0.25, 19
    config = small_modernbert_config(
        mlp_dropout=p, attention_dropout=p, embedding_dropout=p, hidden_activation="gelu"
    )
    ours, theirs = model_pair("ModernBertForMaskedLM", config, attention="eager")
    ours.train(), theirs.train()
    inputs = _batch("ModernBertForMaskedLM", config, lengths=(length,) * 3)
    rng_state = torch.tensor([99, 3])
    theirs.model.embeddings.drop = StreamDropout(rng_state, [SITE_EMBEDDING], p)
    for index, layer in enumerate(theirs.model.layers):
        layer.attn.out_drop = StreamDropout(rng_state, [8 * index + 1], p)
        layer.mlp.drop = StreamDropout(rng_state, [8 * index + 3], p)
    check_dropout_parity(ours, theirs, inputs, rng_state, counter=COUNTER)


def test_memory_grows_with_the_length():
    """What a training forward keeps: four times the tokens, four times the bytes; transformers'
    weights grow with the square."""
    config = small_modernbert_config(num_hidden_layers=2, max_position_embeddings=4096)
    ours, _ = model_pair("ModernBertModel", config)
    sizes = []
    for length in (512, 2048):
        ids = torch.randint(3, 99, (1, length))
        sizes.append(saved_bytes(lambda ids=ids: ours(ids), ours.parameters()))
    assert sizes[1] <= 4.01 * sizes[0]


@pytest.mark.parametrize(
    "lengths", [(5, 3), pytest.param(LENGTHS, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_compile_fullgraph(lengths):
    """Beyond the window a masked batch runs transformers' forward inside the graph."""
    config = small_modernbert_config(num_hidden_layers=1, layer_types=["sliding_attention"])
    ours, theirs = model_pair("ModernBertForMaskedLM", config)
    compiled = torch.compile(ours.train(), fullgraph=True, backend="aot_eager")
    inputs = _batch("ModernBertForMaskedLM", config, lengths=lengths)
    results = []
    for model in (compiled, theirs.train()):
        loss = model(**inputs).loss
        loss.backward()
        results.append(loss)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(theirs).items():
        mine = ours.get_parameter(name).grad
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_packed_labels_and_what_is_refused():
    """`pack` with label rows gives the loss of the padded batch; a pooling head refuses it."""
    config = small_modernbert_config()
    ours, _ = model_pair("ModernBertForMaskedLM", config)
    inputs = _batch("ModernBertForMaskedLM", config)
    features = [
        {"input_ids": ids[:length].tolist(), "labels": labels[:length].tolist()}
        for ids, labels, length in zip(inputs["input_ids"], inputs["labels"], LENGTHS, strict=True)
    ]
    packed = pack(features, num_tokens=60, num_sequences=6, num_labels=40)
    with assert_packed(COUNTER):
        loss = ours(**packed).loss
    torch.testing.assert_close(loss, ours(**inputs).loss, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="label_rows"):
        ours(**inputs, label_rows=packed["label_rows"])
    head, _ = model_pair("ModernBertForSequenceClassification", config)
    del packed["labels"], packed["label_rows"]
    with pytest.raises(NotImplementedError, match="pooled_rows"):
        head(**packed)
    with pytest.raises(ValueError, match="exactly one"):
        head(attention_mask=inputs["attention_mask"])


def test_inference_is_batch_invariant():
    """A text's bits are the same alone and in a batch, whether a window is narrower or not."""
    config = small_modernbert_config()
    ours, _ = model_pair("ModernBertForMaskedLM", config)
    inputs = padded_batch(LENGTHS, config.vocab_size, seed=4)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad(), assert_packed(COUNTER):
        together = ours(ids, attention_mask=mask).logits
        for row, length in enumerate(LENGTHS):
            alone = ours(ids[row : row + 1, :length]).logits
            assert torch.equal(alone[0], together[row, :length])
