"""Triton launchers: on the device of their tensors, in the interpreter where there is no GPU."""

import ast
import contextlib
import json
import threading
import types
from pathlib import Path

import pytest
import torch
from fastbert.kernels import (
    bias_gelu,
    cache,
    common,
    embed_layer_norm,
    linear_gelu,
    mlm_cross_entropy,
    mlm_distillation,
    philox,
    tuned,
)

from fastbert import tune, use_backend
from fastbert.ops.linear_gelu import gelu_mlp, linear_gelu_fwd
from fastbert.reference.bias_gelu import bias_gelu_bwd_reference, bias_gelu_fwd_reference
from fastbert.reference.philox import row_keep_mask_reference, score_keep_mask_reference
from fastbert.testing.compare import assert_bitwise_equal, assert_close_to_oracle

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def _launches(node: ast.AST, guarded: bool, kernels: set[str]):
    """(line, guarded) of every `kernel[grid](...)` below a node; `kernel` may be a parameter."""
    if isinstance(node, ast.With):
        guarded |= any("on_device(" in ast.unparse(item) for item in node.items)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
        launched = node.func.value
        if isinstance(launched, ast.Name) and launched.id in kernels:
            yield node.lineno, guarded
    for child in ast.iter_child_nodes(node):
        yield from _launches(child, guarded, kernels)


def _kernels_of(tree: ast.Module) -> set[str]:
    """Names that are launched in a module: its kernels, and parameters called `kernel`."""
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {f.name for f in functions if f.name.endswith("_kernel")} | {"kernel"}


def test_every_launch_is_on_the_device_of_its_tensors():
    """On a machine with several GPUs a launch elsewhere reads memory that is not there."""
    launched = 0
    for path in KERNELS.glob("*.py"):
        tree = ast.parse(path.read_text())
        for line, guarded in _launches(tree, False, _kernels_of(tree)):
            assert guarded, f"{path.name}:{line} launches outside of on_device()"
            launched += 1
    kernels = sum(path.read_text().count("_kernel(\n") for path in KERNELS.glob("*.py"))
    assert launched >= kernels - 1  # two kernels share the launcher of linear_gelu


def test_launches_enter_the_device_and_see_to_the_cache(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def enter(device):
        seen.append(device)
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(cache, "ensure_writable", lambda: seen.append("cache"))
    second = torch.device("cuda", 1)
    with common.on_device(types.SimpleNamespace(device=second)):
        seen.append("launch")
    assert seen == ["cache", second, "launch", "left"]
    with common.on_device(torch.ones(1)):
        pass
    assert len(seen) == 4


@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (65, 40), (3, 600)], ids=str)
def test_bias_gelu_kernels(device, shape, form):
    x, dy = (torch.randn(shape, device=device) for _ in range(2))
    bias = torch.randn(shape[-1], device=device)
    torch.testing.assert_close(
        bias_gelu.bias_gelu_fwd(x, bias, form),
        bias_gelu_fwd_reference(x, bias, form),
        rtol=1e-6,
        atol=2e-6,
    )
    ours = bias_gelu.bias_gelu_bwd(dy, x, bias, form)
    expected = bias_gelu_bwd_reference(dy, x, bias, form)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("site", [0, 1, 0xFFFFFFF8])
def test_keep_mask_kernels(device, site):
    state = torch.tensor([-5, 2**35 + 1], device=device)
    assert_bitwise_equal(
        philox.row_keep_mask(state, 33, 70, 6554, site),
        row_keep_mask_reference(state, 33, 70, 6554, site),
        "rows",
    )
    sequences = torch.tensor([2, 9], device=device)
    assert_bitwise_equal(
        philox.score_keep_mask(state, sequences, 3, 20, 70, 6554, site),
        score_keep_mask_reference(state, sequences, 3, 20, 70, 6554, site),
        "scores",
    )


def test_deterministic_bias_gradient(device):
    x, dy = (torch.randn(500, 40, device=device) for _ in range(2))
    bias = torch.randn(40, device=device)
    first, second = (bias_gelu.bias_gelu_bwd(dy, x, bias, "none")[1] for _ in range(2))
    assert_bitwise_equal(first, second, "dbias")


def test_embed_layer_norm_flags_ids_outside_their_tables(device):
    """Where the host must not look at ids they are clamped, and the flag says so."""
    words, types, positions = (torch.randn(n, 12, device=device) for n in (9, 2, 5))
    weight = torch.ones(12, device=device)
    ids = torch.tensor([3, 8, 0], device=device)
    place = torch.tensor([0, 4, 1], device=device)
    kind = torch.tensor([0, 1, 1], device=device)
    for wrong, clamped, expected in ((ids, ids, 0), (ids + 1, torch.tensor([4, 8, 1]), 1)):
        flag = torch.zeros((), dtype=torch.int64, device=device)
        options = (words, types, positions, weight, None, 1e-5, None, 0.0, 0, None, torch.float32)
        y, _, _, _ = embed_layer_norm.embed_layer_norm_fwd(wrong, kind, place, *options, flag)
        total = words[clamped.to(device)] + types[kind] + positions[place]
        torch.testing.assert_close(y, torch.layer_norm(total, (12,), weight, None, 1e-5))
        assert flag.item() == expected


def test_mlm_cross_entropy_in_chunks(device, monkeypatch):
    hidden, weight = torch.randn(11, 16, device=device), torch.randn(50, 16, device=device)
    bias, dloss = torch.randn(50, device=device), torch.randn(11, device=device)
    labels = torch.randint(50, (11,), device=device)
    labels[2] = -100
    runs = []
    for most in (4 * 50, 1 << 20):
        monkeypatch.setattr(mlm_cross_entropy, "MAX_LOGITS", most)
        tensors, options = (hidden, weight, bias, labels), (-100, 0.1, 1e-3)
        loss, lse = mlm_cross_entropy.mlm_cross_entropy_fwd(*tensors, *options)
        gradients = mlm_cross_entropy.mlm_cross_entropy_bwd(
            dloss, *tensors, lse, *options, True, True
        )
        runs.append((loss, lse, *gradients))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_mlm_distillation_in_chunks(device, monkeypatch):
    hidden, teacher_hidden = (torch.randn(11, width, device=device) for width in (16, 24))
    weight, teacher_weight = (torch.randn(50, width, device=device) for width in (16, 24))
    bias, teacher_bias = torch.randn(2, 50, device=device)
    labels = torch.randint(50, (11,), device=device)
    labels[2] = -100
    tensors = (hidden, weight, bias, labels, teacher_hidden, teacher_weight, teacher_bias)
    gradients_of_losses = torch.randn(2, 11, device=device)
    runs = []
    for most in (4 * 50, 1 << 20):
        monkeypatch.setattr(mlm_cross_entropy, "MAX_LOGITS", most)
        *losses, lse = mlm_distillation.mlm_distillation_fwd(*tensors, -100, 3.0)
        gradients = mlm_distillation.mlm_distillation_bwd(
            *gradients_of_losses, *tensors, lse, -100, 3.0, True, True
        )
        runs.append((*losses, lse, *gradients))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "inner"), [(300, 72, 264), (130, 40, 13), (1, 8, 8)])
def test_fused_linear_gelu(device, rows, width, inner, dtype):
    """More tiles than programs in each direction, with and without descriptors."""
    inputs = {
        "x": torch.randn(rows, width, device=device),
        "weight": torch.randn(inner, width, device=device) * width**-0.5,
        "bias": torch.randn(inner, device=device),
    }
    narrow = {k: v.to(dtype) for k, v in inputs.items()}
    for form in ("none", "tanh"):
        y, preact = linear_gelu.fused_fwd(*narrow.values(), form, True)
        plain = torch.nn.functional.linear(*narrow.values())
        oracle = torch.nn.functional.linear(*(t.double() for t in narrow.values()))
        assert_close_to_oracle(preact, oracle, plain, "preact")
        assert_close_to_oracle(
            y,
            torch.nn.functional.gelu(oracle, approximate=form),
            torch.nn.functional.gelu(plain, approximate=form),
            "y",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "inner"), [(300, 72, 264), (130, 40, 13), (1, 8, 8)])
def test_fused_gelu_matmul_backward(device, rows, width, inner, dtype):
    dout = torch.randn(rows, width, device=device).to(dtype)
    weight = (torch.randn(width, inner, device=device) * width**-0.5).to(dtype)
    preact = torch.randn(rows, inner, device=device).to(dtype)
    bias = torch.zeros(inner, device=device, dtype=dtype)
    dpreact, dbias = linear_gelu.fused_bwd(dout, weight, preact, bias, "none")
    runs = []
    for kind in (torch.float64, dtype):
        u = preact.to(kind).requires_grad_()
        torch.nn.functional.gelu(u).backward(dout.to(kind) @ weight.to(kind))
        runs.append((u.grad, u.grad.sum(0)))
    for ours, oracle, plain, name in zip((dpreact, dbias), *runs, ("du", "db"), strict=True):
        assert_close_to_oracle(ours, oracle, plain, name, reduction_rows=rows)


def test_every_thread_gives_triton_memory_for_descriptors(device):
    """Triton binds it to a context: what the thread of forward set, that of backward does not see.

    Asked of the module that holds it: the interpreter needs no memory, so nothing else tells.
    """
    from triton.runtime import _allocation

    x, weight = torch.ones(2, 16, device=device), torch.ones(8, 16, device=device)
    found = []

    def launch():
        linear_gelu.fused_fwd(x, weight, None, "none", False)
        found.append(_allocation._allocator.get())

    launch()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert found == [linear_gelu._workspace] * 2


def test_fused_forms_follow_the_table(device, monkeypatch, tmp_path):
    """Without an entry the unfused form runs; a broken file is named."""
    x, weight = torch.randn(20, 16, device=device), torch.randn(24, 16, device=device)
    called = []
    monkeypatch.setattr(linear_gelu, "fused_fwd", lambda *a: called.append(a) or (x, x))
    file = tmp_path / "tuned.json"
    monkeypatch.setenv("FASTBERT_TUNED", str(file))
    entry = tuned.key("linear_gelu_fwd", tuned.arch_of(device), x.dtype, 20, 24, 16)
    assert "|32|24|16" in entry
    for entries, fused in ((None, 0), ({entry: False}, 0), ({entry: True}, 1)):
        if entries is not None:
            file.write_text(json.dumps(entries))
        tuned.table.cache_clear()
        with use_backend("triton"):
            linear_gelu_fwd(x, weight, None, None, "none", True)
        assert len(called) == fused
    file.write_text("{")
    tuned.table.cache_clear()
    with pytest.raises(ValueError, match="is not JSON"):
        tuned.table()
    monkeypatch.undo()
    tuned.table.cache_clear()


def test_fused_forms_serve_the_op(device, monkeypatch):
    """A training step's gradients with both fused forms are those without."""
    shapes = {"x": (20, 16), "weight_in": (24, 16), "bias_in": (24,), "weight_out": (16, 24)}
    values = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    runs = []
    for fused in (False, True):
        monkeypatch.setattr(tuned, "fused_is_faster", lambda *a, fused=fused: fused)
        leaves = {name: v.clone().requires_grad_() for name, v in values.items()}
        with use_backend("triton"):
            gelu_mlp(**leaves, approximate="none").square().sum().backward()
        runs.append([leaf.grad for leaf in leaves.values()])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to tune")
def test_tune_without_a_gpu(capsys):
    assert tune.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
