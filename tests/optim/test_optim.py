"""LAMB and StableAdamW against their equations in float64, skipping, and groups."""

import copy
import math

import pytest
import torch

import fastbert
from fastbert.optim import LAMB, StableAdamW, decay_groups
from fastbert.testing.inputs import small_bert_config

LR, BETAS, EPS, DECAY = 0.02, (0.8, 0.95), 1e-6, 0.1


def _lamb(x, g, m, v, t):
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    r = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS) + DECAY * x
    return x - LR * x.norm() / r.norm() * r, m, v


def _stable_adamw(x, g, m, v, t):
    b1, b2 = (b * (1 - b ** (t - 1)) / (1 - b**t) for b in BETAS)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    rate = LR / max(1.0, math.sqrt((g * g / v.clamp(min=EPS**2)).mean().item()))
    return x - rate * DECAY * x - rate * m / (v.sqrt() + EPS), m, v


BOTH = pytest.mark.parametrize(
    ("kind", "equation"), [(LAMB, _lamb), (StableAdamW, _stable_adamw)], ids=lambda v: v.__name__
)


def _parameters():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((5, 3), (7,), (2, 2))
    ]


def _set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for i, parameter in enumerate(parameters):
        # Sizes that jump from step to step, so that StableAdamW's clipping acts.
        scale = 10.0 ** ((seed + i) % 3 - 1)
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def _optimizer(kind, parameters):
    return kind(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


@BOTH
def test_update_follows_the_equations(kind, equation):
    parameters = _parameters()
    optimizer = _optimizer(kind, parameters)
    expected = [
        (p.detach().double(), torch.zeros_like(p).double(), torch.zeros_like(p).double())
        for p in parameters
    ]
    for t in range(1, 7):
        _set_gradients(parameters, t)
        optimizer.step()
        expected = [
            equation(x, p.grad.double(), m, v, t)
            for p, (x, m, v) in zip(parameters, expected, strict=True)
        ]
        for parameter, (x, _, _) in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.detach().double(), x, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("first", [True, False])
def test_skipped_step_changes_nothing(kind, equation, first):
    """Also as the very first step, and whatever the gradients are."""
    parameters = _parameters()
    optimizer = _optimizer(kind, parameters)
    if not first:
        _set_gradients(parameters, 0)
        optimizer.step()
    before = copy.deepcopy(parameters), copy.deepcopy(optimizer.state_dict()["state"])
    for value in (torch.nan, torch.inf):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
        optimizer.step()
    del optimizer.found_inf
    assert all(torch.equal(p, q) for p, q in zip(parameters, before[0], strict=True))
    for key, state in before[1].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value), name
    other = _parameters() if first else before[0]
    fresh = _optimizer(kind, other)
    if not first:
        fresh.load_state_dict({**fresh.state_dict(), "state": before[1]})
    for ps, o in ((parameters, optimizer), (other, fresh)):
        _set_gradients(ps, 5)
        o.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, other, strict=True))


@BOTH
def test_skipped_step_spares_weights_whose_norm_overflows(kind, equation):
    weight = torch.full((4, 4), 1e30, requires_grad=True)
    optimizer = _optimizer(kind, [weight])
    weight.grad = torch.full_like(weight, torch.nan)
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    assert torch.equal(weight, torch.full_like(weight, 1e30))


@BOTH
def test_scaler_divides_gradients(kind, equation):
    """`GradScaler.step` leaves the division and the question of overflow to the optimizer."""
    plain, scaled = _parameters(), _parameters()
    optimizers = _optimizer(kind, plain), _optimizer(kind, scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    _set_gradients(plain, 1)
    _set_gradients(scaled, 1)
    for parameter in scaled:
        parameter.grad *= 1024
    optimizers[0].step()
    scaler.step(optimizers[1])
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(plain, scaled, strict=True))


def test_lamb_leaves_groups_without_decay_unscaled():
    """There it is Adam with bias correction; on request the ratio acts, too."""
    adam, lamb, adapted = ([p] for p in (_parameters()[0] for _ in range(3)))
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    optimizers = [
        (adam, torch.optim.Adam(adam, **options)),
        (lamb, LAMB(lamb, **options)),
        (adapted, LAMB(adapted, **options, adapt_without_decay=True)),
    ]
    for t in range(3):
        for parameters, optimizer in optimizers:
            _set_gradients(parameters, t)
            optimizer.step()
    torch.testing.assert_close(lamb, adam)
    assert not torch.allclose(lamb[0], adapted[0])


def test_lamb_moves_weights_of_zero():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    LAMB([parameter], lr=LR, weight_decay=DECAY).step()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -LR))


@pytest.mark.parametrize("kind", [LAMB, StableAdamW])
def test_optimizers_refuse(kind):
    parameters = _parameters()
    for options, message in (
        ({"lr": -1.0}, "lr must be"),
        ({"betas": (1.0, 0.9)}, "betas must"),
        ({"eps": 0.0}, "eps must"),
        ({"weight_decay": -1.0}, "weight_decay must"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(parameters, **options)
    with pytest.raises(ValueError, match=r"keeps weights in fp32, got .*bfloat16"):
        kind([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])


def test_biases_and_norms_do_not_decay():
    model = fastbert.BertForMaskedLM(small_bert_config(num_hidden_layers=1))
    decaying, plain = decay_groups(model, 0.01)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    without = {names[id(p)] for p in plain["params"]}
    assert without == {
        n for n in names.values() if n.endswith("bias") or n.endswith("LayerNorm.weight")
    }
    assert len(decaying["params"]) + len(plain["params"]) == len(names)
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    assert len(decay_groups(model, 0.01)[0]["params"]) == len(decaying["params"]) - 1
    with pytest.raises(ValueError, match="no trainable parameter"):
        decay_groups(model.requires_grad_(False), 0.01)
    with pytest.raises(ValueError, match="weight_decay must"):
        decay_groups(model, -1.0)
