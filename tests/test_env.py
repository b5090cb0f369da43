"""`fastbert env`: every op, its choice, its reasons, where it has run."""

import json
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
    assert "torch" in text


def test_env_command_prints_json():
    for command in (["fastbert.env"], ["fastbert", "env"]):
        run = subprocess.run(
            [sys.executable, "-m", *command, "--json"], capture_output=True, text=True, check=True
        )
        assert json.loads(run.stdout).keys() == env.report().keys()
