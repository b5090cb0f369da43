"""Processes that share the texts of an `Embedder`, each with the model and cores of its own."""

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from pathlib import Path

_embedder = None


class Workers:
    """Started at the first task; end with `close()` or with the process that started them.

    Args:
        count: processes.
        threads: of each; None: the cores this process may use, shared out, and then each worker
            keeps to its share, so that no two multiply on the same core.
        folder, settings: what each makes its `Embedder` of.
    """

    def __init__(self, count: int, threads: int | None, folder: str | Path, settings: dict):
        self.count = count
        self._threads = threads
        self._made_of = str(folder), settings
        self._executor = None

    def submit(self, numbered: list[tuple[int, str]], prefix: str) -> Future:
        """The vectors of some numbered texts, as `Embedder.embed` gives them."""
        import torch

        if self._executor is None:
            self._executor = self._start()
        precision = torch.get_float32_matmul_precision()
        return self._executor.submit(_embed, numbered, prefix, precision)

    def close(self) -> None:
        """Ends the processes; what they have not begun is dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None

    def _start(self) -> ProcessPoolExecutor:
        import torch

        # Afresh and not forked: a copy of a process whose threads multiply can wait for them
        # for ever.
        context = multiprocessing.get_context("spawn")
        places = context.SimpleQueue()
        for share in shares(allowed_cores(), self.count):
            places.put((self._threads or max(len(share), 1), [] if self._threads else share))
        # Frozen weights are packed for one precision.
        precision = torch.get_float32_matmul_precision()
        made_of = (places, precision, *self._made_of)
        return ProcessPoolExecutor(self.count, context, _become, made_of)


def result_of(future: Future):
    """What a worker made, or the error it met.

    Raises:
        RuntimeError: the worker died.
    """
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process of the Embedder died, of memory perhaps (each holds the model), or "
            'because the script does not begin under `if __name__ == "__main__":`; use fewer '
            "workers, or one"
        ) from error


def allowed_cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def shares(cores: list[int], count: int) -> list[list[int]]:
    """Neighbouring cores for each of `count` workers; none, where there are fewer cores."""
    if count > len(cores):
        return [[] for _ in range(count)]
    edges = [i * len(cores) // count for i in range(count + 1)]
    return [cores[a:b] for a, b in pairwise(edges)]


def _become(places, precision: str, folder: str, settings: dict) -> None:
    """Makes this process a worker."""
    global _embedder
    threads, cores = places.get()
    # Before anything counts the cores: the tokenizer's threads are as many as are allowed then.
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    import torch

    from fastbert.embedder import Embedder

    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    _embedder = Embedder(folder, **settings)


def _embed(numbered: list[tuple[int, str]], prefix: str, precision: str):
    import torch

    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    return _embedder.embed(numbered, prefix).numpy()
