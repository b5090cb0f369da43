"""Choosing an implementation: bindings, refusals, reasons."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from fastbert import dispatch
from fastbert.dispatch import use_backend
from fastbert.ops.bias_gelu import bias_gelu, bias_gelu_fwd
from fastbert.ops.linear import linear
from fastbert.testing.counters import assert_ran

X = torch.randn(4, 8)
CPU_BUILT = not dispatch.not_supported_reasons(
    dispatch.OPS["bias_gelu_fwd"], "cpu", torch.device("cpu"), ()
)


def test_dispatch_binds_all_ops_or_one():
    with use_backend("triton"):
        with assert_ran("bias_gelu_fwd", "triton"):
            bias_gelu(X, approximate="none")
        with assert_ran("linear_fwd", "reference"):  # it has no Triton file: its substitute
            linear(X, X)
        with use_backend(bias_gelu="reference"), assert_ran("bias_gelu_fwd", "reference"):
            bias_gelu(X, approximate="none")
        with assert_ran("bias_gelu_fwd", "triton"):
            bias_gelu(X, approximate="none")


def test_dispatch_auto_takes_the_first_that_can():
    with use_backend("auto"):
        with assert_ran("bias_gelu_fwd", "cpu" if CPU_BUILT else "reference"):
            bias_gelu(X, approximate="none")
        with assert_ran("bias_gelu_fwd", "reference"):
            bias_gelu(X.double(), approximate="none")


@pytest.mark.skipif(not CPU_BUILT, reason="the compiled part is not built")
def test_dispatch_bound_backend_refuses_with_reasons():
    with use_backend("cpu"), pytest.raises(NotImplementedError) as raised:
        bias_gelu(X.double(), approximate="none")
    message = str(raised.value)
    assert "float64(4, 8)" in message
    assert "kernels take fp32" in message
    assert "reference: can" in message


def test_dispatch_unknown_names_raise():
    for arguments, keywords, message in (
        (("fast",), {}, "unknown backend 'fast'; known are auto, reference"),
        ((), {"bias_gleu": "cpu"}, "unknown op 'bias_gleu'; known are add_layer_norm"),
        ((), {"linear": "triton"}, "linear has no triton implementation"),
    ):
        with pytest.raises(ValueError, match=message), use_backend(*arguments, **keywords):
            pass


def test_dispatch_binding_belongs_to_the_context():
    seen = {}

    def elsewhere():
        before = dispatch.counters()
        bias_gelu(X, approximate="none")
        seen.update(dispatch.counters() - before)

    with use_backend("triton"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert ("bias_gelu_fwd", "triton") not in seen


def test_dispatch_backward_keeps_the_forward_binding():
    x = X.clone().requires_grad_()
    with use_backend("triton"):
        y = bias_gelu(x, approximate="none")
    with assert_ran("bias_gelu_bwd", "triton"):
        y.sum().backward()


@pytest.mark.parametrize("value", ["reference", "bias_gelu=reference"])
def test_dispatch_environment_variable(value):
    code = (
        "import torch; from fastbert import dispatch; from fastbert.ops.bias_gelu import bias_gelu;"
        "bias_gelu(torch.ones(2, 2), approximate='none'); print(dict(dispatch.counters()))"
    )
    environment = {**os.environ, "FASTBERT_BACKEND": value}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "('bias_gelu_fwd', 'reference'): 1" in run.stdout
    environment["FASTBERT_BACKEND"] = "quick"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"unknown backend 'quick'" in run.stderr


def test_dispatch_logs_a_rejection_once(caplog):
    dispatch._logged.clear()
    with caplog.at_level("INFO", logger="fastbert"):
        dispatch.log_once("op", "cpu", "a reason")
        dispatch.log_once("op", "cpu", "a reason")
    assert caplog.messages == ["op: not using cpu: a reason"]


def test_dispatch_describes_every_op():
    rows = {row["op"]: row for row in dispatch.describe() if row["device"] == "cpu"}
    assert rows.keys() == dispatch.OPS.keys()
    assert all(row["chosen"] == "cpu" and not row["rejected"] for row in rows.values())
    assert rows["bias_gelu_fwd"]["proven"]["triton"] == "interpreter"


def test_dispatch_runs_without_autocast():
    """An implementation fixes its dtypes itself; autocast must not reach inside."""
    with torch.autocast("cpu", torch.bfloat16):
        assert bias_gelu_fwd(X, None, "none").dtype == torch.float32


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [((7, 5), ["Triton kernels need compute capability 8.0 (bf16 tensor cores), this has 7.5"])]
    + [(c, []) for c in ((8, 0), (9, 0), (12, 0))],
    ids=str,
)
def test_dispatch_refuses_old_gpus(monkeypatch, capability, reasons):
    from fastbert import dispatch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(dispatch._built, ("unpad", "cuda"), None)
    dispatch._capability_reasons.cache_clear()
    device = torch.device("cuda", 0)
    assert dispatch._triton_reasons(device) == reasons
    of_cuda = dispatch._compiled_reasons(dispatch.OPS["unpad"], "cuda", device)
    assert of_cuda == [reason.replace("Triton", "CUDA") for reason in reasons]
    dispatch._capability_reasons.cache_clear()
