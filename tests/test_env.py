"""`fastbert env`: every op, its choice, its reasons, where it has run."""

import json
import re
import subprocess
import sys

from fastbert import dispatch, env, extension


def test_env_lists_every_op():
    data = env.report()
    assert {row["op"] for row in data["ops"]} == dispatch.OPS.keys()
    text = env.render(data)
    chosen = "cpu" if extension.load() is None else "reference"
    assert f"attention_packed_qkv_bwd  cpu: {chosen}" in text
    assert data["cpu"]["C++ kernels"] == (extension.cpu_isa() or "not loaded")
    assert "checked in Triton's interpreter only" in text
    assert "checked in emulation only" in text
    assert re.search(r"^CUDA part +(loaded|CUDA kernels .*)$", text, re.M)
    assert "torch" in text


def test_env_gives_a_parts_reason_once(monkeypatch):
    """A GPU's ops without the CUDA part name the part, not its reason."""
    monkeypatch.setattr(extension, "load", lambda part="_C": f"{part} was left out")
    data = env.report()
    reasons = {"cuda": ["_C_cuda was left out"], "triton": ["of its own"]}
    data["ops"] = [{**data["ops"][0], "device": "cuda", "rejected": reasons}]
    text = env.render(data)
    assert text.count("_C_cuda was left out") == 1
    assert "not cuda: the CUDA part is not loaded" in text
    assert "not triton: of its own" in text


def test_env_command_prints_json():
    for command in (["fastbert.env"], ["fastbert", "env"]):
        run = subprocess.run(
            [sys.executable, "-m", *command, "--json"], capture_output=True, text=True, check=True
        )
        assert json.loads(run.stdout).keys() == env.report().keys()
