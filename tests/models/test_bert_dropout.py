"""Dropout on: one stream for every path, and what it costs in memory."""

import copy

import pytest
import torch

from fastbert import use_backend
from fastbert.dispatch import OPS, not_supported_reasons
from fastbert.reference.philox import SITE_EMBEDDING
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran
from fastbert.testing.dropout import StreamDropout
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.memory import saved_bytes
from fastbert.testing.models import assert_packed, gradients, head_inputs, model_pair
from fastbert.testing.parity import check_dropout_parity

LENGTHS = (9, 1, 16, 5)


def _step(model, inputs, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs.loss.detach(), gradients(model)


def _batch(config, side="right"):
    batch = padded_batch(LENGTHS, config.vocab_size, side=side, seed=1)
    return head_inputs("BertForMaskedLM", batch, config)


def _backends():
    device = torch.device("cpu")
    return [
        name
        for name in ("reference", "cpu", "triton")
        if not not_supported_reasons(OPS["row_keep_mask"], name, device, ())
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_is_the_same_in_every_backend(dtype):
    config = small_bert_config()
    model, _ = model_pair("BertForMaskedLM", config, dtype=dtype)
    model.train()
    inputs = _batch(config)
    results = []
    for backend in _backends():
        # Kernels make their masks as they go.
        op = "row_keep_mask" if backend == "reference" else "add_layer_norm_fwd"
        with use_backend(backend), assert_ran(op, backend):
            loss, grads = _step(model, inputs)
            results.append((loss, {k: v.clone() for k, v in grads.items()}))
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=tolerance, atol=tolerance)
        for name, gradient in grads.items():
            scale = results[0][1][name].abs().max().item()
            torch.testing.assert_close(
                gradient, results[0][1][name], rtol=0, atol=tolerance * max(scale, 1.0), msg=name
            )


def test_dropout_is_where_transformers_has_it():
    """transformers' own model with our masks in place of its dropouts: equal loss and gradients.

    On a batch without padding a packed row is a padded row, so the masks fit both.
    """
    p = 0.25
    config = small_bert_config(hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    ours, theirs = model_pair("BertForMaskedLM", config)
    ours.train(), theirs.train()
    batch = padded_batch((8, 8, 8), config.vocab_size, seed=2)
    inputs = head_inputs("BertForMaskedLM", batch, config)
    rng_state = torch.tensor([99, 3])
    theirs.bert.embeddings.dropout = StreamDropout(rng_state, [SITE_EMBEDDING], p)
    for index, layer in enumerate(theirs.bert.encoder.layer):
        layer.attention.output.dropout = StreamDropout(rng_state, [8 * index + 1], p)
        layer.output.dropout = StreamDropout(rng_state, [8 * index + 2], p)
    check_dropout_parity(ours, theirs, inputs, rng_state)


def test_dropout_follows_the_generator():
    """One draw a forward, from torch's generator; nothing is drawn without dropout."""
    config = small_bert_config()
    model, _ = model_pair("BertForMaskedLM", config)
    inputs = _batch(config)
    model.train()
    first, again, other = (_step(model, inputs, seed)[0] for seed in (7, 7, 8))
    assert_bitwise_equal(first, again, "loss")
    assert first != other
    torch.manual_seed(7)
    expected = torch.empty(2, dtype=torch.int64).random_()
    after = torch.get_rng_state()
    torch.manual_seed(7)
    model(**inputs)
    assert torch.equal(torch.get_rng_state(), after)
    given = model(**inputs, rng_state=expected).loss.detach()
    assert_bitwise_equal(given, first, "loss with the state passed in")
    before = torch.get_rng_state()
    model.eval()(**inputs)
    off = small_bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model_off, _ = model_pair("BertForMaskedLM", off)
    torch.set_rng_state(before)
    model_off.train()(**inputs)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_gradient_checkpointing(reentrant):
    config = small_bert_config(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    model, _ = model_pair("BertForMaskedLM", config)
    model.train()
    inputs = _batch(config)
    loss, grads = _step(model, inputs)
    grads = {k: v.clone() for k, v in grads.items()}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with assert_packed():
        loss_again, grads_again = _step(model, inputs)
    assert_bitwise_equal(loss_again, loss, "loss")
    for name, gradient in grads.items():
        assert_bitwise_equal(grads_again[name], gradient, name)


def test_dropout_obeys_each_module():
    """A module's own p and training flag count, not the configuration's."""
    config = small_bert_config(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    model, theirs = model_pair("BertForMaskedLM", config)
    inputs = _batch(config)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in model.bert.encoder.layer:
        layer.attention.self.eval()
    with assert_packed():
        loss = model(**inputs).loss
    torch.testing.assert_close(loss, theirs(**inputs).loss, rtol=1e-5, atol=1e-5)


def test_dropout_of_a_shared_layer_differs_at_each_place():
    """One layer used three times (as in ALBERT): its place decides the masks, not the module."""
    config = small_bert_config(hidden_dropout_prob=0.5)
    model, _ = model_pair("BertModel", config)
    layer = model.encoder.layer[0]
    model.encoder.layer = torch.nn.ModuleList([layer] * 3)
    seen = []
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["index"]), with_kwargs=True
    )
    model.train()(torch.randint(5, 99, (2, 9)))
    assert seen == [0, 1, 2]


def test_dropout_modules_alone_in_training():
    """Monte-Carlo dropout: the model in eval, its dropout modules in training."""
    config = small_bert_config()
    model, _ = model_pair("BertModel", config)
    inputs = head_inputs("BertModel", padded_batch(LENGTHS, 99, seed=1), config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    with torch.no_grad(), assert_packed():
        first, second = (model(**inputs).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)


def test_dropout_of_everything():
    config = small_bert_config(hidden_dropout_prob=1.0, attention_probs_dropout_prob=1.0)
    model, _ = model_pair("BertForMaskedLM", config)
    model.train()
    loss, grads = _step(model, _batch(config))
    assert loss.isfinite()
    assert not grads["bert.embeddings.word_embeddings.weight"].isnan().any()
    assert not grads["bert.encoder.layer.0.attention.self.query.weight"].any()


def test_training_is_deterministic():
    config = small_bert_config()
    runs = []
    for _ in range(2):
        model, _ = model_pair("BertForMaskedLM", config)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            _step(model, _batch(config), seed=step)
            optimizer.step()
        runs.append(copy.deepcopy(model.state_dict()))
    for name, value in runs[0].items():
        assert_bitwise_equal(value, runs[1][name], name)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_saved_for_backward(autocast, capsys):
    """At most 8·hidden + intermediate elements a token and layer, and fp32 statistics.

    Measured as a slope over tokens and layers, so parameters and their casts drop out. Under
    autocast elements are bf16 and the residual stream may be fp32: 4·hidden more.
    """
    hidden, inner, heads, length = 64, 256, 4, 32
    sizes = {}
    for name in ("fastbert", "transformers"):
        for layers in (1, 3):
            for rows in (4, 8):
                config = small_bert_config(
                    hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers
                )
                ours, theirs = model_pair("BertModel", config, add_pooling_layer=False)
                model = (ours if name == "fastbert" else theirs).train()
                ids = torch.randint(5, 99, (rows, length))

                def forward(model=model, ids=ids):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        return model(ids).last_hidden_state

                sizes[name, layers, rows] = saved_bytes(forward, model.parameters())
    per_token = {
        name: ((sizes[name, 3, 8] - sizes[name, 3, 4]) - (sizes[name, 1, 8] - sizes[name, 1, 4]))
        / (2 * 4 * length)
        for name in ("fastbert", "transformers")
    }
    with capsys.disabled():
        print(f"\nsaved bytes a token and layer, autocast {autocast}: {per_token}")
    statistics = 4 * (heads + 2 * 2)
    element = 2 if autocast else 4
    extra = 4 * hidden if autocast else 0
    assert per_token["fastbert"] <= element * (8 * hidden + inner + extra) + statistics
    assert per_token["fastbert"] < per_token["transformers"]
