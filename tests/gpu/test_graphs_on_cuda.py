"""CUDA graphs of steps and forwards: run by benchmarks/gpu/run_all.py, skipped where there is no
GPU."""

import copy

import pytest
import torch

import fastbert
from fastbert import GraphedForward
from fastbert.padding import pack
from fastbert.testing.inputs import small_bert_config
from fastbert.train import GraphedStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CAPACITY = {"num_tokens": 128, "num_sequences": 6, "num_labels": 64, "max_seqlen": 40}


def _features(seed: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (3,), generator=generator).tolist()
    ids = [torch.randint(5, 99, (n,), generator=generator) for n in lengths]
    return [{"input_ids": i, "labels": i.masked_fill(i % 3 > 0, -100)} for i in ids]


def _run(graph: bool, dtype, weights, num_steps: int = 10):
    model = fastbert.BertForMaskedLM(small_bert_config(num_hidden_layers=2)).cuda().train()
    model.load_state_dict(weights)
    scaler = torch.amp.GradScaler("cuda") if dtype is torch.float16 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rng_state = torch.tensor([7, 1], device="cuda")
    step = GraphedStep(
        model, optimizer, dtype=dtype, scaler=scaler, rng_state=rng_state, graph=graph
    )
    batches = [pack(_features(seed), **CAPACITY) for seed in range(num_steps)]
    reports = [r for r in (step(b) for b in batches) if r is not None] + step.drain()
    return reports, model.state_dict()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_graphed_step_gives_the_bits_of_plain_steps(dtype):
    """Other batches, lengths and dropout masks in every replay."""
    torch.manual_seed(0)
    weights = fastbert.BertForMaskedLM(small_bert_config(num_hidden_layers=2)).state_dict()
    plain_reports, plain = _run(False, dtype, copy.deepcopy(weights))
    reports, graphed = _run(True, dtype, copy.deepcopy(weights))
    assert reports == plain_reports
    assert len({r.loss for r in reports}) == len(reports)
    for name, value in graphed.items():
        assert torch.equal(value, plain[name]), name


def test_graphed_forward_replays_other_lengths():
    torch.manual_seed(0)
    model = fastbert.BertModel(small_bert_config()).cuda().eval()
    options = {"token_buckets": (32, 128), "num_sequences": 3}
    graphed, plain = (GraphedForward(model, **options, graph=g) for g in (True, False))
    for seed in range(6):
        features = [{"input_ids": f["input_ids"]} for f in _features(seed)]
        mine, wanted = graphed(features), plain(features)
        assert torch.equal(mine.last_hidden_state, wanted.last_hidden_state)
        assert torch.equal(mine.pooler_output, wanted.pooler_output)
