"""Each side in a process of its own, one at a time; a sample knows what else ran meanwhile."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from ..memory import begin_peak, peak, resident
from ..models.twins import padded
from . import makers
from .cases import SENTENCES, Case, Participant
from .files import reference_path

READY_WITHIN = 600
# Of a sample's seconds, and the two ticks a core that the system's clock may be off.
FOREIGN_SHARE, TICKS = 0.05, 0.02


@dataclass(frozen=True)
class Sample:
    """Seconds of a call, and processor seconds of other programs while it was taken."""

    seconds: float
    wall: float
    foreign: float

    @property
    def quiet(self) -> bool:
        """Whether what others computed is within what the clock can tell."""
        return self.foreign <= FOREIGN_SHARE * self.wall + TICKS * (os.cpu_count() or 1)


class Side:
    """The process of one participant with one model.

    Args:
        participant: what it runs.
        folder: of the model's files. settings: of the model.
        texts: for participants that encode them.
    """

    def __init__(
        self, participant: Participant, folder: Path, settings: dict, texts: list[str] | None
    ):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment = {**participant.environment, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
        arguments = (theirs, participant, folder, settings, texts)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with _environment(environment):
            self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until the model is loaded."""
        self._receive()

    def prepare(self, case: Case) -> dict:
        """The first call on a batch: its seconds, memory, and error against the reference."""
        return self._ask("prepare", case)

    def sample(self, least: float) -> Sample:
        """A call's mean over at least so many seconds."""
        return Sample(**self._ask("sample", least))

    def profile(self) -> list[dict]:
        """Operators of a call, as torch's profiler sees them."""
        return self._ask("profile", None)

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, what: str, argument):
        self._pipe.send((what, argument))
        return self._receive()

    def _receive(self):
        if not self._pipe.poll(READY_WITHIN):
            raise TimeoutError(f"a side gave no answer within {READY_WITHIN} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process of a side died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- in the process -------------------------------------------------------------------------------


def _serve(pipe, participant: Participant, folder: Path, settings: dict, texts) -> None:
    transformers.utils.logging.disable_progress_bar()
    if participant.threads:
        torch.set_num_threads(participant.threads)
    try:
        served = _Served(participant, folder, settings, texts)
        pipe.send(None)
    except Exception as error:
        pipe.send(error)
        return
    while True:
        try:
            what, argument = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(served, what)(argument)
        except Exception as error:
            answer = error
        pipe.send(answer)


class _Served:
    """What a process answers with."""

    def __init__(self, participant: Participant, folder: Path, settings: dict, texts):
        self._participant, self._folder, self._settings = participant, folder, settings
        self._before = resident()
        if texts is None:
            maker = getattr(makers, participant.make)
        else:
            from . import embedding

            maker = getattr(embedding, participant.make)
        self._texts = texts
        self._prepare = maker(folder, settings, **participant.options)
        self._calls: dict = {}
        self._first: dict[str, float] = {}
        self._call, self._seconds = None, 0.0

    def prepare(self, case: Case) -> dict:
        if case.batch == SENTENCES:
            inputs = {"texts": self._texts}
        else:
            inputs = padded(case.batch, self._settings["vocab_size"])
        if case.name not in self._calls:
            self._calls[case.name] = self._prepare(inputs)
        self._call = self._calls[case.name]
        begin_peak()
        start = time.perf_counter()
        result = self._call()
        self._seconds = time.perf_counter() - start
        return {
            "first_call": self._first.setdefault(case.name, self._seconds),
            "memory": {"peak": peak() - self._before, "now": resident() - self._before},
            "error": None if case.batch == SENTENCES else self._error(result, case, inputs),
            "vectors": result if case.batch == SENTENCES else None,
        }

    def _error(self, result, case: Case, inputs: dict) -> float | None:
        """Relative L2 distance from float64 on real tokens."""
        if self._participant.tolerance is None:
            return None
        expected = torch.load(reference_path(self._folder, case.batch), weights_only=True)
        actual = torch.as_tensor(result)[inputs["attention_mask"] != 0].double()
        return ((actual - expected).norm() / expected.norm()).item()

    def sample(self, least: float) -> dict:
        # Others ran since, and their data is in the caches, which a long call fills itself.
        start = time.perf_counter()
        while self._seconds < least and time.perf_counter() - start < least / 4:
            self._call()
        busy, own = _busy(), time.process_time()
        start, calls = time.perf_counter(), 0
        while calls == 0 or time.perf_counter() - start < least:
            self._call()
            calls += 1
        wall = time.perf_counter() - start
        self._seconds = wall / calls
        foreign = (_busy() - busy) - (time.process_time() - own)
        return {"seconds": self._seconds, "wall": wall, "foreign": foreign}

    def profile(self, _) -> list[dict]:
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
            for _ in range(5):
                self._call()
        return [
            {"op": event.key, "calls": event.count / 5, "seconds": event.self_cpu_time_total / 5e6}
            for event in profile.key_averages()
        ]


def _busy() -> float:
    """Processor seconds of all programs since the start, those taken by other guests included."""
    numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, interrupts, soft, stolen = map(int, numbers)
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
