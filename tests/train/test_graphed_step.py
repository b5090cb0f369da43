"""`GraphedStep`: equal to plain steps, decides on the device, never waits for it."""

import copy
import math

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

import fastbert
from fastbert import dispatch, optim
from fastbert.ops import index_flags
from fastbert.padding import IGNORE_INDEX, pack
from fastbert.testing.inputs import small_bert_config
from fastbert.train import GraphedStep

CAPACITY = {"num_tokens": 48, "num_sequences": 5, "num_labels": 24, "max_seqlen": 20}


def _features(seed: int, lengths=(12, 3, 20)):
    generator = torch.Generator().manual_seed(seed)
    features = []
    for length in lengths:
        ids = torch.randint(5, 99, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) > 0.4, IGNORE_INDEX)
        labels[0] = ids[0]
        features.append({"input_ids": ids, "labels": labels})
    return features


def _padded(features):
    """The same sequences as a padded batch."""
    rows = {
        name: torch.nn.utils.rnn.pad_sequence(
            [f[name] for f in features], batch_first=True, padding_value=value
        )
        for name, value in (("input_ids", 0), ("labels", IGNORE_INDEX))
    }
    return {**rows, "attention_mask": (rows["input_ids"] != 0).long()}


def _model(seed: int = 0, **config):
    torch.manual_seed(seed)
    return fastbert.BertForMaskedLM(small_bert_config(num_hidden_layers=2, **config)).train()


def _adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, **options)


def _steps(step, batches):
    """Reports of all batches; each is a tuple of micro-batches."""
    reports = [step(*batch) for batch in batches]
    return [r for r in reports if r is not None] + step.drain()


def _plain_steps(model, optimizer, batches, rng_state, max_grad_norm):
    """The loop everybody writes, on padded batches."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch, rng_state=rng_state.clone()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        rng_state[1] += 1
        losses.append(loss.item())
    return losses


def test_step_equals_plain_steps():
    """Six steps of AdamW with dropout and clipping, against padded batches and host decisions."""
    ours = _model()
    plain = copy.deepcopy(ours)
    features = [_features(seed, (7 + seed, 3, 20 - seed)) for seed in range(6)]
    rng_state = torch.tensor([3, 100])
    step = GraphedStep(ours, _adamw(ours), max_grad_norm=0.5, rng_state=rng_state)
    reports = _steps(step, [(pack(f, **CAPACITY),) for f in features])
    losses = _plain_steps(
        plain, _adamw(plain), [_padded(f) for f in features], rng_state.clone(), 0.5
    )
    assert [r.step for r in reports] == list(range(6))
    assert not any(r.skipped for r in reports)
    assert step.rng_state.tolist() == [3, 106]
    torch.testing.assert_close([r.loss for r in reports], losses, rtol=1e-5, atol=1e-5)
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def test_step_accumulates_as_one_batch():
    """Two batches with unlike numbers of labels weigh as their labels do in one batch."""
    ours = _model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    whole = copy.deepcopy(ours)
    parts = [_features(1, (12,)), _features(2, (3, 20))]
    (report,) = _steps(
        GraphedStep(ours, _adamw(ours), lag=0), [tuple(pack(f, **CAPACITY) for f in parts)]
    )
    (expected,) = _steps(
        GraphedStep(whole, _adamw(whole), lag=0), [(pack(parts[0] + parts[1], **CAPACITY),)]
    )
    assert report.num_labels == expected.num_labels
    assert report.loss == pytest.approx(expected.loss, rel=1e-6)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    for mine, other in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def _spoiled_loss(model, batch, rng_state, num_labels):
    """Infinite gradients where the batch begins with id 5."""
    loss = model(**batch, rng_state=rng_state, num_items_in_batch=num_labels).loss
    return loss * torch.where(batch["input_ids"][0, 0] == 5, torch.inf, 1.0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_step_skips_gradients_that_are_not_finite(dtype):
    """Weights, moments and step counts stay; the next step goes on; fp16 halves its scale."""
    model = _model()
    optimizer = _adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if dtype is torch.float16 else None
    step = GraphedStep(model, optimizer, dtype=dtype, scaler=scaler, loss=_spoiled_loss, lag=0)
    good, bad = _features(0), _features(1)
    good[0]["input_ids"][0], bad[0]["input_ids"][0] = 6, 5
    good, bad = pack(good, **CAPACITY), pack(bad, **CAPACITY)
    assert not step(good).skipped
    weights = copy.deepcopy(model.state_dict())
    states = copy.deepcopy(optimizer.state_dict()["state"])
    assert step(bad).skipped
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, states[key][name]), name
    assert scaler is None or scaler.get_scale() == 512.0
    report = step(good)
    assert not report.skipped and math.isfinite(report.loss)
    assert not torch.equal(next(model.parameters()), next(iter(weights.values())))


def test_step_reports_with_a_lag():
    model = _model()
    step = GraphedStep(model, _adamw(model), lag=2)
    batch = pack(_features(0), **CAPACITY)
    assert [step(batch), step(batch)] == [None, None]
    assert [step(batch).step, step(batch).step] == [0, 1]
    assert [r.step for r in step.drain()] == [2, 3]
    assert step.drain() == []


@pytest.mark.parametrize("how", ["scheduler", "assigned"])
def test_step_follows_the_learning_rate(how):
    """A scheduler's rates and a rate assigned as a number act as in a plain loop."""
    model = _model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    plain = copy.deepcopy(model)
    optimizers = [_adamw(m) for m in (model, plain)]
    step = GraphedStep(model, optimizers[0], max_grad_norm=1.0, lag=0)
    graph_reads = optimizers[0].param_groups[0]["lr"]
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3) for o in optimizers]
    for seed in range(4):
        features = _features(seed)
        step(pack(features, **CAPACITY))
        _plain_steps(plain, optimizers[1], [_padded(features)], torch.zeros(2).long(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            if how == "scheduler":
                scheduler.step()
            else:
                optimizer.param_groups[0]["lr"] = 1e-3 / (seed + 1)
    assert optimizers[0].param_groups[0]["lr"] is graph_reads or how == "assigned"
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_step_resumes_bitwise():
    batches = [(pack(_features(seed), **CAPACITY),) for seed in range(4)]
    model = _model()
    optimizer = _adamw(model)
    step = GraphedStep(model, optimizer)
    _steps(step, batches[:2])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    expected = _steps(step, batches[2:])

    resumed = _model(seed=9)
    resumed.load_state_dict(saved[0])
    optimizer = _adamw(resumed)
    optimizer.load_state_dict(saved[1])
    step = GraphedStep(resumed, optimizer)
    step.load_state_dict(saved[2])
    assert _steps(step, batches[2:]) == expected
    for mine, other in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_step_refuses():
    model = _model()
    with pytest.raises(ValueError, match="fused=True"):
        GraphedStep(model, torch.optim.AdamW(model.parameters(), fused=False))
    with pytest.raises(ValueError, match="GradScaler"):
        GraphedStep(model, _adamw(model), dtype=torch.float16)
    with pytest.raises(ValueError, match="lag must be"):
        GraphedStep(model, _adamw(model), lag=-1)
    with pytest.raises(ValueError, match="needs a model on a GPU"):
        GraphedStep(model, _adamw(model), graph=True)
    step = GraphedStep(model, _adamw(model))
    batch = pack(_features(0), **CAPACITY)
    with pytest.raises(ValueError, match="at least one batch"):
        step()
    step(batch)
    with pytest.raises(ValueError, match="takes 1 batches"):
        step(batch, batch)
    with pytest.raises(ValueError, match="must have the keys"):
        step({**batch, "token_type_ids": batch["input_ids"]})
    with pytest.raises(ValueError, match=r"input_ids must be like the first batch's.*\(1, 48\)"):
        step(pack(_features(0), **{**CAPACITY, "num_tokens": 40}))
    with pytest.raises(ValueError, match="max_length_q must be like"):
        step(pack(_features(0), **{**CAPACITY, "max_seqlen": 30}))


# --- nothing waits --------------------------------------------------------------------------------


@pytest.fixture
def no_values(monkeypatch):
    """Tensors with shapes and dtypes only, so that whatever the host would read raises, and the
    manners of a GPU: eager paths, not those of a traced graph, and no looking into ids."""
    monkeypatch.setattr(dispatch, "is_symbolic", lambda tensor: tensor.device.type == "meta")
    monkeypatch.setattr(dispatch, "is_checkable", lambda tensor: False)
    monkeypatch.setattr(index_flags, "must_not_wait", lambda tensor: True)
    monkeypatch.setattr(index_flags, "_flags", {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _fake_step(dtype=None, scaler=None, optimizer="AdamW"):
    model = _model()
    if optimizer == "AdamW":
        optimizer = _adamw(model)
    else:
        optimizer = getattr(optim, optimizer)(optim.decay_groups(model, 0.01))
    return GraphedStep(model, optimizer, dtype=dtype, scaler=scaler)


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "StableAdamW"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_step_never_waits(no_values, dtype, optimizer):
    """Forward, backward, clipping and update with nothing read by the host."""
    scaler = torch.amp.GradScaler("cpu") if dtype is torch.float16 else None
    step = _fake_step(dtype, scaler, optimizer)
    for seed in range(2):
        assert step(_fake_batch(seed)) is None
    with pytest.raises(DataDependentOutputException):
        step.drain()


@pytest.mark.parametrize("missing", ["label_rows", "cu_seq_lens_q"])
def test_step_that_waits_is_noticed(no_values, missing):
    """The proof above can fail: without what `pack` prepares, the host has to read."""
    batch = _fake_batch(0)
    del batch["label_rows"], batch["pooled_rows"]
    if missing == "cu_seq_lens_q":
        del batch["cu_seq_lens_q"], batch["max_length_q"]
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        _fake_step()(batch)


def _fake_batch(seed: int) -> dict:
    """The shapes of a packed batch; collating reads values, long before the step."""
    with unset_fake_temporarily():
        batch = pack(_features(seed), **CAPACITY)
    return {
        name: torch.empty(value.shape, dtype=value.dtype) if name != "max_length_q" else value
        for name, value in batch.items()
    }
