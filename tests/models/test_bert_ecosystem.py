"""With the real libraries around it: checkpoints, Trainer, adapters, sentence-transformers."""

import copy
import inspect
import logging

import pytest
import torch
import transformers

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import HEADS, assert_packed, gradients, head_inputs, model_pair

OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALL = ["BertModel", *HEADS]


@pytest.mark.parametrize("name", ALL)
def test_classes_derive_from_transformers(name):
    config = small_bert_config()
    ours, theirs = model_pair(name, config)
    assert isinstance(ours, getattr(transformers, name))
    assert type(ours).__name__ == name
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)


@pytest.mark.parametrize("name", ALL)
def test_checkpoints_go_both_ways(name, tmp_path):
    config = small_bert_config()
    ours, theirs = model_pair(name, config)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = getattr(fastbert, name).from_pretrained(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    back = getattr(transformers, name).from_pretrained(tmp_path / "ours")
    for expected, model in ((theirs, loaded), (ours, back)):
        state = model.state_dict()
        assert state.keys() == expected.state_dict().keys()
        for key, value in expected.state_dict().items():
            assert torch.equal(state[key], value), key
    assert back.config.architectures == [name]
    batch = padded_batch((7, 3), 99, seed=1)
    with assert_packed(), torch.no_grad():
        loaded.eval()(**head_inputs(name, batch, config))


def test_positional_arguments_are_transformers():
    ours, theirs = model_pair("BertForSequenceClassification", small_bert_config(**OFF))
    batch = padded_batch((7, 3), 99, seed=1)
    inputs = head_inputs("BertForSequenceClassification", batch, ours.config)
    values = (*(inputs[k] for k in ("input_ids", "attention_mask", "token_type_ids")), None, None)
    mine, reference = (m(*values, inputs["labels"]) for m in (ours, theirs))
    torch.testing.assert_close(mine.loss, reference.loss)
    with pytest.raises(TypeError, match="positional"):
        ours(*[None] * 20)
    with pytest.raises(TypeError, match="input_ids"):
        ours(inputs["input_ids"], input_ids=inputs["input_ids"])


@pytest.mark.parametrize("name", ALL)
def test_accelerate_in_place(name):
    config = small_bert_config(**OFF)
    _, theirs = model_pair(name, config)
    model = copy.deepcopy(theirs)
    parameters = {n: id(p) for n, p in model.named_parameters()}
    assert fastbert.accelerate(model) is model
    assert type(model) is getattr(fastbert, name)
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    batch = padded_batch((7, 3), 99, seed=1)
    inputs = head_inputs(name, batch, config)
    with torch.no_grad():
        with assert_packed():
            mine = model(**inputs, output_hidden_states=True)
        reference = theirs(**inputs, output_hidden_states=True)
    assert len(mine.hidden_states) == len(reference.hidden_states)
    if reference.get("loss") is not None:
        torch.testing.assert_close(mine.loss, reference.loss, rtol=1e-5, atol=1e-5)
    fastbert.accelerate(model)


def test_accelerate_leaves_subclasses_alone(caplog):
    """Their own forward is kept: said in the log beside another model, refused alone."""

    class Mine(transformers.BertModel):
        pass

    model = Mine(small_bert_config())
    both = torch.nn.ModuleList([model, transformers.BertModel(small_bert_config())])
    with caplog.at_level(logging.INFO, logger="fastbert"):
        fastbert.accelerate(both)
    assert "Mine derives from a class fastbert knows" in caplog.text
    assert [type(m) for m in both] == [Mine, fastbert.BertModel]
    with pytest.raises(ValueError, match="not classes derived from them"):
        fastbert.accelerate(model)


def test_accelerate_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"holds no model fastbert knows; known are .*BertForM"):
        fastbert.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a torch"):
        fastbert.accelerate("bert-base-uncased")


def test_accelerate_inside_a_sentence_transformer(real_checkpoint):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["A short one.", "A sentence that is a good deal longer than the other one.", ""]
    model = sentence_transformers.SentenceTransformer(real_checkpoint, device="cpu")
    expected = model.encode(texts, convert_to_tensor=True)
    fastbert.accelerate(model)
    with assert_packed():
        actual = model.encode(texts, convert_to_tensor=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_resize_token_embeddings_keeps_the_tie():
    ours, _ = model_pair("BertForMaskedLM", small_bert_config())
    before = ours.get_input_embeddings().weight.detach().clone()
    ours.resize_token_embeddings(110)
    decoder = ours.cls.predictions.decoder
    assert decoder.weight is ours.get_input_embeddings().weight
    assert torch.equal(decoder.weight[:99], before)
    assert decoder.bias.shape == (110,)
    ids = torch.tensor([[105, 3, 109]])
    assert ours(ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("frozen", [True, False])
def test_gradient_checkpointing_keeps_numbers(frozen):
    config = small_bert_config(**OFF)
    ours, theirs = model_pair("BertForMaskedLM", config)
    inputs = head_inputs("BertForMaskedLM", padded_batch((7, 3), 99, seed=1), config)
    for model in (ours, theirs):
        model.train()
        model.bert.embeddings.requires_grad_(not frozen)
    ours.gradient_checkpointing_enable()
    with assert_packed():
        loss = ours(**inputs).loss
    loss.backward()
    theirs(**inputs).loss.backward()
    for name, gradient in gradients(theirs).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_lora_with_gradient_checkpointing():
    peft = pytest.importorskip("peft")
    config = small_bert_config()
    ours, _ = model_pair("BertForMaskedLM", config)
    inputs = head_inputs("BertForMaskedLM", padded_batch((7, 3), 99, seed=1), config)
    adapted = peft.get_peft_model(
        ours, peft.LoraConfig(r=2, target_modules=["query", "word_embeddings"])
    )
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            adapted.enable_input_require_grads()
            adapted.gradient_checkpointing_enable()
        adapted.train()
        adapted.zero_grad()
        torch.manual_seed(0)
        with assert_packed():
            loss = adapted(**inputs).loss
        loss.backward()
        runs.append((loss.detach(), {k: v.clone() for k, v in gradients(adapted).items()}))
    torch.testing.assert_close(runs[0][0], runs[1][0])
    assert runs[0][1]
    for name, gradient in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], gradient, msg=name)


def test_hooks_on_layers_and_linears_run():
    """A hooked Linear is called on packed rows; the layer stays a call."""
    ours, theirs = model_pair("BertModel", small_bert_config())
    batch = padded_batch((7, 3), 99, seed=1)
    inputs = head_inputs("BertModel", batch, None)
    seen = {}
    layer = ours.encoder.layer[1]
    layer.register_forward_hook(lambda m, a, out: seen.update(layer=out.shape))
    layer.output.dense.register_forward_hook(lambda m, a, out: out * 1.5)
    theirs.encoder.layer[1].output.dense.register_forward_hook(lambda m, a, out: out * 1.5)
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed():
        actual = ours(**inputs).last_hidden_state
    assert seen["layer"] == (10, 48)
    torch.testing.assert_close(
        actual[real], theirs(**inputs).last_hidden_state[real], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    "replace",
    [
        lambda layer: setattr(layer.attention.output, "LayerNorm", torch.nn.RMSNorm(48)),
        lambda layer: setattr(layer.output, "dropout", torch.nn.Identity()),
        lambda layer: setattr(
            layer.intermediate, "dense", torch.nn.Sequential(layer.intermediate.dense)
        ),
        lambda layer: setattr(layer.intermediate, "intermediate_act_fn", torch.nn.SiLU()),
        lambda layer: setattr(layer.attention.self, "value", torch.nn.Linear(48, 48, bias=False)),
    ],
    ids=["norm", "dropout", "linear", "activation", "bias"],
)
def test_replaced_modules_are_called(replace):
    ours, theirs = model_pair("BertModel", small_bert_config())
    for model in (ours, theirs):
        torch.manual_seed(1)
        replace(model.encoder.layer[0])
    batch = padded_batch((7, 3), 99, seed=1)
    inputs = head_inputs("BertModel", batch, None)
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed():
        actual = ours(**inputs).last_hidden_state
    torch.testing.assert_close(
        actual[real], theirs(**inputs).last_hidden_state[real], rtol=0, atol=1e-5
    )


class _Halved(torch.Tensor):
    """A weight that is not what its storage holds, as quantised weights are."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [2 * a.as_subclass(torch.Tensor) if type(a) is cls else a for a in args]
        return func(*plain, **(kwargs or {}))


def test_weights_of_another_kind_are_left_to_their_module():
    ours, theirs = model_pair("BertModel", small_bert_config())
    for module in ours.encoder.layer[0].modules():
        if isinstance(module, torch.nn.Linear):
            halved = (module.weight.detach() / 2).as_subclass(_Halved)
            del module.weight
            module.weight = halved
    batch = padded_batch((7, 3), 99, seed=1)
    inputs = head_inputs("BertModel", batch, None)
    real = inputs["attention_mask"] != 0
    with torch.no_grad(), assert_packed():
        actual = ours(**inputs).last_hidden_state
    torch.testing.assert_close(
        actual[real], theirs(**inputs).last_hidden_state[real], rtol=0, atol=1e-5
    )


def test_what_cannot_be_packed_runs_transformers_and_says_so(caplog):
    ours, theirs = model_pair("BertModel", small_bert_config())
    inputs = head_inputs("BertModel", padded_batch((7, 3), 99, seed=1), None)
    real = inputs["attention_mask"] != 0

    class Attention(type(ours.encoder.layer[0].attention.self)):
        pass

    ours.encoder.layer[0].attention.self.__class__ = Attention
    fastbert.dispatch._logged.clear()
    with caplog.at_level("INFO", logger="fastbert"), torch.no_grad():
        for _ in range(2):
            actual = ours(**inputs).last_hidden_state
    torch.testing.assert_close(
        actual[real], theirs(**inputs).last_hidden_state[real], rtol=0, atol=1e-5
    )
    assert len(caplog.messages) == 1
    assert "holds a Attention in place of BertSelfAttention" in caplog.messages[0]


def test_unknown_keywords_reach_transformers():
    ours, theirs = model_pair("BertModel", small_bert_config())
    ids = torch.randint(5, 99, (2, 5))
    with torch.no_grad():
        actual = ours(ids, is_causal=True).last_hidden_state
        expected = theirs(ids, is_causal=True).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


class _Rows(torch.utils.data.Dataset):
    def __init__(self, config, labels):
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for index in range(16):
            ids = torch.randint(5, config.vocab_size, (4 + index % 9,), generator=generator)
            row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if labels == "tokens":
                row["labels"] = ids.masked_fill(torch.arange(len(ids)) % 3 != 0, -100)
            else:
                row["labels"] = torch.tensor(index % 3)
            self.rows.append(row)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def _collate(rows):
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if values[0].dim() == 0:
            batch[key] = torch.stack(values)
        else:
            fill = -100 if key == "labels" else 0
            batch[key] = torch.nn.utils.rnn.pad_sequence(values, True, fill)
    return batch


def _train(model, folder, rows, *, accumulate, bf16=False):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=3,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=bf16,
        max_grad_norm=0.0,
        seed=1,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=_collate
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("name", "labels"),
    [("BertForMaskedLM", "tokens"), ("BertForSequenceClassification", "rows")],
)
def test_trainer_accumulation_does_not_change_the_step(name, labels, tmp_path):
    """transformers' heads ignore num_items_in_batch and train with n times the gradient."""
    config = small_bert_config(**OFF)
    rows = _Rows(config, labels)
    results = []
    for accumulate in (1, 4):
        model, _ = model_pair(name, config)
        losses = _train(model, tmp_path / str(accumulate), rows, accumulate=accumulate)
        results.append((losses, model.state_dict()))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert abs(a - b) < 2e-3
    for key, value in results[0][1].items():
        torch.testing.assert_close(results[1][1][key], value, rtol=0, atol=2e-3, msg=key)


def test_trainer_in_bf16_never_computes_logits(tmp_path, monkeypatch):
    """Accelerate converts every output to fp32; logits nobody reads must survive that unread."""
    from fastbert.models import outputs

    config = small_bert_config()
    model, _ = model_pair("BertForMaskedLM", config)
    computed = []
    monkeypatch.setattr(
        outputs.Deferred, "value", lambda self: computed.append(self) or pytest.fail("computed")
    )
    with assert_packed():
        losses = _train(model, tmp_path, _Rows(config, "tokens"), accumulate=2, bf16=True)
    assert len(losses) == 3
    assert computed == []


@pytest.mark.parametrize("find_unused", [False, True])
def test_distributed_data_parallel(find_unused, tmp_path):
    """DDP walks the outputs; logits nobody reads stay uncomputed, unless it clones every output
    to find unused parameters."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        config = small_bert_config(**OFF)
        ours, theirs = model_pair("BertForMaskedLM", config)
        inputs = head_inputs("BertForMaskedLM", padded_batch((7, 3), 99, seed=1), config)
        wrapped = torch.nn.parallel.DistributedDataParallel(
            ours.train(), find_unused_parameters=find_unused
        )
        outputs = wrapped(**inputs)
        outputs.loss.backward()
        if not find_unused:
            assert dict(outputs.items())["logits"].deferred._value is None
        theirs.train()(**inputs).loss.backward()
        for name, gradient in gradients(theirs).items():
            torch.testing.assert_close(
                gradients(ours)[name], gradient, rtol=1e-3, atol=1e-5, msg=name
            )
    finally:
        torch.distributed.destroy_process_group()


def test_pipeline_fill_mask(real_checkpoint):
    """The tokenizer of the real checkpoint and a model with random heads, ours and theirs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(real_checkpoint)
    config = small_bert_config(vocab_size=len(tokenizer))
    ours, theirs = model_pair("BertForMaskedLM", config)
    answers = [
        transformers.pipeline("fill-mask", model=m, tokenizer=tokenizer, device="cpu")(
            "Paris is the [MASK] of France."
        )
        for m in (ours, theirs)
    ]
    assert [a["token"] for a in answers[0]] == [a["token"] for a in answers[1]]
