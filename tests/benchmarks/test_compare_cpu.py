"""The comparison of CPU inference: what it makes of samples, what it refuses, and that it runs."""

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def comparison(monkeypatch):
    """Modules of the benchmark, by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def samples(comparison):
    """A list of samples from milliseconds; negative ones are disturbed."""
    kind = comparison("inference.processes").Sample

    def of(*milliseconds):
        return [kind(abs(m) / 1e3, 0.25, 0.2 if m < 0 else 0.0) for m in milliseconds]

    return of


def test_every_side_of_a_case_is_known(comparison):
    cases = comparison("inference.cases")
    for case in cases.CASES:
        assert set(case.participants) <= cases.ALL.keys()
        for target in case.targets:
            assert {target.ours, *target.over} <= set(case.participants), case.name
            assert (target.at_least is None) != (target.at_most is None)
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


def test_disturbed_samples_are_left_out(comparison, samples):
    report = comparison("inference.report")
    assert report.seconds(samples(2, 3, -90, 4, -90)) == 0.003
    assert report.seconds(samples(-90, -92, -94)) == 0.092
    # Pairs of a round: the machine may be slow in both.
    assert report.ratio(samples(1, 10, -1), samples(2, 20, 90)) == 2
    assert report.ratio(samples(1, -1), samples(-4, 4)) == 4


def test_targets_are_held_to_the_fastest_peer(comparison, samples):
    target, verdict = comparison("inference.cases").Target, comparison("inference.report").verdict
    taken = {"ours": samples(10), "slow": samples(40), "fast": samples(15), "floor": samples(8)}
    found = verdict(target("ours", ("slow", "fast", "absent"), at_least=1.5), taken)
    assert found["figure"] == pytest.approx(1.5) and "as fast as fast" in found["text"]
    assert not verdict(target("ours", ("fast",), at_least=1.51), taken)["reached"]
    assert verdict(target("ours", ("floor",), at_most=1.25), taken)["reached"]
    assert not verdict(target("ours", ("floor",), at_most=1.24), taken)["reached"]
    thirds = verdict(target("ours", ("floor",), at_most=0.42, parts=3), taken)
    assert thirds["reached"] and thirds["figure"] == pytest.approx(10 / 24)
    assert verdict(target("absent", ("fast",), at_least=1.0), taken) is None


def test_a_wrong_result_is_not_timed(comparison):
    script, cases = comparison("compare_cpu"), comparison("inference.cases")
    case = next(c for c in cases.CASES if c.name == "bf16 dense 1x16")
    script.check(case, {"fastbert bf16": {"error": 0.01}, "floor bf16": {"error": None}})
    for wrong in (0.1, float("nan")):
        with pytest.raises(AssertionError, match=r"1x16: fastbert bf16: error .* allowed 5e-02"):
            script.check(case, {"fastbert bf16": {"error": wrong}})


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (["openvino"], "openvino needs openvino, nncf: pip install 'fastbert.bench.'"),
        (["tensorflow"], "--peers must be of transformers, .* got 'tensorflow'"),
    ],
)
def test_a_missing_peer_is_an_error(comparison, monkeypatch, capsys, peers, message):
    script = comparison("compare_cpu")
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.check_peers(argparse.ArgumentParser(), peers)
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_sentences_are_spread_over_the_texts(comparison, tmp_path):
    embedding = comparison("inference.embedding")
    path = tmp_path / "texts.txt"
    path.write_text(
        "\n\n".join(f"This is sentence {i}. And a\nsecond one of {i}!" for i in range(9))
    )
    found = embedding.sentences([path], 6)
    assert found[:2] == ["This is sentence 0.", "And a second one of 1!"] and len(found) == 6
    with pytest.raises(ValueError, match="18 sentences, 2000 are needed"):
        embedding.sentences([path])


@pytest.mark.slow
def test_command_runs(tmp_path):
    """Quick, with the peers every installation has."""
    result, picture = tmp_path / "result.json", tmp_path / "result.png"
    run = subprocess.run(
        [
            *(sys.executable, "benchmarks/compare_cpu.py", "--quick", "--peers", "transformers"),
            *("--case", "minilm bf16 1x128", "--json", str(result), "--plot", str(picture)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    cases = json.loads(result.read_text())["cases"]
    sides = cases["minilm bf16 1x128"]["sides"]
    assert sides.keys() == {"transformers sdpa bf16", "floor bf16", "fastbert bf16"}
    assert all(len(side["samples_ms"]) == 1 and side["ms"] > 0 for side in sides.values())
    assert 1e-4 < sides["fastbert bf16"]["error"] < 5e-2
    assert "| fastbert bf16 |" in run.stdout and picture.stat().st_size > 0
