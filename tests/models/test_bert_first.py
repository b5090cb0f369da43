"""The faults that fused encoders ship with: stale weights, swapped weights, sharding, adapters,
padding read by a head. Each was a test before the model existed."""

import copy
import os

import pytest
import torch
import torch.distributed as dist

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, gradients, head_inputs, model_pair

LENGTHS = (7, 1, 12, 4)


def _forward(model, inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@pytest.fixture
def batch():
    return padded_batch(LENGTHS, 99, seed=1)


@pytest.fixture
def inputs(batch):
    return head_inputs("BertModel", batch, None)


def _real(hidden, batch):
    return hidden[batch["attention_mask"] != 0]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_fused_adamw_then_eval(batch, inputs, autocast):
    """A fused optimizer writes weights without raising their version."""
    ours, theirs = model_pair("BertModel", small_bert_config())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), assert_packed():
        before = _forward(ours, inputs)
        for _ in range(2):
            for parameter in ours.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            theirs.load_state_dict(ours.state_dict())
            after = _forward(ours, inputs)
            torch.testing.assert_close(
                _real(after, batch).float(),
                _real(_forward(theirs, inputs), batch).float(),
                rtol=0,
                atol=5e-2 if autocast else 1e-5,
            )
            assert not torch.equal(before, after)
            before = after


@pytest.mark.parametrize("how", ["assign", "copy", "swap_back"])
def test_ema_swap_through_data(batch, inputs, how):
    """An average of weights swapped in through `.data`, as EMA callbacks do."""
    ours, theirs = model_pair("BertModel", small_bert_config())
    first = _forward(ours, inputs)
    kept = {n: p.data.clone() for n, p in ours.named_parameters()}
    for parameter in ours.parameters():
        if how == "copy":
            parameter.data.mul_(1.5)
        else:
            parameter.data = parameter.data * 1.5
    theirs.load_state_dict(ours.state_dict())
    swapped = _forward(ours, inputs)
    torch.testing.assert_close(
        _real(swapped, batch), _real(_forward(theirs, inputs), batch), rtol=0, atol=1e-5
    )
    if how == "swap_back":
        for name, parameter in ours.named_parameters():
            parameter.data = kept[name]
        assert torch.equal(_forward(ours, inputs), first)


def test_functional_call_uses_the_given_weights(batch, inputs):
    ours, theirs = model_pair("BertModel", small_bert_config())
    _forward(ours, inputs)
    other = {n: p * 1.3 for n, p in ours.named_parameters()}
    with torch.no_grad():
        called = torch.func.functional_call(ours, other, kwargs=inputs).last_hidden_state
    theirs.load_state_dict(other, strict=False)
    torch.testing.assert_close(
        _real(called, batch), _real(_forward(theirs, inputs), batch), rtol=0, atol=1e-5
    )


def test_copies_are_independent(batch, inputs):
    ours, _ = model_pair("BertModel", small_bert_config())
    before = _forward(ours, inputs)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(_forward(ours, inputs), before)
    assert not torch.equal(_forward(twin, inputs), before)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fully_shard(process_group, batch):
    """FSDP2 shards each layer: its parameters are whole only inside the layer's own call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config = small_bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sharded, plain = model_pair("BertForMaskedLM", config)
    sharded.train(), plain.train()
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    inputs = head_inputs("BertForMaskedLM", batch, config)
    with assert_packed():
        outputs = sharded(**inputs)
    expected = plain(**inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        _real(outputs.logits, batch), _real(expected.logits, batch), rtol=0, atol=1e-4
    )
    outputs.loss.backward()
    expected.loss.backward()
    for name, gradient in gradients(plain).items():
        ours = gradients(sharded)[name]
        torch.testing.assert_close(ours.full_tensor(), gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.skipif(os.name != "posix", reason="peft is tested on posix only")
def test_lora_trains_and_merges(batch):
    peft = pytest.importorskip("peft")
    config = small_bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pair = model_pair("BertForSequenceClassification", config)
    inputs = head_inputs("BertForSequenceClassification", batch, config)
    results = []
    for model in pair:
        torch.manual_seed(3)
        lora = peft.LoraConfig(
            r=4, target_modules=["query", "value", "dense"], lora_dropout=0.0, bias="none"
        )
        adapted = peft.get_peft_model(model, lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.manual_seed(5))
        adapted.train()
        loss = adapted(**inputs).loss
        loss.backward()
        merged = copy.deepcopy(adapted).merge_and_unload().eval()
        with torch.no_grad():
            results.append((loss.detach(), gradients(adapted), merged(**inputs).logits))
    (loss, grads, logits), (loss_hf, grads_hf, logits_hf) = results
    torch.testing.assert_close(loss, loss_hf, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, logits_hf, rtol=1e-4, atol=1e-4)
    assert grads.keys() == grads_hf.keys() and any("lora_A" in n for n in grads)
    for name, gradient in grads_hf.items():
        torch.testing.assert_close(grads[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_question_answering_reads_padding(side):
    """The span softmax runs over all positions: logits at padding must be transformers'."""
    config = small_bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours, theirs = model_pair("BertForQuestionAnswering", config)
    batch = padded_batch(LENGTHS, config.vocab_size, side=side, seed=2)
    inputs = head_inputs("BertForQuestionAnswering", batch, config)
    with assert_packed():
        outputs = ours(**inputs)
    expected = theirs(**inputs)
    torch.testing.assert_close(outputs.start_logits, expected.start_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.end_logits, expected.end_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=1e-6)
    outputs.loss.backward()
    expected.loss.backward()
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_question_answering_may_leave_out_padding(side):
    """Scores of texts stay the bits they were, padding has -inf, and labels bring it back."""
    config = small_bert_config()
    model, _ = model_pair("BertForQuestionAnswering", config)
    batch = padded_batch(LENGTHS, config.vocab_size, side=side, seed=2)
    labelled = head_inputs("BertForQuestionAnswering", batch, config)
    labels = ("start_positions", "end_positions")
    inputs = {name: value for name, value in labelled.items() if name not in labels}
    with torch.no_grad():
        whole, whole_labelled = model(**inputs), model(**labelled)
        model.scores_padding = False
        texts, texts_labelled = model(**inputs), model(**labelled)
        unmasked = model(input_ids=inputs["input_ids"])
    is_padding = batch["attention_mask"] == 0
    for name in ("start_logits", "end_logits"):
        assert texts[name][is_padding].eq(-torch.inf).all()
        assert texts[name][~is_padding].equal(whole[name][~is_padding])
        assert texts_labelled[name].equal(whole_labelled[name])
        assert unmasked[name].isfinite().all()
    assert texts_labelled.loss == whole_labelled.loss


def test_left_padding_pools_position_zero():
    """The pooler reads position 0, which is padding here."""
    config = small_bert_config()
    ours, theirs = model_pair("BertModel", config)
    batch = padded_batch(LENGTHS, config.vocab_size, side="left", seed=3)
    inputs = head_inputs("BertModel", batch, config)
    with torch.no_grad(), assert_packed():
        outputs = ours(**inputs)
        expected = theirs(**inputs)
    torch.testing.assert_close(outputs.pooler_output, expected.pooler_output, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        _real(outputs.last_hidden_state, batch),
        _real(expected.last_hidden_state, batch),
        rtol=0,
        atol=1e-5,
    )
    padding = outputs.last_hidden_state[batch["attention_mask"] == 0]
    assert padding.numel() and not padding.any()


def test_labels_on_padding_count():
    """transformers counts every label other than -100, whatever the mask says."""
    config = small_bert_config()
    batch = padded_batch(LENGTHS, config.vocab_size, seed=4)
    for name in ("BertForMaskedLM", "BertForTokenClassification"):
        ours, theirs = model_pair(name, config)
        inputs = head_inputs(name, batch, config)
        inputs["labels"] = inputs["labels"].clone()
        inputs["labels"][0, -2:] = 1
        assert batch["attention_mask"][0, -2:].sum() == 0
        with torch.no_grad(), assert_packed():
            torch.testing.assert_close(
                ours(**inputs).loss, theirs(**inputs).loss, rtol=1e-5, atol=1e-6
            )


def test_refresh_after_a_write_nothing_can_see(batch, inputs):
    ours, theirs = model_pair("BertModel", small_bert_config())
    _forward(ours, inputs)
    for model in (ours, theirs):
        model.encoder.layer[0].attention.self.query.weight.data[1, 1] += 3.0
    fastbert.refresh(ours)
    torch.testing.assert_close(
        _real(_forward(ours, inputs), batch),
        _real(_forward(theirs, inputs), batch),
        rtol=0,
        atol=1e-5,
    )
