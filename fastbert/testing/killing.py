"""Runs in processes of their own that are killed, or find the disk full, at a chosen moment."""

import contextlib
import errno
import multiprocessing
import os
import pkgutil
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

# What a checkpoint is made durable and visible by.
OPERATIONS = ("os:fsync", "os:rename", "os:replace")
# One call for each batch, of which a step accumulates several.
BATCHES = ("fastbert.train.graphed_step:GraphedStep._forward_backward",)
# Long enough for any run of a test, so that one that hangs is told from one that ends.
DEADLINE = 300
# How long a process may outlive one that it was joined with, as under torchrun: while processes
# meet, none is told that another is gone.
GRACE = 30


def die() -> None:
    """The process is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    """Nothing more can be written."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def somewhere(seed: int) -> dict:
    """Arguments of `run_in_process` for a kill at a random time, in a save, or between the batches
    of a step, in turn."""
    generator = random.Random(seed)
    if seed % 3 == 0:
        return {"kill_after": generator.uniform(0.3, 3.0)}
    if seed % 3 == 1:
        return {"kill_before": generator.randrange(28)}
    return {"kill_before": generator.randrange(12), "operations": BATCHES}


def run_in_process(
    target: Callable,
    *args,
    kill_before: int | None = None,
    operations: Sequence[str] = OPERATIONS,
    fault: Callable[[], None] = die,
    kill_after: Callable[[], bool] | float | None = None,
    sign: int = signal.SIGKILL,
    environment: Mapping[str, str] | None = None,
    peer_gone: threading.Event | None = None,
) -> int:
    """Calls `target` in a fresh process and kills it.

    The processes come from a server that has imported what runs need and nothing else, so each
    starts in milliseconds and without threads of the caller.

    Args:
        target: a function of an importable module. args: picklable.
        kill_before: number, from 0, of the operation before which the process kills itself.
        operations: which are counted, as "module:name". fault: what happens instead of a kill.
        kill_after: seconds, or a condition that is asked again and again, after which it is sent
            `sign`.
        environment: variables set in the process.
        peer_gone: set when a process that this one is joined with has failed; it is killed `GRACE`
            seconds later.

    Returns:
        The exit code; the negative signal where it died of one.

    Raises:
        TimeoutError: it did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fastbert.testing.runs"])
    injection = None if kill_before is None else (kill_before, operations, fault)
    process = context.Process(target=_run, args=(target, args, injection, environment))
    process.start()
    if kill_after is not None:
        _wait(process, kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, sign)
    _join(process, peer_gone)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"the run did not end in {DEADLINE} s")
    return process.exitcode


def _join(process, peer_gone: threading.Event | None) -> None:
    end = time.monotonic() + DEADLINE
    while process.is_alive() and time.monotonic() < end:
        process.join(0.1)
        if peer_gone is not None and peer_gone.is_set():
            process.join(GRACE)
            process.kill()
            process.join()


def _wait(process, until: Callable[[], bool] | float) -> None:
    end = time.monotonic() + (DEADLINE if callable(until) else until)
    while process.is_alive() and time.monotonic() < end:
        if callable(until) and until():
            return
        time.sleep(0.005)


def run_in_processes(target: Callable, *args, size: int, **of_rank) -> list[int]:
    """Calls `target` in processes that torch.distributed joins, as torchrun would.

    Args:
        target, args: as in `run_in_process`.
        size: how many processes.
        of_rank: `rank0={...}` and so on, arguments of `run_in_process` for one of them.

    Returns:
        Their exit codes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}

    peer_gone = threading.Event()

    def run(rank: int) -> int:
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        options = of_rank.get(f"rank{rank}", {})
        code = run_in_process(
            target, *args, environment=environment, peer_gone=peer_gone, **options
        )
        if code != 0:
            peer_gone.set()
        return code

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def _run(target: Callable, args: tuple, injection: tuple | None, environment) -> None:
    os.environ.update(environment or {})
    if injection is not None:
        _inject(*injection)
    target(*args)


def _inject(number: int, operations: Sequence[str], fault: Callable[[], None]) -> None:
    """Replaces the operations by ones that count, with the fault before the chosen one."""
    count = 0

    def counting(operation):
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number + 1:
                fault()
            return operation(*args, **kwargs)

        return counted

    for operation in operations:
        owner, _, name = operation.replace(":", ".").rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, counting(pkgutil.resolve_name(operation)))
