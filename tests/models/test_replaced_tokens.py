"""A generator's and a discriminator's losses and gradients against transformers' models in float64,
and the law of the samples."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

import fastbert
from fastbert.models.deberta_pretraining import (
    EnhancedMaskDecoder,
    PlainDebertaDetection,
    PlainDebertaV2Detection,
)
from fastbert.models.replaced_tokens import (
    SECOND_STREAM,
    DisentangledEmbedding,
    ReplacedTokensModel,
    sampled,
)
from fastbert.padding import pack
from fastbert.reference.philox import sampling_words
from fastbert.testing.compare import assert_bitwise_equal, assert_close_to_oracle, compare_gradients
from fastbert.testing.counters import assert_ran
from fastbert.testing.deberta import DecodingDeberta, DecodingDebertaV2
from fastbert.testing.inputs import small_config
from fastbert.testing.models import assert_packed, gradients, lively_
from fastbert.train.building import checkpoint_activations

LENGTHS = (9, 14, 5)
FAMILIES = ("Electra", "DebertaV2", "Deberta")
COUNTERS = {
    "Electra": "electra_model",
    "DebertaV2": "deberta_v2_model",
    "Deberta": "deberta_model",
}
PLAIN = {
    "electra": (transformers.ElectraForMaskedLM, transformers.ElectraForPreTraining),
    "deberta-v2": (DecodingDebertaV2, PlainDebertaV2Detection),
    "deberta": (DecodingDeberta, PlainDebertaDetection),
}
LOSSES = ("loss", "mlm_loss", "detection_loss")
SHARING = ("shared", "disentangled", "separate")
STATE = torch.tensor([7, 3])


def _configs(family="Electra", dropout=0.0):
    """Of a generator whose embeddings are as wide as its layers, and of a discriminator."""
    probabilities = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    discriminator = small_config(family, embedding_size=24, **probabilities)
    generator = copy.deepcopy(discriminator)
    generator.hidden_size, generator.num_attention_heads = 24, 2
    generator.intermediate_size, generator.num_hidden_layers = 32, 2
    return generator, discriminator


def _model(embeddings="shared", dropout=0.0, family="Electra", **options) -> ReplacedTokensModel:
    torch.manual_seed(0)
    configs = _configs(family, dropout)
    model = ReplacedTokensModel(*configs, embeddings=embeddings, **options)
    lively_(model, 1)
    if embeddings == "disentangled":
        torch.nn.init.normal_(_words(model.discriminator).weight, std=0.1)
    return model.train()


def _words(model) -> torch.nn.Module:
    return model.get_input_embeddings()


def _batch(seed: int = 0) -> dict:
    """A packed batch with idle rows."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in LENGTHS:
        ids = torch.randint(5, 99, (length,), generator=generator)
        masked = torch.rand(length, generator=generator) < 0.4
        masked[0] = True
        sequences.append(
            {
                "input_ids": ids.masked_fill(masked, 4).tolist(),
                "labels": ids.masked_fill(~masked, -100).tolist(),
            }
        )
    return pack(sequences, num_tokens=40, num_sequences=5, num_labels=30)


def _plain(model, batch, corrupted_ids, dtype):
    """The losses and gradients, by transformers' models on one sequence after the other."""
    models = {}
    kinds = PLAIN[model.config.model_type]
    for name, ours, kind in zip(("generator", "discriminator"), model.parts, kinds, strict=True):
        theirs = kind(copy.deepcopy(ours.config))
        theirs.load_state_dict(ours.state_dict())
        words = _words(ours)
        if isinstance(words, DisentangledEmbedding):
            _words(theirs).weight.data = words.folded().weight.data
        models[name] = theirs.to(dtype).eval()
    hard, judged, start = [], [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        ids, labels = batch["input_ids"][:, rows], batch["labels"][:, rows]
        chosen = labels[0] != -100
        logits = models["generator"](input_ids=ids).logits[0]
        hard.append(F.cross_entropy(logits[chosen], labels[0][chosen], reduction="none"))
        seen = corrupted_ids[:, rows]
        wrong = (seen != torch.where(labels == -100, ids, labels)).to(dtype)
        logits = models["discriminator"](input_ids=seen).logits
        judged.append(F.binary_cross_entropy_with_logits(logits, wrong, reduction="none")[0])
        start += length
    mlm_loss, detection_loss = torch.cat(hard).mean(), torch.cat(judged).mean()
    total = mlm_loss + model.detection_weight * detection_loss
    total.backward()
    named = {
        f"{name}.{key}": value for name, m in models.items() for key, value in gradients(m).items()
    }
    return dict(zip(LOSSES, (total, mlm_loss, detection_loss), strict=True)), named


def _as_named_by(model, named: dict) -> dict:
    """Gradients of two plain models as those of parameters that may be shared."""
    theirs, own = dict(named), gradients(model)
    for key in named.keys() - own.keys():
        theirs[key.replace("discriminator", "generator")] += theirs.pop(key)
    return theirs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("embeddings", SHARING)
def test_losses_and_gradients(embeddings, family):
    model, batch = _model(embeddings, family=family, detection_weight=20.0), _batch()
    with assert_packed(COUNTERS[family]), assert_ran("mlm_cross_entropy_bwd", "cpu"):
        outputs = model(**batch, rng_state=STATE)
        outputs.loss.backward()
    assert outputs.replaced.any()
    is_shared = embeddings == "shared"
    assert (_words(model.discriminator) is _words(model.generator)) == is_shared
    results = [
        _plain(model, batch, outputs.corrupted_ids, d) for d in (torch.float64, torch.float32)
    ]
    for name in LOSSES:
        expected, plain = (losses[name] for losses, _ in results)
        assert_close_to_oracle(outputs[name], expected, plain, name, op="model")
    oracle, plain = (_as_named_by(model, named) for _, named in results)
    compare_gradients(gradients(model), oracle, plain, op="model")


def test_what_is_replaced():
    """Masked tokens alone, by what their site of the stream draws; their original is no
    replacement."""
    model, batch = _model(), _batch()
    outputs = model(**batch, rng_state=STATE)
    masked = batch["labels"] != -100
    original = torch.where(masked, batch["labels"], batch["input_ids"])
    assert torch.equal(outputs.corrupted_ids[~masked], original[~masked])
    assert torch.equal(outputs.replaced, outputs.corrupted_ids != original)
    model.generator.eval()
    of_model = ("attention_mask", "position_ids", "cu_seq_lens_q", "max_length_q", "input_ids")
    logits = fastbert.ElectraForMaskedLM.forward(
        model.generator, **{k: v for k, v in batch.items() if k in of_model}
    ).logits[0]
    rows = masked[0].nonzero().view(-1)
    parts = (logits[rows].softmax(-1) * 2**30).round().long().tolist()
    expected = []
    for word, counts in zip(sampling_words(STATE, rows).tolist(), parts, strict=True):
        place, token = word * sum(counts) >> 32, 0
        while place >= counts[token]:
            place, token = place - counts[token], token + 1
        expected.append(token)
    assert outputs.corrupted_ids[0, rows].tolist() == expected
    again = model(**batch, rng_state=STATE + torch.tensor([0, 1]))
    assert not torch.equal(again.corrupted_ids, outputs.corrupted_ids)


def test_samples_follow_the_softmax():
    """Each token's share of 60,000 draws within five standard deviations; one of probability 0
    never comes."""
    torch.manual_seed(0)
    features, weight, bias = torch.randn(1, 16), torch.randn(11, 16) / 4, torch.randn(11)
    bias[3] = -torch.inf
    draws = 60_000
    words = sampling_words(STATE, torch.arange(draws))
    tokens = sampled(features.expand(draws, -1), weight, bias, words)
    expected = (features.double() @ weight.double().T + bias.double()).softmax(-1)[0]
    deviations = (expected * (1 - expected) / draws).sqrt()
    shares = torch.bincount(tokens, minlength=11) / draws
    assert ((shares - expected).abs() <= 5 * deviations).all()
    assert expected[3] == shares[3] == 0
    extremes = torch.tensor([0, 2**32 - 1])
    first, last = sampled(features.expand(2, -1), weight, bias, extremes).tolist()
    assert (first, last) == (0, 10)


def test_samples_of_logits_that_are_not_finite_are_tokens():
    weight, words = torch.randn(11, 4), torch.tensor([0, 1 << 31, (1 << 32) - 1])
    features = torch.full((3, 4), torch.nan)
    tokens = sampled(features, weight, torch.zeros(11), words)
    assert ((tokens >= 0) & (tokens < 11)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_of_both_models(family):
    """One state gives one result; the discriminator drops other elements than the generator."""
    model, batch = _model(dropout=0.3, family=family), _batch()
    outputs = model(**batch, rng_state=STATE)
    assert_bitwise_equal(model(**batch, rng_state=STATE).loss, outputs.loss, "loss")
    assert not torch.equal(model.eval()(**batch, rng_state=STATE).loss, outputs.loss)
    model.train()
    inputs = {k: v for k, v in batch.items() if k not in ("label_rows", "labels")}
    inputs |= {"input_ids": outputs.corrupted_ids, "labels": outputs.replaced.long()}

    def alone(offset: int) -> torch.Tensor:
        return model.discriminator(**inputs, rng_state=STATE + torch.tensor([0, offset])).loss

    assert_bitwise_equal(alone(SECOND_STREAM), outputs.detection_loss, "detection_loss")
    assert not torch.equal(alone(0), outputs.detection_loss)


@pytest.mark.parametrize("family", ["Electra", "DebertaV2"])
@pytest.mark.parametrize("embeddings", SHARING)
def test_gradients_of_the_tables(embeddings, family):
    """The discriminator's loss reaches the generator's only where it is shared, and where the
    tables are disentangled what the discriminator adds has the gradient of the sum."""
    gradients_of, added = [], []
    for weight in (0.0, 50.0):
        model = _model(embeddings, family=family, detection_weight=weight)
        model(**_batch(), rng_state=STATE).loss.backward()
        gradients_of.append(_words(model.generator).weight.grad)
        added.append(_words(model.discriminator).weight.grad)
    assert torch.equal(*gradients_of) == (embeddings != "shared")
    if embeddings != "shared":
        assert not added[0].any() and added[1].any()


@pytest.mark.parametrize("family", ["Electra", "DebertaV2"])
def test_losses_under_autocast_and_checkpointing(family):
    """As the step calls it, in bf16; layers computed again give the same gradients."""
    model, batch = _model(dropout=0.1, family=family), _batch()
    wide = model(**batch, rng_state=STATE)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(**batch, rng_state=STATE)
    torch.testing.assert_close(narrow.mlm_loss, wide.mlm_loss, rtol=0.05, atol=0.01)
    assert narrow.loss.dtype == torch.float32
    wide.loss.backward()
    expected = {k: v.clone() for k, v in gradients(model).items()}
    model.zero_grad()
    checkpoint_activations(model)
    model(**batch, rng_state=STATE).loss.backward()
    for name, gradient in gradients(model).items():
        assert_bitwise_equal(gradient, expected[name], name)


def test_shares_of_a_step_add_up():
    model, batches = _model(), [_batch(seed) for seed in (0, 1)]
    counts = [(batch["labels"] != -100).sum() for batch in batches]
    assert counts[0] != counts[1]
    alone = [model(**batch, rng_state=STATE) for batch in batches]
    shares = [model(**b, rng_state=STATE, num_items_in_batch=sum(counts)) for b in batches]
    for name in LOSSES:
        mean = sum(x[name] * n for x, n in zip(alone, counts, strict=True)) / sum(counts)
        torch.testing.assert_close(sum(share[name] for share in shares), mean)


@pytest.mark.parametrize("family", ["Electra", "DebertaV2"])
def test_rows_that_fill_the_capacity_change_nothing(family):
    """Labelled rows given, in another order and with others among them, or found."""
    model, batch = _model(family=family), _batch()
    given = model(**batch, rng_state=STATE)
    batch["label_rows"] = batch["label_rows"].flip(0)
    flipped = model(**batch, rng_state=STATE)
    del batch["label_rows"]
    found = model(**batch, rng_state=STATE)
    for outputs in (flipped, found):
        assert torch.equal(outputs.corrupted_ids, given.corrupted_ids)
        assert torch.equal(outputs.loss, given.loss)


@pytest.mark.parametrize("family", ["DebertaV2", "Deberta"])
def test_the_decoder_is_a_setting(family):
    """On where positions are in no input; off, the generator is the plain masked-LM model."""
    assert isinstance(_model(family=family).generator, EnhancedMaskDecoder)
    model, batch = _model(family=family, enhanced_mask_decoder=False), _batch()
    assert type(model.generator) is getattr(fastbert, f"{family}ForMaskedLM")
    outputs = model(**batch, rng_state=STATE)
    plain = getattr(transformers, f"{family}ForMaskedLM")(copy.deepcopy(model.generator.config))
    plain.load_state_dict(model.generator.state_dict())
    losses, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        labels = batch["labels"][0, rows]
        logits = plain.eval()(input_ids=batch["input_ids"][:, rows]).logits[0]
        losses.append(F.cross_entropy(logits, labels, reduction="none")[labels != -100])
        start += length
    torch.testing.assert_close(outputs.mlm_loss, torch.cat(losses).mean(), rtol=1e-5, atol=1e-6)


def test_the_decoder_computes_labelled_rows_alone():
    """Of its two runs, and of no layer below."""
    model, batch = _model(family="DebertaV2", dropout=0.1), _batch()
    rows = []
    for layer in model.generator.deberta.encoder.layer:
        layer.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    model(**batch, rng_state=STATE)
    labelled = int((batch["labels"] != -100).sum())
    assert rows == [40, labelled, labelled]


def _alone(family, part: int, seed: int, **overrides):
    """A generator (0) or a discriminator (1) that has been trained elsewhere."""
    torch.manual_seed(seed)
    config = _configs(family)[part]
    for name, value in overrides.items():
        setattr(config, name, value)
    model = type(_model(family=family).parts[part])(config)
    lively_(model, seed)
    return model


@pytest.mark.parametrize("family", ["Electra", "DebertaV2"])
@pytest.mark.parametrize("embeddings", SHARING)
@pytest.mark.parametrize("given", ["generator", "discriminator", "both"])
def test_beginning_with_weights(family, embeddings, given):
    """What is given is there afterwards; whose table the other one takes."""
    parts = [_alone(family, 0, 5), _alone(family, 1, 6)]
    if embeddings == "shared" and given == "both":
        whole = family == "Electra"
        modules = [p.base_model.embeddings if whole else _words(p) for p in parts]
        modules[1].load_state_dict(modules[0].state_dict())
    chosen = {
        "generator": {"generator": parts[0]},
        "discriminator": {"discriminator": parts[1]},
        "both": {"generator": parts[0], "discriminator": parts[1]},
    }[given]
    model = _model(embeddings, family=family)
    model.begin_with(**chosen)
    for name, part in chosen.items():
        own = getattr(model, name).state_dict()
        words = [k for k, v in own.items() if k.endswith("word_embeddings.weight")]
        for key, value in part.state_dict().items():
            if key not in words:
                assert torch.equal(own[key], value), (name, key)
    tables = [_words(part) for part in model.parts]
    if isinstance(tables[1], DisentangledEmbedding):
        tables[1] = tables[1].folded()
    for table, part, name in zip(tables, parts, ("generator", "discriminator"), strict=True):
        if name in chosen:
            torch.testing.assert_close(table.weight, _words(part).weight, rtol=0, atol=1e-6)
    if given == "discriminator" and embeddings != "separate":
        assert torch.equal(tables[0].weight, _words(parts[1]).weight)


def test_tables_that_differ_cannot_be_shared():
    model = _model()
    with pytest.raises(
        ValueError, match=r"shared, but word_embeddings\.weight of the generator is"
    ):
        model.begin_with(_alone("Electra", 0, 5), _alone("Electra", 1, 6))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"vocab_size": 98}, {}, "vocab_size is 98 and the discriminator's 99; use models of one"),
        ({"embedding_size": 16}, {}, "16 wide and the discriminator's 24, which shared embeddings"),
        (
            {},
            {"enhanced_mask_decoder": True},
            "enhanced_mask_decoder is DeBERTa's, electra has none",
        ),
    ],
)
def test_pairs_that_cannot_be(changes, options, message):
    generator, discriminator = _configs()
    for name, value in changes.items():
        setattr(generator, name, value)
    with pytest.raises(ValueError, match=message):
        ReplacedTokensModel(generator, discriminator, **options)


def test_families_that_cannot_be():
    generator, discriminator = _configs()[0], _configs("DebertaV2")[1]
    with pytest.raises(ValueError, match="is electra and the discriminator's deberta-v2"):
        ReplacedTokensModel(generator, discriminator)
    with pytest.raises(ValueError, match="bert is not trained by replaced tokens; use one of el"):
        ReplacedTokensModel(small_config("Bert"), small_config("Bert"))
    positions = _configs("DebertaV2")
    for config in positions:
        config.position_biased_input = True
    assert type(ReplacedTokensModel(*positions).generator) is fastbert.DebertaV2ForMaskedLM
    with pytest.raises(ValueError, match=r"config\.position_biased_input is True"):
        ReplacedTokensModel(*positions, enhanced_mask_decoder=True)
