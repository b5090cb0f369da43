"""`attention` by flash-attn: what its function is given, what becomes of its result, and what is
refused. The package itself is stood in for (conftest.py); with a GPU and the package installed,
benchmarks/gpu/run_all.py compares the real one."""

import os
import subprocess
import sys

import pytest
import torch
import transformers

import fastbert
from fastbert import dispatch, use_backend
from fastbert.ops.attention import attention, attention_packed_qkv
from fastbert.ops.linear import linear
from fastbert.peers.flash_attn import GENERATIONS
from fastbert.testing.compare import assert_close_to_oracle
from fastbert.testing.counters import assert_ran
from fastbert.testing.inputs import cu_seqlens

NAMES = list(GENERATIONS)
RNG = torch.tensor([7, 8])


def results(backend, dtype, tensors, starts, dout, **options):
    """out and the gradients of q, k and v."""
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    with use_backend(attention=backend):
        out, _ = attention(*leaves, *starts, **options)
    return out, *torch.autograd.grad(out, leaves, dout.to(dtype))


def compare(name, dtype, dim, lengths_q, lengths_k, *, idle=0, **options):
    """The peer against the reference, in its dtype and in float64."""
    heads = 2
    tensors = [
        torch.randn(sum(lengths) + idle, heads, dim).to(dtype)
        for lengths in (lengths_q, lengths_k, lengths_k)
    ]
    dout = torch.randn(sum(lengths_q) + idle, heads, dim).to(dtype)
    starts = [cu_seqlens(lengths_q)]
    starts.append(starts[0] if lengths_k == lengths_q else cu_seqlens(lengths_k))
    options.update(max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k))
    with assert_ran("attention_fwd", name):
        ours = results(name, dtype, tensors, starts, dout, **options)
    plain = results("reference", dtype, tensors, starts, dout, **options)
    oracle = results("reference", torch.float64, tensors, starts, dout, **options)
    for values in zip(ours, oracle, plain, ("out", "dq", "dk", "dv"), strict=True):
        assert_close_to_oracle(*values, reduction_rows=max(lengths_k))
    return ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 20, 64])
def test_flash_attn_gets_the_arguments(flash_attn, name, dim, dtype):
    compare(name, dtype, dim, [5, 9, 1], [5, 9, 1])
    call = flash_attn[0]
    assert call["q"].shape[-1] == {16: 16, 20: 24, 64: 64}[dim]
    assert call["softmax_scale"] == dim**-0.5
    assert call["deterministic"]
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (9, 9)
    assert set(call["window_size"]) == {None if name == "flash_attn_4" else -1}


@pytest.mark.parametrize("name", NAMES)
def test_flash_attn_with_a_scale_and_other_rows_for_keys(flash_attn, name):
    compare(name, torch.bfloat16, 16, [3, 2, 4], [7, 1, 4], softmax_scale=0.7)
    assert flash_attn[0]["softmax_scale"] == 0.7
    assert (flash_attn[0]["max_seqlen_q"], flash_attn[0]["max_seqlen_k"]) == (4, 7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [(2, 1), (-1, 0), (3, -1), (0, 10**12)], ids=str)
def test_flash_attn_with_a_window(flash_attn, name, window):
    compare(name, torch.bfloat16, 16, [5, 9], [5, 9], window=window)
    unbounded = None if name == "flash_attn_4" else -1
    expected = tuple(side if 0 <= side < 9 else unbounded for side in window)
    assert flash_attn[0]["window_size"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_flash_attn_leaves_nothing_in_idle_rows(flash_attn, name):
    for values in compare(name, torch.bfloat16, 16, [5, 2], [5, 2], idle=3):
        assert (values[7:] == 0).all()


def test_flash_attn_on_packed_qkv(flash_attn):
    qkv, starts = torch.randn(8, 3 * 2 * 16).bfloat16(), cu_seqlens([5, 3])
    found = []
    for name in ("flash_attn", "reference"):
        leaf = qkv.clone().requires_grad_()
        with use_backend(name), assert_ran("attention_fwd", name):
            out, lse = attention_packed_qkv(leaf, 2, starts, max_seqlen=5)
        assert (lse is None) == (name == "flash_attn")
        out.float().square().sum().backward()
        found.append((out, leaf.grad))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


def test_flash_attn_has_dropout_of_its_own(flash_attn):
    """Given on as it is, and drawn anew where fastbert's stream would repeat itself."""
    q = torch.randn(6, 2, 16).bfloat16()
    starts = cu_seqlens([6])
    options = {"max_seqlen_q": 6, "max_seqlen_k": 6, "dropout_p": 0.5, "rng_state": RNG}
    with use_backend("flash_attn"):
        first, second = (attention(q, q, q, starts, starts, **options)[0] for _ in range(2))
    assert flash_attn[0]["dropout_p"] == 0.5
    assert not torch.equal(first, second)


def test_flash_attn_serves_a_model(flash_attn):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = fastbert.BertModel(config).bfloat16().eval()
    ids, mask = torch.randint(50, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    plain = model(ids, attention_mask=mask).last_hidden_state
    with use_backend("flash_attn"), assert_ran("attention_fwd", "flash_attn"):
        ours = model(ids, attention_mask=mask).last_hidden_state
    assert len(flash_attn) == 2
    torch.testing.assert_close(ours, plain, rtol=5e-2, atol=5e-2)


def call(q, k=None, lengths_k=None, **options):
    k = q if k is None else k
    starts = cu_seqlens([q.shape[0]])
    keys = starts if lengths_k is None else cu_seqlens(lengths_k)
    sizes = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
    return attention(q, k, k, starts, keys, **sizes, **options)


DROPOUT = {"dropout_p": 0.1, "rng_state": RNG}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("flash_attn", {"q": torch.ones(2, 1, 8)}, "it takes bf16 and fp16"),
        ("flash_attn", {"q": torch.ones(2, 1, 264).half()}, "the head dim is 264"),
        ("flash_attn", {"q": torch.ones(0, 1, 8).half()}, "at least one row"),
        ("flash_attn_3", {"q": torch.ones(2, 1, 8).half(), **DROPOUT}, "it has no dropout"),
        ("flash_attn_4", {"q": torch.ones(2, 1, 8).half(), **DROPOUT}, "it has no dropout"),
        (
            "flash_attn",
            {"q": torch.ones(2, 1, 8).half(), "dropout_p": 1.0, "rng_state": RNG},
            "below 1",
        ),
        (
            "flash_attn",
            {
                "q": torch.ones(2, 1, 8).half(),
                "k": torch.ones(3, 1, 8).half(),
                "lengths_k": [3],
                "window": (1, 1),
            },
            "aligns a window",
        ),
    ],
)
def test_flash_attn_refuses(flash_attn, name, arguments, message):
    with use_backend(name), pytest.raises(NotImplementedError, match=message):
        call(**arguments)
    assert flash_attn == []


@pytest.mark.parametrize("name", NAMES)
def test_flash_attn_names_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, GENERATIONS[name].module, None)
    with use_backend(name), pytest.raises(NotImplementedError) as raised:
        call(torch.ones(2, 1, 8))
    message = str(raised.value)
    assert GENERATIONS[name].install in message
    for other in ("it takes CUDA tensors", "it takes bf16 and fp16"):
        assert other in message


def test_flash_attn_4_alone_is_not_flash_attn_2(flash_attn, monkeypatch):
    """It lives below the same name, which then is a bare namespace."""
    monkeypatch.delattr(sys.modules["flash_attn"], "flash_attn_varlen_func")
    q = torch.ones(2, 1, 8).half()
    with use_backend("flash_attn"), pytest.raises(NotImplementedError, match="no attribute"):
        call(q)
    with use_backend("flash_attn_4"):
        assert call(q)[0].shape == q.shape


def test_flash_attn_binds_attention_alone(flash_attn):
    x, q = torch.ones(2, 2), torch.ones(2, 1, 8).half()
    with use_backend(linear="reference"), use_backend("flash_attn"):
        with assert_ran("linear_fwd", "reference"):
            linear(x, x)
        with assert_ran("attention_fwd", "flash_attn"):
            call(q)
        with use_backend("reference"), assert_ran("attention_fwd", "reference"):
            call(q)
    with (
        pytest.raises(ValueError, match="linear has no flash_attn"),
        use_backend(linear="flash_attn"),
    ):
        pass


def test_flash_attn_is_never_chosen(flash_attn):
    call(torch.ones(2, 1, 8).half())
    assert flash_attn == []


def test_flash_attn_by_the_environment():
    code = "from fastbert import dispatch; print(dispatch.current_binding())"
    environment = {**os.environ, "FASTBERT_BACKEND": "flash_attn,linear=reference"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str({"attention": "flash_attn", "linear": "reference"})


def test_flash_attn_refuses_compiled_code(flash_attn):
    compiled = torch.compile(lambda q: call(q)[0], backend="eager", fullgraph=True)
    with use_backend("flash_attn"), pytest.raises(Exception, match="outside of compiled code"):
        compiled(torch.ones(2, 1, 8).half())
    assert flash_attn == []


def test_flash_attn_has_no_second_order(flash_attn):
    q = torch.ones(2, 1, 8).half().requires_grad_()
    with use_backend("flash_attn"):
        out, _ = call(q)
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_peers_are_known_to_dispatch():
    for name, rooms in dispatch.PEERS.items():
        assert name not in dispatch.BACKENDS
        for room, path in rooms.items():
            assert room in dispatch.rooms()
            assert callable(dispatch._imported(path))
