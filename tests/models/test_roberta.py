"""What RoBERTa has to itself: positions by the padding id, which every path must count alike."""

import argparse
import re
from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from fastbert.testing.compare import relative_l2
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import assert_packed, gradients, model_pair
from fastbert.testing.parity import check_parity

COUNTER = "roberta_model"
ROOT = Path(__file__).resolve().parents[2]
# fairseq's names of modules and transformers'.
RENAMED = (
    (r"^decoder\.sentence_encoder\.layers", "roberta.encoder.layer"),
    (r"^decoder\.sentence_encoder\.embed_tokens", "roberta.embeddings.word_embeddings"),
    (r"^decoder\.sentence_encoder\.embed_positions", "roberta.embeddings.position_embeddings"),
    (r"^decoder\.sentence_encoder\.emb_layer_norm", "roberta.embeddings.LayerNorm"),
    (r"^decoder\.lm_head\.weight", "lm_head.decoder.weight"),
    (r"^decoder\.lm_head", "lm_head"),
    (r"self_attn\.(q|k|v)_proj", r"attention.self.\1"),
    (r"self_attn\.out_proj", "attention.output.dense"),
    (r"self_attn_layer_norm", "attention.output.LayerNorm"),
    (r"fc1", "intermediate.dense"),
    (r"fc2", "output.dense"),
    (r"final_layer_norm", "output.LayerNorm"),
    (r"self\.q\.", "self.query."),
    (r"self\.k\.", "self.key."),
    (r"self\.v\.", "self.value."),
)


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_padding_ids_inside_a_text(pad):
    """They stay at the padding position, are attended to, and give no gradient to its row."""
    config = small_config("Roberta", pad_token_id=pad, hidden_dropout_prob=0.0)
    config.attention_probs_dropout_prob = 0.0
    ours, theirs = model_pair("RobertaForMaskedLM", config)
    ours.train(), theirs.train()
    ids = torch.randint(5, 99, (3, 12))
    ids[0, 4:7], ids[1, 0], ids[2, 9:] = pad, pad, pad
    mask = torch.ones_like(ids)
    mask[2, 9:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    check_parity(ours, theirs, inputs, counter=COUNTER)
    for model in (ours, theirs):
        assert not model.roberta.embeddings.position_embeddings.weight.grad[pad].any()
    assert (model.roberta.embeddings.position_embeddings.weight.grad[pad + 1] != 0).any()


def test_too_long_raises():
    """By the tokens that have a position, not by the padded length."""
    ours, theirs = model_pair("RobertaModel", small_config("Roberta"))
    ids = torch.randint(5, 99, (1, 63))
    with pytest.raises(ValueError, match="has 63 positions, the model 62"):
        ours(ids)
    with pytest.raises(ValueError, match="has 63 positions, the model 62"):
        ours(inputs_embeds=torch.zeros(1, 63, 64))
    ids[0, 50:] = ours.config.pad_token_id
    with torch.no_grad(), assert_packed(COUNTER):
        actual = ours(ids).last_hidden_state
    torch.testing.assert_close(actual, theirs(ids).last_hidden_state, rtol=0, atol=1e-5)


def test_idle_rows_without_positions():
    """Rows behind the last sequence have no position of their own."""
    ours, _ = model_pair("RobertaModel", small_config("Roberta"))
    ids, starts = torch.randint(5, 99, (1, 12)), torch.tensor([0, 5, 9])
    mask = (torch.arange(12) < 9).long()[None]
    with torch.no_grad():
        filled = ours(ids, attention_mask=mask, cu_seq_lens_q=starts).last_hidden_state
        alone = ours(ids[:, :9], cu_seq_lens_q=starts).last_hidden_state
    assert torch.equal(filled[:, :9], alone)


def test_masked_lm_head_is_exact_gelu_whatever_the_configuration():
    config = small_config("Roberta", hidden_act="relu")
    ours, theirs = model_pair("RobertaForMaskedLM", config)
    ids = torch.randint(5, 99, (2, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    check_parity(ours, theirs, inputs, counter=COUNTER, ops=["linear_gelu_fwd"])


def test_embedder_and_graphed_forward_count_from_the_padding_id(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = small_config("Roberta")
    theirs = transformers.RobertaModel(config).eval()
    theirs.save_pretrained(tmp_path)
    words = {"<pad>": 1, "<unk>": 3, **{f"w{i}": i for i in range(5, 99)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    texts = ["w7 w8 w9 w10", "w20", "w30 w31 w32 w33 w34 w35"]
    ids = [[words[w] for w in text.split()] for text in texts]
    with torch.no_grad():
        expected = [theirs(torch.tensor([row])).last_hidden_state[0] for row in ids]
    embedder = fastbert.Embedder(tmp_path, pooling="mean", normalize=False)
    assert embedder.max_seq_length == 62
    vectors = torch.from_numpy(embedder.encode(texts))
    torch.testing.assert_close(
        vectors, torch.stack([e.mean(0) for e in expected]), rtol=0, atol=1e-5
    )
    ours = fastbert.RobertaModel.from_pretrained(tmp_path).eval()
    forward = fastbert.GraphedForward(ours, token_buckets=[16], num_sequences=4, pad_token_id=1)
    states = forward([{"input_ids": row} for row in ids]).last_hidden_state[0]
    torch.testing.assert_close(states, torch.cat(expected), rtol=0, atol=1e-5)


def test_no_gradient_is_lost_to_frozen_positions():
    config = small_config("Roberta")
    ours, _ = model_pair("RobertaForMaskedLM", config)
    ours.roberta.embeddings.position_embeddings.requires_grad_(False)
    ids = torch.randint(5, 99, (2, 9))
    ours(ids, labels=ids).loss.backward()
    assert all(g is not None for g in gradients(ours).values())


def test_real_checkpoint():
    """4 layers, 128 features, trained by fairseq on antibodies (sapiens)."""
    path = ROOT / "build" / "models" / "sapiens" / "models" / "v1" / "checkpoint_vh.pt"
    if not path.is_file():
        pytest.skip("no sapiens; pip install --no-deps --target build/models sapiens==1.0.5")
    with torch.serialization.safe_globals([argparse.Namespace]):
        weights = torch.load(path, weights_only=True, map_location="cpu")["model"]
    for pattern, name in RENAMED:
        weights = {re.sub(pattern, name, key): value for key, value in weights.items()}
    weights["lm_head.decoder.bias"] = weights["lm_head.bias"]
    weights["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, 128)
    config = transformers.RobertaConfig(
        vocab_size=25,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=256,
        max_position_embeddings=146,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    ours, theirs = fastbert.RobertaForMaskedLM(config), transformers.RobertaForMaskedLM(config)
    for model in (ours, theirs):
        model.load_state_dict(weights)
        model.eval()
    batch = padded_batch((120, 97, 30), 25, pad_token_id=1, seed=3)
    del batch["token_type_ids"]
    with torch.no_grad(), assert_packed(COUNTER):
        actual, expected = ours(**batch).logits, theirs(**batch).logits
    real = batch["attention_mask"] != 0
    assert relative_l2(actual[real], expected[real]) <= 2e-6
