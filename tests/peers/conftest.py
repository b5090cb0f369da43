"""Stand-ins for packages that need a GPU: plain PyTorch behind the signatures they document."""

import importlib.machinery
import sys
import types

import pytest
import torch


def dense(q, k, v, starts_q, starts_k, scale, window, dropout_p):
    """Attention of each sequence; a window is aligned with the last rows, as flash-attn has it."""
    left, right = (10**9 if side in (None, -1) else side for side in window)
    out = torch.full_like(q, float("nan"))
    for i in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        count_q, count_k = starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i]
        scores = torch.einsum("qnd,knd->nqk", q[rows], k[keys]).float() * scale
        place = torch.arange(count_q)[:, None] + count_k - count_q
        distance = torch.arange(count_k) - place
        scores = scores.masked_fill((distance < -left) | (distance > right), float("-inf"))
        weights = torch.dropout(scores.softmax(-1), dropout_p, dropout_p > 0).to(v.dtype)
        out = out.index_put(
            (torch.arange(rows.start, rows.stop),), torch.einsum("nqk,knd->qnd", weights, v[keys])
        )
    return out


class _Dense(torch.autograd.Function):
    """Gradients by autograd, and NaN where flash-attn writes none: in rows of no sequence."""

    @staticmethod
    def forward(ctx, q, k, v, starts_q, starts_k, scale, window, dropout_p):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out = dense(*leaves, starts_q, starts_k, scale, window, dropout_p)
            ctx.real, ctx.leaves = out[: starts_q[-1]], leaves
        ctx.ends = (starts_q[-1], starts_k[-1], starts_k[-1])
        return out.detach()

    @staticmethod
    def backward(ctx, dout):
        gradients = torch.autograd.grad(ctx.real, ctx.leaves, dout[: ctx.ends[0]])
        for gradient, idle in zip(gradients, ctx.ends, strict=True):
            gradient[idle:] = float("nan")
        return (*gradients, *(None,) * 5)


def _compute(calls, q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    calls.append({"q": q, "k": k, "v": v, **options})
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.shape[-1] % 8 == 0
    assert not options["causal"]
    starts = (cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
    scale, window = options["softmax_scale"], options["window_size"]
    return _Dense.apply(q, k, v, *starts, scale, window, options.get("dropout_p", 0.0))


def _second_generation(calls):
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
        block_table=None,
    ):
        sizes = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        options = {"causal": causal, "window_size": window_size, "deterministic": deterministic}
        options.update(dropout_p=dropout_p, softmax_scale=softmax_scale)
        return _compute(calls, q, k, v, cu_seqlens_q, cu_seqlens_k, **sizes, **options)

    return flash_attn_varlen_func


def _later_generation(calls, unbounded):
    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        softmax_scale=None,
        causal=False,
        window_size=(unbounded, unbounded),
        deterministic=False,
    ):
        sizes = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        options = {"causal": causal, "window_size": window_size, "deterministic": deterministic}
        options["softmax_scale"] = softmax_scale
        out = _compute(calls, q, k, v, cu_seqlens_q, cu_seqlens_k, **sizes, **options)
        return out, torch.empty(q.shape[1], q.shape[0])

    return flash_attn_varlen_func


def install(monkeypatch, name: str, **contents) -> None:
    """A module of that name, with these contents, importable during the test."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def flash_attn(monkeypatch):
    """All three generations on CPU tensors; the list of the calls they get."""
    from fastbert.peers import flash_attn

    calls = []
    monkeypatch.setattr(flash_attn, "DEVICES", ("cpu",))
    functions = {
        "flash_attn": _second_generation(calls),
        "flash_attn_interface": _later_generation(calls, -1),
        "flash_attn.cute": _later_generation(calls, None),
    }
    for name, function in functions.items():
        install(monkeypatch, name, flash_attn_varlen_func=function)
    return calls


@pytest.fixture
def apex(monkeypatch):
    """NVIDIA's apex on CPU tensors; the list of the calls it gets."""
    from fastbert.peers import apex

    calls = []

    def fused_layer_norm_affine(
        input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False
    ):
        calls.append((input, eps))
        assert not torch.is_autocast_enabled("cpu")
        return torch.layer_norm(input, normalized_shape, weight, bias, eps)

    monkeypatch.setattr(apex, "DEVICES", ("cpu",))
    for name in ("apex", "apex.normalization", "amp_C"):
        install(monkeypatch, name)
    install(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        fused_layer_norm_affine=fused_layer_norm_affine,
    )
    return calls


def _lamb_mp(chunk, noop, lists, lr, beta1, beta2, eps, step, bias_correction, weight_decay, *rest):
    """The kernel's contract in plain PyTorch: what it is given on the device it reads there."""
    grad_averaging, mode, global_norm, max_norm, use_nvlamb, found_inf, inv_scale = rest
    assert chunk > 0 and bias_correction == grad_averaging == mode == 1
    for tensor in (noop, lr, step, global_norm, max_norm, found_inf, inv_scale):
        assert isinstance(tensor, torch.Tensor) and tensor.numel() == 1
    assert noop.dtype == step.dtype == torch.int32 and lr.dtype == torch.float32
    if found_inf.item():
        return
    clip = max(global_norm.item() / max_norm.item(), 1.0)
    for grad, weight, moment, square in zip(*lists, strict=True):
        grad = grad * inv_scale / clip
        moment.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
        t = step.item()
        update = moment / (1 - beta1**t) / ((square / (1 - beta2**t)).sqrt() + eps)
        update += weight_decay * weight
        norms = weight.norm().item(), update.norm().item()
        adapts = (use_nvlamb or weight_decay) and all(norms)
        weight.sub_(update * (lr * (norms[0] / norms[1] if adapts else 1.0)))


@pytest.fixture
def apex_lamb(apex, monkeypatch):
    """NVIDIA's apex with its LAMB kernel."""

    def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
        return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)

    install(monkeypatch, "amp_C", multi_tensor_lamb_mp=_lamb_mp)
    install(monkeypatch, "apex.multi_tensor_apply", multi_tensor_applier=multi_tensor_applier)
