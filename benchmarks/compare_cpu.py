"""BERT inference on this machine's CPU: fastbert beside the libraries people use.

    python benchmarks/compare_cpu.py [--case bf16] [--peers LIST] [--rounds 7] [--quick]
        [--prepare] [--profile] [--json PATH] [--plot PATH] [--texts PATH ...]

transformers (eager, sdpa), torch.compile (default, freezing), ONNX Runtime (fp32, int8), OpenVINO
(fp32, bf16, int8), sentence-transformers and fastbert, each in a process of its own, timed one at a
time in turn (A B C A B C), at least a quarter of a second a sample. Before anything is timed its
hidden states are compared with float64. A sample during which other programs computed is taken
again, and left out of the median where a quiet one exists. `floor` is the bare products of the real
tokens, `streaming` one pass over the bytes of the weights.

A library that is missing is an error, unless --peers leaves it out. Models, exported graphs,
references and what torch.compile caches are made once in build/inference; `--prepare` does only
that, takes some minutes, and need not have the machine to itself. `--profile` prints where a
call of fastbert's spends its time instead.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A script's own folder would shadow packages by its files' names.
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from benchmarks.inference import embedding, files, report  # noqa: E402
from benchmarks.inference.cases import (  # noqa: E402
    ALL,
    CASES,
    MODELS,
    SENTENCES,
    Case,
    weight_elements,
)
from benchmarks.inference.processes import Sample, Side  # noqa: E402
from benchmarks.ladder import CHECKPOINT, machine  # noqa: E402
from benchmarks.roofs import matmul_rate  # noqa: E402

# Library to what has to be importable for it.
PEERS = {
    "transformers": ("transformers",),
    "torch.compile": ("torch",),
    "onnxruntime": ("onnxruntime", "onnx"),
    "openvino": ("openvino", "nncf"),
    "sentence-transformers": ("sentence_transformers",),
}
LEAST, AGAIN = 0.25, 2
BUDGET = 15.0
"""Seconds of a case's rounds, at which it goes on after three of them."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="", help="cases whose names contain this")
    parser.add_argument("--peers", default=",".join(PEERS), help="libraries, with commas between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="that all runs, no figures")
    parser.add_argument("--prepare", action="store_true", help="make the files and stop")
    parser.add_argument("--profile", action="store_true", help="time per operator of fastbert")
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="for the sentences")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    peers = "" if arguments.profile else arguments.peers
    arguments.peers = [name for name in peers.split(",") if name]
    check_peers(parser, arguments.peers)
    if not any(arguments.case in case.name for case in CASES):
        parser.error(f"--case {arguments.case!r} is in no name: {[c.name for c in CASES]}")
    return arguments


def check_peers(parser: argparse.ArgumentParser, peers: list[str]) -> None:
    """Ends with an error where one is unknown or not installed."""
    for peer in peers:
        if peer not in PEERS:
            parser.error(f"--peers must be of {', '.join(PEERS)}, got {peer!r}")
        missing = [name for name in PEERS[peer] if importlib.util.find_spec(name) is None]
        if missing:
            parser.error(
                f"{peer} needs {', '.join(missing)}: pip install 'fastbert[bench]', or leave it "
                "out by --peers"
            )


class Comparison:
    """The processes of all sides, started when they are first needed."""

    def __init__(self, cases: list[Case], arguments: argparse.Namespace):
        self.quick, self.texts = arguments.quick, None
        allowed = {*arguments.peers, "fastbert", "torch"}
        self.cases = cases
        self.names = {
            case.name: [n for n in case.participants if ALL[n].library in allowed] for case in cases
        }
        # Two layers where only that it runs is asked.
        self.settings = {
            name: {**MODELS[name], **({"num_hidden_layers": 2} if self.quick else {})}
            for name in MODELS
        }
        self.sides: dict[tuple[str, str], Side] = {}
        if any(case.batch == SENTENCES for case in cases):
            if not CHECKPOINT.is_dir():
                raise SystemExit(f"no checkpoint in {CHECKPOINT}; `make test` installs it")
            self.texts = embedding.sentences(arguments.texts, 40 if self.quick else 2000)

    def folder(self, case: Case) -> Path:
        """Where the files of a case's model lie."""
        if case.batch == SENTENCES:
            return CHECKPOINT
        layers = self.settings[case.model]["num_hidden_layers"]
        return ROOT / "build" / "inference" / f"{case.model}-{layers}"

    def make_files(self) -> None:
        """What the sides load, and what is compared with."""
        for model in MODELS:
            cases = [c for c in self.cases if c.model == model and c.batch != SENTENCES]
            if cases:
                wanted = {ALL[n].file for case in cases for n in self.names[case.name]} - {None}
                batches = [case.batch for case in cases]
                files.prepare(self.folder(cases[0]), self.settings[model], wanted, batches)

    def started(self, case: Case) -> dict[str, Side]:
        """The sides of a case; those of the cases before that are no longer needed end."""
        rest = self.cases[self.cases.index(case) :]
        needed = {(n, c.model) for c in rest for n in self.names[c.name]}
        for key in [key for key in self.sides if key not in needed]:
            self.sides.pop(key).close()
        keys = [(name, case.model) for name in self.names[case.name]]
        new = [self.start(name, case) for name, model in keys if (name, model) not in self.sides]
        for side in new:
            side.wait()
        return {name: self.sides[name, model] for name, model in keys}

    def close(self) -> None:
        """Ends all processes."""
        for side in self.sides.values():
            side.close()

    def compile_ahead(self) -> None:
        """First calls that take minutes, of all shapes, the sides at once: compiling is one thread.

        Their processes stay for the cases.
        """
        wanted: dict[tuple[str, str], list[Case]] = {}
        for case in self.cases:
            for name in self.names[case.name]:
                if ALL[name].compiles:
                    wanted.setdefault((name, case.model), []).append(case)

        sides = {key: self.start(key[0], cases[0]) for key, cases in wanted.items()}

        def compile_all(key: tuple[str, str]) -> None:
            sides[key].wait()
            for case in wanted[key]:
                seconds = sides[key].prepare(case)["first_call"]
                print(f"{case.name}: {key[0]}: {seconds:.0f} s to compile", flush=True)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(compile_all, wanted))

    def start(self, name: str, case: Case) -> Side:
        """A participant's process for a case's model."""
        texts = self.texts if case.batch == SENTENCES else None
        side = Side(ALL[name], self.folder(case), self.settings[case.model], texts)
        self.sides[name, case.model] = side
        return side

    def measure(self, case: Case, rounds: int) -> dict:
        """All sides in turn."""
        sides = self.started(case)
        prepared = {name: side.prepare(case) for name, side in sides.items()}
        check(case, prepared)
        samples: dict[str, list[Sample]] = {name: [] for name in sides}
        start = time.perf_counter()
        for taken in range(rounds):
            if taken >= 3 and time.perf_counter() - start > BUDGET:
                break
            for name, side in sides.items():
                samples[name].append(self.sample(side))
        return report.row(case, samples, prepared, self.settings[case.model])

    def sample(self, side: Side) -> Sample:
        """One that is quiet, or the least disturbed of a few."""
        if self.quick:
            return side.sample(0.0)
        taken = side.sample(LEAST)
        for _ in range(AGAIN):
            if taken.quiet:
                break
            taken = min(taken, side.sample(LEAST), key=lambda s: s.foreign / s.wall)
        return taken


def check(case: Case, prepared: dict[str, dict]) -> None:
    """Refuses to time a side whose result is wrong.

    Raises:
        AssertionError: naming the side and its error.
    """
    if case.batch == SENTENCES:
        # sentence-transformers' in fp32; ours, where that is left out.
        expected = next(iter(prepared.values()))["vectors"]
        for side in prepared.values():
            side["error"] = embedding.distance(side.pop("vectors"), expected)
    for name, side in prepared.items():
        allowed = ALL[name].tolerance
        # Written so that NaN is refused too.
        if allowed is not None and not side["error"] <= allowed:
            raise AssertionError(
                f"{case.name}: {name}: error {side['error']:.1e}, allowed {allowed:.0e}"
            )


def show_profile(comparison: Comparison) -> None:
    """Where each of fastbert's calls spends its time, and how near it is to the matmul rate."""
    rates = {kind: matmul_rate(getattr(torch, kind)) for kind in ("bfloat16", "float32")}
    for case in comparison.cases:
        for name, side in comparison.started(case).items():
            if ALL[name].library != "fastbert" or case.batch == SENTENCES:
                continue
            check(case, {name: side.prepare(case)})
            events = side.profile()
            total = sum(event["seconds"] for event in events)
            print(f"\n{case.name}: {name}: {1e3 * total:.2f} ms a call in operators")
            for event in sorted(events, key=lambda event: -event["seconds"])[:12]:
                share = event["seconds"] / total
                print(
                    f"  {share:6.1%} {1e3 * event['seconds']:9.3f} ms "
                    f"{event['calls']:6.1f} calls  {event['op']}"
                )
            flops = 2 * weight_elements(comparison.settings[case.model]) * sum(case.batch[0])
            rate = rates[ALL[name].options["dtype"]]
            print(
                f"  products of {flops / 1e9:.1f} GFLOP: {flops / total / rate:.1%} of torch's "
                f"matmul rate here ({rate / 1e9:.0f} GFLOP/s)"
            )


def main() -> int:
    arguments = parse()
    cases = [case for case in CASES if arguments.case in case.name]
    comparison = Comparison(cases, arguments)
    rows: dict[str, dict] = {}
    facts = {"machine": platform.processor() or platform.machine(), **machine()}
    facts |= {p: version(p) for p in arguments.peers if p not in ("torch.compile", "transformers")}
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    comparison.make_files()
    try:
        if arguments.profile:
            show_profile(comparison)
        else:
            comparison.compile_ahead()
        for case in [] if arguments.prepare or arguments.profile else cases:
            start = time.perf_counter()
            rows[case.name] = comparison.measure(case, 1 if arguments.quick else arguments.rounds)
            taken = time.perf_counter() - start
            print(report.markdown({case.name: rows[case.name]}).strip(), flush=True)
            note = "; quick: no figure of this means anything" if arguments.quick else ""
            print(f"({taken:.0f} s{note})\n", flush=True)
    finally:
        comparison.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({"facts": facts, "cases": rows}, indent=1) + "\n")
    if arguments.plot:
        report.plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
