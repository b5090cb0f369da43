"""Triton's cache: one that cannot be written is replaced, two processes share one."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import triton
from fastbert.kernels import cache

ROOT = Path(__file__).resolve().parents[2]
KERNEL = "row_keep_mask"


def start_report(folder: Path, out: Path) -> subprocess.Popen:
    """Compiles one kernel for every target, ahead of time, into the cache `folder`."""
    command = ["benchmarks/gpu/kernel_report.py", "--only", KERNEL, "--json", str(out)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


def test_two_processes_compile_into_one_cache(tmp_path):
    outs = [tmp_path / "first.json", tmp_path / "second.json"]
    for process in [start_report(tmp_path / "cache", out) for out in outs]:
        finish(process)
    first, second = (json.loads(out.read_text()) for out in outs)
    assert len(first) > 1
    assert first == second
    assert list((tmp_path / "cache").glob("*/*.cubin"))
    assert not list((tmp_path / "cache").glob("*/tmp.*"))


def test_compiling_where_the_cache_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("a user's")
    errors = finish(start_report(file, tmp_path / "rows.json"))
    assert errors.count("cannot be written") == 1
    assert len(json.loads((tmp_path / "rows.json").read_text())) > 1
    assert file.read_text() == "a user's"
    private = errors.split("compiling into ")[1].split(" until")[0]
    assert not Path(private).exists()


@pytest.fixture
def decide(monkeypatch):
    """Decides anew; Triton's setting is put back afterwards."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    cache.ensure_writable.cache_clear()
    yield cache.ensure_writable
    cache.ensure_writable.cache_clear()
    triton.knobs.cache.__dict__.pop("dir", None)


def test_cache_is_replaced_once(decide, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="fastbert"):
        private = decide()
        assert decide() is private
    assert len(caplog.messages) == 1
    assert triton.knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == private.name
    assert Path(private.name).stat().st_mode & 0o077 == 0
    private.cleanup()


def test_cache_that_can_be_written_stays(decide, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new"))
    assert decide() is None
    assert triton.knobs.cache.dir == str(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    assert caplog.messages == []


def test_cache_without_permission_is_replaced(decide, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    make = tempfile.TemporaryDirectory

    def refuse_inside(dir=None, **options):
        if dir is not None:
            raise PermissionError(13, "Permission denied", dir)
        return make(**options)

    # Root may write anywhere, so what others are told is said by hand.
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse_inside)
    private = decide()
    assert triton.knobs.cache.dir == private.name != str(tmp_path)
    private.cleanup()
