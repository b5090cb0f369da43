"""Settings: files and options, every fault named with its remedy; schedules."""

import math

import pytest
import torch

from fastbert.differences import differences
from fastbert.train.config import (
    FREE,
    ConfigError,
    PretrainConfig,
    ScheduleConfig,
    check,
    config_from,
    generator_sizes,
    read_config,
    ready_configs,
)
from fastbert.train.schedules import factor


def _with(**settings) -> PretrainConfig:
    data = {**settings.pop("data", {}), "corpus": "corpus"}
    return config_from({"output": "run", "data": data, **settings})


@pytest.mark.parametrize("name", ready_configs())
def test_ready_configs_are_sound(name):
    config = read_config(name).to_dict()
    config["output"], config["data"]["corpus"] = "run", "corpus"
    check(config_from(config))


def test_recipes_say_what_the_papers_say():
    base, large = read_config("bert_base"), read_config("bert_large")
    assert [p.steps for p in base.phases] == [900_000, 100_000]
    # 256 sequences a step.
    assert [p.tokens_per_step // p.max_length for p in base.phases + large.phases] == [256] * 4
    assert (large.model.num_hidden_layers, large.model.hidden_size) == (24, 1024)
    electra = read_config("electra_small")
    assert electra.phases[0].tokens_per_step // electra.phases[0].max_length == 128
    assert generator_sizes(electra) == {
        "hidden_size": 64,
        "num_attention_heads": 1,
        "intermediate_size": 256,
        "num_hidden_layers": 12,
    }
    deberta = read_config("deberta_v3_base")
    assert deberta.phases[0].tokens_per_step // deberta.phases[0].max_length == 256
    assert generator_sizes(deberta) == {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
    }
    roberta = read_config("roberta_base")
    assert roberta.phases[0].tokens_per_step == 8192 * 512
    assert roberta.optimizer.betas == (0.9, 0.98)
    assert roberta.optimizer.max_grad_norm is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimzer": {}}, "unknown key optimzer; did you mean optimizer?"),
        ({"data": {"masking": {"rte": 1}}}, "unknown key data.masking.rte; did you mean rate?"),
        ({"phases": [{"step": 1}]}, "unknown key phases.step; did you mean steps?"),
        ({"optimzer": {}, "seed": "x"}, r"unknown key optimzer.*\n.*seed: Input should be a valid"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: .*valid number.*'fast'"),
        ({"optimizer": {"name": "sgd"}}, "optimizer.name: .*'adamw'.*got 'sgd'"),
        ({"phases": [{"steps": 1.5}]}, r"phases.0.steps: .*integer.*1\.5"),
    ],
)
def test_wrong_keys_and_types_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_from(settings)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*one of bert_base, "):
        read_config("bert_bse")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="is no YAML"):
        read_config(path)
    path.write_text("- 1")
    with pytest.raises(ConfigError, match="must hold keys and values, got list"):
        read_config(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "tf32"}, "tf32 is of GPUs"),
        ({"model": {"hidden_size": 100}}, "hidden_size 100 must be a multiple of"),
        ({"model": {"max_position_embeddings": 128}}, "max_length 512 exceeds .*raise that"),
        ({"model": {"init_from": "./nowhere"}}, "model.init_from: there is no folder './nowhere'"),
        ({"phases": []}, "phases is empty"),
        ({"phases": [{"tokens_per_step": 100_000}]}, "nearest: 98304"),
        ({"phases": [{"tokens_per_batch": 256}]}, "max_length must lie in 5 to tokens_per_batch"),
        ({"schedule": {"kind": "wsd"}}, "set both or neither"),
        ({"schedule": {"decay_steps": 5}}, "set both or neither"),
        ({"schedule": {"kind": "wsd", "decay_steps": 999_999}}, "must lie in 1 to the 990000"),
        ({"schedule": {"warmup_steps": 2_000_000}}, "warmup_steps must lie in"),
        ({"phases": [{"steps": 30}]}, "got 10000; give --schedule.warmup-steps 3, say, or more"),
        ({"schedule": {"final_share": 2}}, "final_share must"),
        ({"data": {"masking": {"rate": 0}}}, "rate must be above 0"),
        ({"data": {"masking": {"fixed_count": 9, "final_rate": 0.1}}}, "leaves no rate"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep must be at least 1"),
        ({"model": {"hidden_dropout_prob": 1.0}}, r"must lie in \[0, 1\)"),
        ({"optimizer": {"max_grad_norm": 0}}, "above 0, or none"),
        ({"average_decay": 1.0}, "must lie between 0 and 1, got 1.0"),
        ({"evaluation": {"average": True}}, "set average_decay"),
    ],
)
def test_impossible_combinations_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(_with(**settings))


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check(config_from({"seed": -1, "max_skipped": 0}))
    for part in ("--output FOLDER", "--data.corpus FOLDER", "seed must", "max_skipped must"):
        assert part in str(caught.value)


def test_more_processes_need_larger_steps():
    config = _with(phases=[{"tokens_per_step": 32_768, "tokens_per_batch": 16_384}])
    check(config, num_ranks=2)
    with pytest.raises(ConfigError, match="16384 x 4 processes; nearest: 65536"):
        check(config, num_ranks=4)


def test_differences_leave_out_what_may_change():
    old = _with().to_dict()
    new = _with(log={"progress": False}, phases=[{"steps": 5}], optimizer={"betas": [0.9, 0.98]})
    assert differences(old, new.to_dict(), free=FREE) == [
        "optimizer.betas: [0.9, 0.999] there, [0.9, 0.98] now",
        "phases.0.steps: 1000000 there, 5 now",
    ]


# --- schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "linear"}, {2: 1.0, 6: 0.5, 10: 0.0, 20: 0.0}),
        ({"kind": "linear", "final_share": 0.2}, {2: 1.0, 6: 0.6, 10: 0.2}),
        ({"kind": "cosine"}, {2: 1.0, 4: (1 + math.sqrt(0.5)) / 2, 6: 0.5, 10: 0.0}),
        ({"kind": "poly", "power": 2.0}, {2: 1.0, 6: 0.25, 10: 0.0}),
        ({"kind": "wsd", "decay_steps": 4}, {2: 1.0, 6: 1.0, 8: 0.5, 10: 0.0}),
    ],
)
def test_schedules(schedule, expected):
    at = factor(ScheduleConfig(warmup_steps=2, **schedule), 10)
    assert [at(0), at(1)] == [0.5, 1.0]
    for step, share in expected.items():
        assert at(step) == pytest.approx(share), step


def test_schedule_without_warm_up_and_in_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    at = factor(ScheduleConfig(warmup_steps=0), 4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, at)
    rates = []
    for _ in range(4):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == [2.0, 1.5, 1.0, 0.5]
