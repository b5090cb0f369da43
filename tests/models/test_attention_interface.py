"""`attn_implementation="fastbert"` on transformers' own models of many families."""

import contextlib
import copy

import pytest
import torch
import transformers

import fastbert
from fastbert import dispatch
from fastbert.models.attention_interface import fastbert_attention_forward
from fastbert.testing.compare import assert_bitwise_equal, assert_close_to_oracle
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, gradients, lively_

SMALL = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 99, "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}

# Family: its configuration, and how many layers run our attention and transformers' sdpa.
FAMILIES = {
    "ElectraModel": (transformers.ElectraConfig(**SMALL, embedding_size=48), 2, 0),
    # One module, called twice.
    "AlbertModel": (transformers.AlbertConfig(**SMALL, embedding_size=16), 2, 0),
    "DistilBertModel": (
        transformers.DistilBertConfig(vocab_size=99, dim=48, n_layers=2, n_heads=4, hidden_dim=64),
        2,
        0,
    ),
    # Rotary positions: queries arrive in another layout.
    "EsmModel": (
        transformers.EsmConfig(
            **SMALL, pad_token_id=0, mask_token_id=1, position_embedding_type="rotary"
        ),
        2,
        0,
    ),
    # Two query heads share a key head.
    "EuroBertModel": (
        transformers.EuroBertConfig(**SMALL, **TOKENS, num_key_value_heads=2, mask_token_id=3),
        2,
        0,
    ),
    "NomicBertModel": (transformers.NomicBertConfig(**SMALL, pad_token_id=0), 2, 0),
    # Layers with a window beside one that sees everything.
    "ModernBertModel": (
        transformers.ModernBertConfig(
            **SMALL | {"num_hidden_layers": 3},
            **TOKENS,
            cls_token_id=1,
            sep_token_id=2,
            global_attn_every_n_layers=3,
            local_attention=8,
        ),
        1,
        2,
    ),
    # A bias for every pair of positions.
    "T5EncoderModel": (transformers.T5Config(**T5, **TOKENS), 0, 2),
}


def _pair(name, dtype=torch.float32, **config):
    """The family's model with our attention, and with sdpa; the same weights."""
    config = copy.deepcopy(FAMILIES[name][0])
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    theirs = getattr(transformers, name)(config).to(dtype).eval()
    lively_(theirs, 1)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(fastbert.register_attention())
    assert ours.config._attn_implementation == "fastbert"
    return ours, theirs


def _inputs():
    """Right and left padding, a hole, and a full row."""
    batch = padded_batch((11, 5, 17, 9), 99, seed=2)
    ids, mask = batch["input_ids"], torch.ones(4, 17, dtype=torch.long)
    mask[0, 11:], mask[1, :12], mask[3, 3:7] = 0, 0, 0
    return {"input_ids": ids.clamp(min=5), "attention_mask": mask}


@contextlib.contextmanager
def _assert_calls(ours, sdpa):
    before = dispatch.counters()
    yield
    made = dispatch.counters() - before
    kinds = ("fastbert", "sdpa")
    assert tuple(made["attention_interface", k] for k in kinds) == (ours, sdpa)


@pytest.mark.parametrize("name", FAMILIES)
def test_matches_sdpa_at_every_position(name):
    """Also at padding, where other parts of those models go on computing."""
    ours, theirs = _pair(name)
    oracle = copy.deepcopy(theirs).double()
    inputs = _inputs()
    with _assert_calls(*FAMILIES[name][1:]):
        hidden = ours(**inputs).last_hidden_state
    expected = [model(**inputs).last_hidden_state for model in (oracle, theirs)]
    assert_close_to_oracle(hidden, *expected, "hidden states", op="model")
    grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    for output in (hidden, *expected):
        output.backward(grad.to(output.dtype))
    for key, value in gradients(oracle).items():
        mine, plain = gradients(ours)[key], gradients(theirs)[key]
        if value is None:
            assert mine is None, key
        else:
            assert_close_to_oracle(mine, value, plain, key, op="model")


def test_images_need_no_mask():
    config = transformers.ViTConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=8, patch_size=2
    )
    theirs = transformers.ViTModel(config, add_pooling_layer=False).eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(fastbert.register_attention())
    pixels = torch.randn(2, 3, 8, 8)
    with torch.no_grad(), _assert_calls(2, 0):
        actual = ours(pixels).last_hidden_state
        torch.testing.assert_close(actual, theirs(pixels).last_hidden_state, rtol=0, atol=1e-5)


def test_causal_attention_is_left_to_sdpa_and_cross_attention_is_ours():
    config = transformers.BartConfig(
        vocab_size=99,
        d_model=48,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        **TOKENS,
        decoder_start_token_id=2,
    )
    theirs = transformers.BartModel(config).eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(fastbert.register_attention())
    inputs = {**_inputs(), "decoder_input_ids": torch.randint(5, 99, (4, 6)), "use_cache": False}
    with torch.no_grad(), _assert_calls(2, 1):
        actual = ours(**inputs).last_hidden_state
    with torch.no_grad():
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_autocast_matches_sdpa():
    ours, theirs = _pair("EuroBertModel")
    oracle = copy.deepcopy(theirs).double()
    inputs = _inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with _assert_calls(2, 0):
            actual = ours(**inputs).last_hidden_state
        plain = theirs(**inputs).last_hidden_state
    with torch.no_grad():
        exact = oracle(**inputs).last_hidden_state
    assert_close_to_oracle(actual, exact, plain, "autocast", compute_dtype=torch.bfloat16)


def test_a_sequence_without_tokens_is_finite():
    ours, _ = _pair("ElectraModel")
    inputs = _inputs()
    inputs["attention_mask"][1] = 0
    with _assert_calls(2, 0):
        hidden = ours(**inputs).last_hidden_state
    assert hidden.isfinite().all()
    hidden.sum().backward()
    assert all(g.isfinite().all() for g in gradients(ours).values() if g is not None)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_keeps_its_share_of_probabilities(p):
    """With equal scores and one-hot values the output shows which probabilities were kept."""
    query = torch.zeros(8, 4, 32, 32)
    value = torch.eye(32).expand(8, 4, 32, 32)
    layer = torch.nn.Module()
    args = (layer, query, query, value, None)
    fastbert.register_attention()
    out, weights = fastbert_attention_forward(*args, dropout=p, is_causal=False)
    assert weights is None
    assert out.shape == (8, 32, 4, 32)
    kept = out > 0
    # 32,768 draws: five standard deviations are 0.012.
    assert abs(kept.float().mean() - (1 - p)) < 0.012
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 32 / max(1 - p, 0.25)))


def test_dropout_follows_the_seed_and_checkpointing_repeats_it():
    ours, _ = _pair("ElectraModel")
    ours.train()
    inputs = _inputs()
    runs = []
    for seed, checkpointing in ((1, False), (1, False), (2, False), (1, True)):
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours.zero_grad()
        torch.manual_seed(seed)
        hidden = ours(**inputs).last_hidden_state
        hidden.square().sum().backward()
        runs.append([hidden.detach(), *(g.clone() for g in gradients(ours).values())])
    first, same, other, checkpointed = runs
    for index, tensor in enumerate(first):
        assert_bitwise_equal(same[index], tensor, f"the same seed, tensor {index}")
        assert_bitwise_equal(checkpointed[index], tensor, f"checkpointed, tensor {index}")
    assert not torch.equal(first[0], other[0])


def test_packed_rows_are_the_sequences_alone():
    ours, _ = _pair("ElectraModel")
    lengths = (5, 1, 9)
    sequences = [torch.randint(5, 99, (1, n)) for n in lengths]
    packed = {
        "input_ids": torch.cat(sequences, dim=1),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": torch.tensor([0, 5, 6, 15], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 5, 6, 15], dtype=torch.int32),
        "max_length_q": 9,
        "max_length_k": 9,
    }
    with torch.no_grad():
        with _assert_calls(2, 0):
            actual = ours(**packed).last_hidden_state
        alone = [ours(input_ids=ids).last_hidden_state for ids in sequences]
    torch.testing.assert_close(actual, torch.cat(alone, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": torch.ones(1, 15)}, "there is an attention_mask beside it"),
        ({"is_causal": True}, "the attention is causal"),
    ],
)
def test_packed_rows_that_would_mix_are_refused(change, message):
    ours, _ = _pair("ElectraModel")
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    inputs = {"input_ids": torch.randint(5, 99, (1, 15)), "cu_seq_lens_q": starts, **change}
    if "attention_mask" in change:
        inputs["attention_mask"][0, 3] = 0
    with pytest.raises(NotImplementedError, match=message):
        ours(**inputs)


def test_a_changed_mask_is_left_to_sdpa(caplog):
    """A mask per query, which our op does not take."""
    ours, theirs = _pair("ElectraModel")
    mask = torch.rand(4, 1, 17, 17) < 0.7
    mask[..., 0] = True
    inputs = {"input_ids": _inputs()["input_ids"], "attention_mask": mask}
    dispatch._logged.clear()
    with torch.no_grad(), _assert_calls(0, 2), caplog.at_level("INFO", logger="fastbert"):
        actual = ours(**inputs).last_hidden_state
    assert [m for m in caplog.messages if "attention_mask is more than padding" in m]
    assert torch.equal(actual, theirs(**inputs).last_hidden_state)


@pytest.mark.parametrize("padded", [pytest.param(True, marks=pytest.mark.slow), False])
def test_compile_has_one_graph(padded):
    """Lengths are read by the host, so a padded batch compiles with sdpa."""
    ours, theirs = _pair("ElectraModel")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    inputs = _inputs()
    if not padded:
        del inputs["attention_mask"]
    with torch.no_grad():
        actual = compiled(**inputs).last_hidden_state
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_export_has_transformers_ops_only():
    ours, theirs = _pair("ElectraModel")
    inputs = _inputs()
    with torch.no_grad():
        exported = torch.export.export(ours, (), inputs)
        actual = exported.module()(**inputs).last_hidden_state
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert not [n for n in exported.graph.nodes if "fastbert" in str(n.target)]


def test_from_pretrained_takes_the_name(tmp_path):
    _, theirs = _pair("ElectraModel")
    theirs.save_pretrained(tmp_path)
    name = fastbert.register_attention()
    assert fastbert.register_attention() == name == "fastbert"
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="fastbert")
    inputs = _inputs()
    with torch.no_grad(), _assert_calls(2, 0):
        actual = loaded(**inputs).last_hidden_state
    with torch.no_grad():
        expected = theirs(**inputs).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_our_own_models_stay_packed():
    config = small_bert_config()
    config._attn_implementation = fastbert.register_attention()
    model = fastbert.BertModel(config).eval()
    with torch.no_grad(), assert_packed(), _assert_calls(0, 0):
        model(**padded_batch((7, 3), 99, seed=1))
