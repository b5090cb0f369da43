"""The emulation of CUDA itself: what it lets pass, and every kind of fault it must catch."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("cuda_on_cpu_probe.cu")
SEEDS = (0, 1, 2, 3)
X = list(range(64))
COPIED = [x + 100 * x * (x % 4 < 2) for x in X]

RIGHT = {
    "block_sum": [sum(X)] * 64,
    "exchange": [(x + 32) % 64 for x in X],
    "exchange_twice": [3 * (63 - x) for x in X],
    "exchange_in_warp": [x ^ 1 for x in X],
    "halves_of_a_word": [x ^ 1 for x in X],
    "copies": COPIED,
    "copies_of_first_group": X,
    "instruction": [x // 32 * 32 + 31 - x % 32 for x in X],
    "shuffles": [
        (x // 32 * 32 + 3)
        + (x + 30 if x % 32 + 30 < 32 else x)
        + 1000 * (x // 32 * 32 + (x % 32 ^ 7)) * (x % 32 < 8)
        for x in X
    ],
    "votes": [0b11] * 64,
}
WRONG = {
    "exchange_unordered": r"race: thread \d+ .* of values .*probe.cu:\d+\)",
    "exchange_twice_unordered": "race: .*last waited at .*probe.cu",
    "exchange_in_warp_unordered": "race: ",
    "copies_unordered": "race: .* of dynamic shared memory",
    "some_at_a_barrier": r"32 of 64 threads, .* wait for __syncthreads at .*probe.cu:\d+; "
    "32 of 64 threads, the first thread 32, have ended",
    "two_barriers": r"divergent __syncthreads: thread \d+ at .*probe.cu:\d+, thread \d+ at",
    "shuffle_without_half": "32 of 64 threads, .* wait for __shfl_xor_sync at .*have ended",
    "shuffle_from_outside": r"lane \d+ reads lane \d+, which is not in the mask",
    "beyond_the_end": "thread 63 writes 4 bytes outside of shared memory",
    "misaligned": "not a multiple",
    "misaligned_shared": "not a multiple",
    "too_much_shared_memory": "233472 bytes of shared memory",
}
UNWRITTEN = ("unwritten", "copies_not_waited_for")


@pytest.fixture(scope="module", params=["plain", "sanitized"])
def program(request, tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("the emulation needs g++ on x86-64")
    binary = tmp_path_factory.mktemp("cuda_on_cpu") / "probe"
    checks = ["-fsanitize=address,undefined"] if request.param == "sanitized" else []
    command = [compiler, "-std=c++17", "-O1", *checks, "-DFASTBERT_CUDA_ON_CPU", "-x", "c++"]
    sources = [str(SOURCE), str(ROOT / "csrc" / "cuda_on_cpu" / "machine.cpp")]
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", *sources, "-o", str(binary)], check=True)
    return binary


def _run(program, probe, seed):
    return subprocess.run([program, probe, str(seed)], capture_output=True, text=True)


@pytest.mark.parametrize("probe", RIGHT)
def test_emulation_runs_what_is_right(program, probe):
    for seed in SEEDS:
        run = _run(program, probe, seed)
        assert run.returncode == 0, run.stdout + run.stderr
        assert [float(y) for y in run.stdout.split()] == RIGHT[probe]


@pytest.mark.parametrize("probe", WRONG)
def test_emulation_catches_what_is_wrong(program, probe):
    for seed in SEEDS:
        run = _run(program, probe, seed)
        assert run.returncode == 1, run.stdout + run.stderr
        assert re.search(WRONG[probe], run.stdout), run.stdout


@pytest.mark.parametrize("probe", UNWRITTEN)
def test_emulation_gives_nan_for_what_is_not_there(program, probe):
    values = _run(program, probe, 0).stdout.split()
    assert len(values) == 64
    assert all("nan" in value for value in values)


def test_emulation_shuffles_the_schedule(program):
    orders = [_run(program, "order", seed).stdout.split() for seed in SEEDS]
    assert orders[0] == [str(x) for x in X]
    assert all(sorted(order, key=int) == orders[0] for order in orders)
    assert len({tuple(order) for order in orders}) == len(SEEDS)
    assert _run(program, "order", 1).stdout.split() == orders[1]
