"""RoBERTa and its kin, ELECTRA, DistilBERT and ALBERT against transformers on the same weights:
outputs, loss, gradients, dropout, inputs, checkpoints.

The oracle is transformers in float64; our error may be twice that of transformers in the dtype
under test (fastbert.testing.parity).
"""

import inspect

import pytest
import torch
import transformers

import fastbert
from fastbert import extension
from fastbert.dispatch import use_backend
from fastbert.padding import pack
from fastbert.reference.philox import (
    PLACE_ATTENTION_OUTPUT,
    PLACE_FFN_OUTPUT,
    SITE_EMBEDDING,
    layer_site,
)
from fastbert.testing.compare import assert_bitwise_equal
from fastbert.testing.counters import assert_ran
from fastbert.testing.dropout import StreamDropout
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import (
    FAMILIES,
    assert_packed,
    family_of,
    gradients,
    head_inputs,
    model_pair,
)
from fastbert.testing.parity import check_dropout_parity, check_parity

LENGTHS = (9, 1, 16, 5)
COUNTERS = {
    "Roberta": "roberta_model",
    "XLMRoberta": "xlm_roberta_model",
    "Camembert": "camembert_model",
    "Electra": "electra_model",
    "DistilBert": "distilbert_model",
    "Albert": "albert_model",
}
# What the others of a kind do not repeat.
LEADING = ("Roberta", "Electra", "DistilBert", "Albert")
HEADS = [family + task for family in COUNTERS for task in FAMILIES[family]]


def _pair(name, *, train=False, seed=0, **options):
    """Our model and transformers', without dropout, and the configuration."""
    overrides = options.pop("overrides", {})
    config = small_config(family_of(name), **overrides)
    pair = model_pair(name, config, seed=seed, **options)
    for model in pair:
        for module in model.train(train).modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return *pair, config


def _batch(name, config, lengths=LENGTHS, side="right", seed=1):
    batch = padded_batch(
        lengths, config.vocab_size, side=side, seed=seed, pad_token_id=config.pad_token_id
    )
    return head_inputs(name, batch, config)


def _check(ours, theirs, inputs, **options):
    name = type(theirs).__name__
    ops = ["embed_layer_norm_fwd", "attention_fwd", "add_layer_norm_fwd"]
    check_parity(ours, theirs, inputs, counter=COUNTERS[family_of(name)], ops=ops, **options)


@pytest.mark.parametrize("name", HEADS)
def test_heads_match_in_training(name):
    ours, theirs, config = _pair(name, train=True)
    _check(ours, theirs, _batch(name, config))


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("side", ["left", "holes"])
def test_padding_elsewhere(family, task, side):
    """Position 0 is read where it is padding too."""
    ours, theirs, config = _pair(family + task, train=True)
    _check(ours, theirs, _batch(family + task, config, side=side))


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM", "ForQuestionAnswering"])
def test_no_padding(family, task):
    ours, theirs, config = _pair(family + task)
    inputs = _batch(family + task, config, lengths=(16, 16))
    _check(ours, theirs, inputs)
    del inputs["attention_mask"]
    with assert_packed(COUNTERS[family]), torch.no_grad():
        actual, expected = ours(**inputs), theirs(**inputs)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_half_precision(family, task, how):
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    ours, theirs, config = _pair(family + task, train=True, dtype=dtype)
    autocast = torch.bfloat16 if how == "autocast" else None
    _check(ours, theirs, _batch(family + task, config), autocast=autocast)
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {dtype}


@pytest.mark.parametrize(
    "family",
    ["Roberta", "Albert", *(pytest.param(f, marks=pytest.mark.slow) for f in LEADING[1:3])],
)
def test_base_width(family):
    """The widths of the published base models, a layer of them."""
    wide = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1}
    wide |= {"hidden_dim": 3072} if family == "DistilBert" else {"intermediate_size": 3072}
    embeddings = {"Albert": {"embedding_size": 128}, "Electra": {"embedding_size": 768}}
    overrides = {**wide, **embeddings.get(family, {})}
    ours, theirs, config = _pair(f"{family}ForMaskedLM", train=True, overrides=overrides)
    _check(ours, theirs, _batch(f"{family}ForMaskedLM", config))


# --- dropout --------------------------------------------------------------------------------------


def _row_dropouts(family, model) -> list[tuple]:
    """Of each layer the places of its dropouts behind the attention and the feed-forward: module
    and attribute; None where the family has none."""
    if family == "DistilBert":
        return [(None, (layer.ffn, "dropout")) for layer in model.transformer.layer]
    if family == "Albert":
        (layer,) = model.encoder.albert_layer_groups[0].albert_layers
        return [((layer.attention, "output_dropout"), None)]
    layers = model.encoder.layer
    return [((layer.attention.output, "dropout"), (layer.output, "dropout")) for layer in layers]


@pytest.mark.parametrize("family", LEADING)
def test_dropout_is_where_transformers_has_it(family):
    """transformers' own model with our masks in place of its dropouts: equal loss and gradients."""
    p, name = 0.25, f"{family}ForMaskedLM"
    ours, theirs, config = _pair(name, train=True)
    for module in (*ours.modules(), *theirs.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = p
    inputs = _batch(name, config, lengths=(8, 8, 8))
    rng_state = torch.tensor([99, 3])
    theirs.base_model.embeddings.dropout = StreamDropout(rng_state, [SITE_EMBEDDING], p)
    num_layers = config.num_hidden_layers
    owners = _row_dropouts(family, theirs.base_model)
    for index, of_layer in enumerate(owners):
        # A shared layer's dropout is called at every place of the encoder.
        used_at = range(num_layers) if len(owners) == 1 else [index]
        for owner, place in zip(of_layer, (PLACE_ATTENTION_OUTPUT, PLACE_FFN_OUTPUT), strict=True):
            if owner is not None:
                sites = [layer_site(layer, place) for layer in used_at]
                setattr(*owner, StreamDropout(rng_state, sites, p))
    check_dropout_parity(ours, theirs, inputs, rng_state, counter=COUNTERS[family])


@pytest.mark.parametrize("family", LEADING)
def test_dropout_changes_the_loss_and_follows_the_generator(family):
    name = f"{family}ForSequenceClassification"
    config = small_config(family)
    ours, _ = model_pair(name, config)
    ours.train()
    inputs = _batch(name, config)
    losses = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        losses.append(ours(**inputs).loss.detach())
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["ForMaskedLM", "ForSequenceClassification"])
def test_inputs_embeds_and_their_gradient(family, task):
    ours, theirs, config = _pair(family + task, train=True)
    inputs = _batch(family + task, config)
    ids = inputs.pop("input_ids")
    embeds = theirs.get_input_embeddings()(ids).detach()
    grads = []
    for model in (ours, theirs):
        leaf = embeds.clone().requires_grad_()
        loss = model(inputs_embeds=leaf, **inputs).loss
        loss.backward()
        grads.append((loss, leaf.grad))
    real = inputs["attention_mask"] != 0
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[0][1][real], grads[1][1][real], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="exactly one"):
        ours(input_ids=ids, inputs_embeds=embeds)


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("rows", [1, 4])
def test_position_ids_are_used_as_given(family, rows):
    ours, theirs, config = _pair(f"{family}Model")
    inputs = _batch(f"{family}Model", config)
    positions = torch.randint(config.max_position_embeddings, (rows, max(LENGTHS)))
    _check(ours, theirs, {**inputs, "position_ids": positions})


@pytest.mark.parametrize("family", LEADING)
def test_ids_out_of_range_raise(family):
    ours, _, config = _pair(f"{family}Model")
    inputs = _batch(f"{family}Model", config)
    inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
    limits = {"input_ids": 99, "token_type_ids": 2, "position_ids": 64}
    for name in inputs.keys() & limits:
        wrong = inputs[name].clone()
        wrong[0, 1] = limits[name]
        with pytest.raises(ValueError, match=rf"{name} holds {limits[name]} at \(0, 1\)"):
            ours(**{**inputs, name: wrong})


@pytest.mark.parametrize("family", LEADING)
def test_packed_input_is_each_text_alone(family):
    """`cu_seq_lens_q`: texts of one row do not see each other, and positions restart; on packed
    rows, and on transformers' path too."""
    ours, theirs, config = _pair(f"{family}Model")
    texts = [torch.randint(1, 99, (1, n)) for n in (20, 7, 13)]
    texts[1][0, 3:5] = config.pad_token_id
    options = {"cu_seq_lens_q": torch.tensor([0, 20, 27, 40]), "max_length_q": 20}
    with torch.no_grad():
        alone = torch.cat([theirs(text).last_hidden_state for text in texts], 1)
        with assert_packed(COUNTERS[family]):
            together = ours(torch.cat(texts, 1), **options).last_hidden_state
        padded = ours(torch.cat(texts, 1), **options, output_attentions=True)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.last_hidden_state, alone, rtol=0, atol=1e-5)
    assert len(padded.attentions) == config.num_hidden_layers


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("on_packed_rows", [True, False])
def test_packed_batch_is_the_padded_one(family, on_packed_rows, monkeypatch):
    """`pack`, idle rows among it: labels of tokens and of sequences, with and without positions."""
    if not on_packed_rows:
        model_type = getattr(fastbert, f"{family}Model")
        monkeypatch.setattr(model_type, "why_not_packed", lambda *args: "the test says so")
    for task in ("ForMaskedLM", "ForSequenceClassification"):
        ours, _, config = _pair(family + task)
        inputs = _batch(family + task, config)
        # pack counts tokens; RoBERTa's own positions pass over padding ids inside a text.
        inside = (inputs["input_ids"] == config.pad_token_id) & (inputs["attention_mask"] != 0)
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inside, 5)
        columns = {k: v for k, v in inputs.items() if k != "attention_mask"}
        features = [
            {k: (v[i, :length] if v.dim() == 2 else v[i]).numpy() for k, v in columns.items()}
            for i, length in enumerate(LENGTHS)
        ]
        capacity = {"num_tokens": 40, "num_sequences": 6, "pad_token_id": config.pad_token_id}
        packed = pack(features, first_position=ours.base_model.first_position, **capacity)
        expected = ours(**inputs)
        for without in ("position_ids", None):
            batch = {k: v for k, v in packed.items() if k != without}
            actual = ours(**batch)
            torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
            if task == "ForSequenceClassification":
                logits = actual.logits[: len(LENGTHS)]
                torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LEADING)
@pytest.mark.parametrize("task", ["Model", "ForSequenceClassification"])
def test_hidden_states_and_containers(family, task):
    """Also where the head reads the first rows alone, and as tuples."""
    ours, theirs, config = _pair(family + task)
    inputs = _batch(family + task, config)
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        with assert_packed(COUNTERS[family]):
            actual = ours(**inputs, output_hidden_states=True)
        expected = theirs(**inputs, output_hidden_states=True)
        plain = ours(**inputs, return_dict=False), theirs(**inputs, return_dict=False)
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    assert len(actual.hidden_states) == len(expected.hidden_states)
    for mine, other in zip(actual.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[real], other[real], rtol=0, atol=1e-5)
        assert not mine[~real].any()
    assert len(plain[0]) == len(plain[1])
    for mine, other in zip(*plain, strict=True):
        if mine.shape[:2] == real.shape:
            mine, other = mine[real], other[real]
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", COUNTERS)
def test_signatures_are_transformers(family):
    """The order of arguments, which differs between the heads of one family."""
    for task in ("Model", *FAMILIES[family]):
        ours, theirs = getattr(fastbert, family + task), getattr(transformers, family + task)
        assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    name = f"{family}ForMultipleChoice"
    ours, theirs, config = _pair(name)
    inputs = _batch(name, config)
    order = [k for k in inspect.signature(theirs.forward).parameters if k in inputs]
    leading = [inputs[k] for k in order[:2]]
    with torch.no_grad():
        torch.testing.assert_close(
            ours(*leading).logits, theirs(*leading).logits, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("family", ["Roberta", "Electra", "DistilBert"])
def test_gradients_under_checkpointing(family):
    """transformers refuses it for ALBERT."""
    name = f"{family}ForMaskedLM"
    config = small_config(family)
    ours, _ = model_pair(name, config)
    ours.train()
    inputs = _batch(name, config)
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            ours.gradient_checkpointing_enable({"use_reentrant": False})
        ours.zero_grad()
        torch.manual_seed(3)
        with assert_packed(COUNTERS[family]):
            ours(**inputs).loss.backward()
        results.append({k: v.clone() for k, v in gradients(ours).items()})
    for name, gradient in results[0].items():
        assert torch.equal(results[1][name], gradient), name


# --- checkpoints and conversion -------------------------------------------------------------------


@pytest.mark.parametrize("family", COUNTERS)
def test_accelerate_and_checkpoints_both_ways(family, tmp_path):
    name = f"{family}ForMaskedLM"
    _, theirs, config = _pair(name)
    inputs = _batch(name, config)
    expected = theirs(**inputs)
    theirs.save_pretrained(tmp_path)
    loaded = getattr(fastbert, name).from_pretrained(tmp_path).eval()
    assert loaded.state_dict().keys() == theirs.state_dict().keys()
    assert fastbert.accelerate(theirs) is theirs
    assert type(theirs) is getattr(fastbert, name)
    for model in (theirs, loaded):
        with assert_packed(COUNTERS[family]):
            actual = model(**inputs)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
    loaded.save_pretrained(tmp_path / "again")
    again = getattr(transformers, name).from_pretrained(tmp_path / "again").eval()
    torch.testing.assert_close(again(**inputs).loss, expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [f + t for f in COUNTERS for t in ("Model", *FAMILIES[f])])
def test_accelerate_converts_every_class(name):
    config = small_config(family_of(name))
    config.num_labels = 2 if name.endswith("Answering") else 3
    model = getattr(transformers, name)(config)
    fastbert.accelerate(model)
    assert type(model) is getattr(fastbert, name)
    family = getattr(fastbert, f"{family_of(name)}Model")
    assert type(model.base_model) is family
    assert all(type(layer) is family.layer_type for layer in model.base_model.packed_layers())


@pytest.mark.skipif(not extension.cpu_isas(), reason="the one op is the C++ one; it is not built")
@pytest.mark.parametrize("family", LEADING)
def test_inference_runs_all_layers_by_one_op(family):
    ours, _, config = _pair(f"{family}Model")
    inputs = _batch(f"{family}Model", config)
    with torch.no_grad():
        with assert_ran("encoder_fwd", "cpu"):
            actual = ours(**inputs).last_hidden_state
        with use_backend(encoder="reference"):
            expected = ours(**inputs).last_hidden_state
    assert_bitwise_equal(actual, expected, family)


# --- compiled and traced --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "RobertaForMaskedLM",
        pytest.param("ElectraForPreTraining", marks=pytest.mark.slow),
        pytest.param("AlbertForSequenceClassification", marks=pytest.mark.slow),
    ],
)
def test_compile_fullgraph(name):
    ours, theirs, config = _pair(name, train=True, overrides={"num_hidden_layers": 1})
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    inputs = _batch(name, config)
    with assert_ran("embed_layer_norm_fwd"):
        actual = compiled(**inputs).loss
    expected = theirs(**inputs).loss
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    actual.backward()
    expected.backward()
    for key, gradient in gradients(theirs).items():
        mine = ours.get_parameter(key).grad
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize("family", LEADING)
def test_traced_keeps_the_mask(family):
    """Traced on a batch without padding, run on one with it."""
    name = f"{family}ForSequenceClassification"
    ours, theirs, config = _pair(name)
    inputs = _batch(name, config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = ours

        def forward(self, ids, mask):
            return self.model(ids, attention_mask=mask).logits

    with torch.no_grad():
        traced = torch.jit.trace(Logits(), (ids, torch.ones_like(mask)))
        expected = theirs(ids, attention_mask=mask).logits
        torch.testing.assert_close(traced(ids, mask), expected, rtol=0, atol=1e-5)
