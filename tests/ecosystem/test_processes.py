"""Many threads in one process, and processes made by fork and by spawn."""

import concurrent.futures
import multiprocessing

import pytest
import torch

import fastbert
from fastbert.testing.inputs import padded_batch, small_bert_config
from fastbert.testing.models import assert_packed, model_pair

LENGTHS = [(7, 3), (1,), (12, 5, 9), (4, 4)]


def _hidden(model, lengths):
    with torch.inference_mode():
        return model(**padded_batch(lengths, 99, seed=1)).last_hidden_state


@pytest.fixture
def model():
    return model_pair("BertModel", small_bert_config())[0]


def test_threads_share_a_model(model):
    """The first calls race to fill the cache of packed weights; some run on another backend,
    which is a choice of the thread."""
    expected = [_hidden(model, lengths) for lengths in LENGTHS]
    fastbert.refresh(model)

    def work(number):
        lengths = LENGTHS[number % len(LENGTHS)]
        if number % 3:
            return _hidden(model, lengths)
        with fastbert.use_backend("reference"):
            return _hidden(model, lengths)

    with assert_packed(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        for number, hidden in enumerate(pool.map(work, range(32))):
            wanted = expected[number % len(LENGTHS)]
            torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-5)


def _child(model, results):
    torch.set_num_threads(1)
    results.put([_hidden(model, lengths).numpy().tobytes() for lengths in LENGTHS])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process(method, model):
    """A child computes the same bits: forked after the parent has used the kernels and their
    threads, or spawned with the model sent to it."""
    expected = [_hidden(model, lengths).numpy().tobytes() for lengths in LENGTHS]
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_child, args=(model, results))
    child.start()
    try:
        received = results.get(timeout=300)
    finally:
        child.join(60)
        child.kill()
    assert child.exitcode == 0
    assert received == expected
    assert _hidden(model, LENGTHS[0]).numpy().tobytes() == expected[0]


def test_loader_workers_run_the_model(model):
    """A forked worker of a DataLoader that runs a model in its collate function."""
    rows = torch.utils.data.DataLoader(
        LENGTHS, batch_size=None, num_workers=1, collate_fn=lambda lengths: _hidden(model, lengths)
    )
    for lengths, hidden in zip(LENGTHS, rows, strict=True):
        assert torch.equal(hidden, _hidden(model, lengths))
