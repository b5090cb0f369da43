"""What run_all.py times: kernels, Triton's and those in CUDA C++ where they are built, against
torch and what else is installed, models against transformers; and the roofs they are held to. On a
CPU the same code runs at toy sizes, to be known to work."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.models.twins import adamw, masked_lm_step, padded, twins, with_labels
from benchmarks.shapes import BASE, DENSE_8X128, RAGGED_8X512, RAGGED_32X128, TINY
from fastbert import GraphedForward, extension, use_backend
from fastbert.dispatch import COMPILED, bound, current_binding
from fastbert.ops.add_layer_norm import add_layer_norm
from fastbert.ops.attention import attention
from fastbert.ops.bias_gelu import bias_gelu
from fastbert.ops.disentangled_attention import disentangled_attention
from fastbert.ops.embed_layer_norm import embed_layer_norm
from fastbert.ops.mlm_cross_entropy import mlm_cross_entropy
from fastbert.ops.mlm_distillation import mlm_distillation
from fastbert.ops.unpad import unpad
from fastbert.padding import pack
from fastbert.peers import apex, flash_attn
from fastbert.reference.disentangled_attention import relative_buckets
from fastbert.testing.plain import plain_mlm_distillation
from fastbert.train import GraphedStep

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 30_522,
}
TOY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}
P = 0.1
FLUSH_BYTES = 256 << 20
OURS, OURS_IN_CUDA = "fastbert", "fastbert CUDA C++"


class Clock:
    """Times functions in turn, each with cold caches, by CUDA events; by the host on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.rounds = 15 if self.on_gpu else 1
        self.flush = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.int8, device=device)

    def medians(self, functions: dict[str, Callable]) -> dict[str, float]:
        """Milliseconds of each; a function that raises is left out, with its reason printed."""
        working = {name: f for name, f in functions.items() if self._works(name, f)}
        samples = {name: [] for name in working}
        for _ in range(self.rounds):
            for name, function in working.items():
                samples[name].append(self._once(function))
        if self.on_gpu:
            torch.cuda.synchronize()
        return {
            name: statistics.median(self._ms(s) for s in found) for name, found in samples.items()
        }

    def _works(self, name: str, function: Callable) -> bool:
        try:
            for _ in range(2 if self.on_gpu else 1):
                function()
            if self.on_gpu:
                torch.cuda.synchronize()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"{name}: left out, {type(error).__name__}: {str(error)[:200]}", flush=True)
            return False
        return True

    def _once(self, function: Callable):
        if not self.on_gpu:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        self.flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        return start, stop

    def _ms(self, sample) -> float:
        return sample[0].elapsed_time(sample[1]) if self.on_gpu else 1e3 * sample


def roofs(clock: Clock) -> dict[str, float]:
    """Copy bandwidth (bytes a second, read and written) and bf16 matmul rate (FLOP a second)."""
    size = 1 << 30 if clock.on_gpu else 1 << 20
    side = 8192 if clock.on_gpu else 64
    source = torch.empty(size, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
    ms = clock.medians({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b})
    return {"bytes": 2e3 * size / ms["copy"], "flops": 2e3 * side**3 / ms["matmul"]}


def _with_cuda(functions: dict[str, Callable], device: torch.device) -> dict[str, Callable]:
    """The functions, and ours by the CUDA C++ kernels where they are built."""
    backend = "cuda" if device.type == "cuda" else "cuda_emulated"
    if OURS not in functions or extension.load(COMPILED[backend]) is not None:
        return functions
    with use_backend(backend):
        binding = current_binding()

    def ours_in_cuda():
        with bound(binding):
            return functions[OURS]()

    return {**functions, OURS_IN_CUDA: ours_in_cuda}


def _gradients(function: Callable, leaves: list[torch.Tensor]) -> Callable:
    """Backward alone, over a graph made once."""
    out = function()
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _both(name: str, functions: dict[str, Callable], leaves, work) -> Iterator[tuple]:
    """Cases (name, functions, unit, amount) of forward and backward; `work` is (unit, amount
    forward, amount backward)."""
    unit, forward, backward = work
    functions = _with_cuda(functions, leaves[0].device)
    yield f"{name} forward", functions, unit, forward
    made = {}
    for rival, function in functions.items():
        try:
            made[rival] = _gradients(function, leaves)
        except (RuntimeError, NotImplementedError) as error:
            print(f"{name} backward {rival}: left out, {str(error)[:200]}", flush=True)
    yield f"{name} backward", made, unit, backward


def kernel_cases(device: torch.device) -> Iterator[tuple]:
    """(name, {rival: function}, "bytes" or "flops", how many) of every op, bf16."""
    on_gpu = device.type == "cuda"
    rows = 16_384 if on_gpu else 8
    state = torch.tensor([1, 2], device=device)
    half = {"device": device, "dtype": torch.bfloat16}
    for columns in (768, 1024) if on_gpu else (32,):
        yield from _norm_cases(rows, columns, half, state)
    columns = 3072 if on_gpu else 64
    x = torch.randn(rows, columns, **half, requires_grad=True)
    bias = torch.randn(columns, **half, requires_grad=True)
    yield from _both(
        f"bias_gelu {rows}x{columns}",
        {
            "fastbert": lambda: bias_gelu(x, bias, approximate="none"),
            "torch": lambda: F.gelu(x + bias),
        },
        [x, bias],
        ("bytes", 4 * rows * columns, 6 * rows * columns),
    )
    yield from _embedding_cases(rows, half, state)
    yield from _attention_cases(on_gpu, half, state)
    yield from _disentangled_cases(on_gpu, half)
    yield from _loss_cases(on_gpu, half)
    yield from _distillation_cases(on_gpu, half)
    x = torch.randn(2 * rows, 768, **half)
    indices = torch.randperm(2 * rows, device=device)[:rows]
    functions = {"fastbert": lambda: unpad(x, indices), "torch": lambda: x[indices]}
    yield f"unpad {rows}x768", _with_cuda(functions, device), "bytes", 4 * rows * 768


def _norm_cases(rows: int, columns: int, half: dict, state) -> Iterator[tuple]:
    x, residual = (torch.randn(rows, columns, **half, requires_grad=True) for _ in range(2))
    vectors = [torch.randn(columns, **half, requires_grad=True) for _ in range(2)]

    def ours():
        options = {"eps": 1e-12, "dropout_p": P, "site": 1, "rng_state": state}
        return add_layer_norm(x, residual, *vectors, **options)

    def theirs():
        return F.layer_norm(residual + F.dropout(x, P), (columns,), *vectors, 1e-12)

    rivals = {"fastbert": ours, "torch": theirs}
    if apex.why_not_importable() is None:
        rivals["apex"] = lambda: apex.layer_norm(residual + F.dropout(x, P), *vectors, 1e-12)
    moved = 4 * rows * columns * 2
    yield from _both(
        f"add_layer_norm {rows}x{columns}",
        rivals,
        [x, residual, *vectors],
        ("bytes", moved, moved),
    )


def _embedding_cases(rows: int, half: dict, state) -> Iterator[tuple]:
    columns = 768
    ids = torch.randint(30_522, (rows,), device=half["device"])
    place = torch.arange(rows, device=half["device"]) % 512
    tables = [torch.randn(n, columns, **half, requires_grad=True) for n in (30_522, 2, 512)]
    vectors = [torch.randn(columns, **half, requires_grad=True) for _ in range(2)]

    def ours():
        return embed_layer_norm(
            ids, ids % 2, place, *tables, *vectors, eps=1e-12, dropout_p=P, rng_state=state
        )

    def theirs():
        index = (ids, ids % 2, place)
        h = sum(F.embedding(i, table) for i, table in zip(index, tables, strict=True))
        return F.dropout(F.layer_norm(h, (columns,), *vectors, 1e-12), P)

    element = 2 * rows * columns
    yield from _both(
        f"embed_layer_norm {rows}x{columns}",
        {"fastbert": ours, "torch": theirs},
        [*tables, *vectors],
        ("bytes", 5 * element, 2 * element + 2 * 2 * 30_522 * columns),
    )


def _attention_cases(on_gpu: bool, half: dict, state) -> Iterator[tuple]:
    batches = {"16x512": [512] * 16, "ragged 64x512": [int(8 * (i + 1)) for i in range(64)]}
    for name, lengths in batches.items() if on_gpu else {"2x9": [9, 5]}.items():
        heads, dim = (16, 64) if on_gpu else (2, 16)
        longest, count, total = max(lengths), len(lengths), sum(lengths)
        q, k, v = (torch.randn(total, heads, dim, **half, requires_grad=True) for _ in range(3))
        starts = torch.tensor([0, *lengths]).cumsum(0).to(half["device"], torch.int32)
        padded_qkv = [
            torch.randn(count, heads, longest, dim, **half, requires_grad=True) for _ in range(3)
        ]
        flops = 4 * heads * dim * sum(length**2 for length in lengths)
        for p in (0.0, P):

            def ours(q=q, k=k, v=v, starts=starts, longest=longest, p=p):
                options = {"dropout_p": p, "site": 0, "rng_state": state if p else None}
                size = {"max_seqlen_q": longest, "max_seqlen_k": longest}
                return attention(q, k, v, starts, starts, **size, **options)[0]

            rivals = {"fastbert": ours}
            packed = (q, k, v, starts, starts, longest, longest, dim**-0.5, None, p)
            for peer, generation in flash_attn.GENERATIONS.items():
                if flash_attn.why_not_importable(peer) is None and (p == 0 or generation.dropout):
                    rivals[peer] = functools.partial(flash_attn.varlen_attention, peer, *packed)
            yield from _both(
                f"attention {name} dropout {p}", rivals, [q, k, v], ("flops", flops, 2.5 * flops)
            )
            yield from _both(
                f"attention {name} dropout {p}, padded",
                {
                    "torch sdpa": lambda x=padded_qkv, p=p: F.scaled_dot_product_attention(
                        *x, dropout_p=p
                    )
                },
                padded_qkv,
                ("flops", flops, 2.5 * flops),
            )


def _disentangled_cases(on_gpu: bool, half: dict) -> Iterator[tuple]:
    """Full sequences, as long as there are buckets: a product with a table has as many FLOPs as one
    with the keys. Forward has two products of either kind, backward five and six."""
    count, length, heads, dim = (32, 512, 12, 64) if on_gpu else (2, 9, 2, 16)
    span, reach = (256, 512) if on_gpu else (4, 6)
    total, scale = count * length, (3 * dim) ** -0.5
    leaves = [torch.randn(total, heads, dim, **half, requires_grad=True) for _ in range(3)]
    leaves += [torch.randn(2 * span, heads, dim, **half, requires_grad=True) for _ in range(2)]
    starts = torch.arange(0, total + 1, length, dtype=torch.int32, device=half["device"])
    place = torch.arange(length, device=half["device"])
    distance = (place[:, None] - place).clamp(-reach, reach)
    bucket = relative_buckets(span, reach, half["device"]).long()[distance + reach]
    index = bucket.expand(count, heads, -1, -1)

    def ours():
        positions = {"position_buckets": span, "max_relative_positions": reach}
        size = {"max_seqlen": length, "softmax_scale": scale}
        return disentangled_attention(*leaves, starts, **size, **positions)[0]

    def theirs():
        q, k, v = (t.view(count, length, heads, dim).transpose(1, 2) for t in leaves[:3])
        position_key, position_query = (t.permute(1, 2, 0) for t in leaves[3:])
        scores = q @ k.transpose(2, 3) + (q @ position_key).gather(-1, index)
        by_key = (k @ position_query).gather(-1, index.transpose(2, 3))
        weights = ((scores + by_key.transpose(2, 3)) * scale).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(total, heads, dim)

    product = 2 * count * length**2 * heads * dim
    yield from _both(
        f"disentangled_attention {count}x{length}",
        {"fastbert": ours, "torch": theirs},
        leaves,
        ("flops", 4 * product, 11 * product),
    )


def _loss_cases(on_gpu: bool, half: dict) -> Iterator[tuple]:
    rows, columns, vocab = (2458, 768, 30_522) if on_gpu else (5, 16, 50)
    hidden = torch.randn(rows, columns, **half, requires_grad=True)
    weight = torch.randn(vocab, columns, **half, requires_grad=True)
    labels = torch.randint(vocab, (rows,), device=half["device"])
    flops = 2 * rows * columns * vocab
    yield from _both(
        f"mlm_cross_entropy {rows}x{vocab}",
        {
            "fastbert": lambda: mlm_cross_entropy(hidden, weight, None, labels),
            "torch": lambda: F.cross_entropy(
                F.linear(hidden, weight).float(), labels, reduction="none"
            ),
        },
        [hidden, weight],
        ("flops", flops, 3 * flops),
    )


def _distillation_cases(on_gpu: bool, half: dict) -> Iterator[tuple]:
    """Student and teacher as wide as each other; backward makes both logits again."""
    rows, columns, vocab = (2458, 768, 30_522) if on_gpu else (5, 16, 50)
    hidden = torch.randn(rows, columns, **half, requires_grad=True)
    weight = torch.randn(vocab, columns, **half, requires_grad=True)
    labels = torch.randint(vocab, (rows,), device=half["device"])
    teacher = [torch.randn(size, columns, **half) for size in (rows, vocab)]
    inputs = (hidden, weight, None, labels, *teacher, None)
    flops = 2 * rows * columns * vocab
    yield from _both(
        f"mlm_distillation {rows}x{vocab}",
        {
            "fastbert": lambda: sum(mlm_distillation(*inputs)),
            "torch": lambda: sum(plain_mlm_distillation(*inputs)),
        },
        [hidden, weight],
        ("flops", 2 * flops, 4 * flops),
    )


def time_kernels(device: torch.device, roof: dict[str, float]) -> Iterator[dict]:
    """One row per case: milliseconds of each rival, and ours as a fraction of the roof."""
    clock = Clock(device)
    with use_backend("triton"):
        for name, functions, unit, amount in kernel_cases(device):
            ms = clock.medians(functions)
            row = {"case": name, "ms": {k: round(v, 4) for k, v in ms.items()}}
            row["of roof"] = {
                ours: round(amount * 1e3 / ms[ours] / roof[unit], 3)
                for ours in (OURS, OURS_IN_CUDA)
                if ours in ms
            }
            yield row


def time_models(device: torch.device, size: str, compiled: bool) -> Iterator[dict]:
    """Forward and masked-LM step, bf16 autocast, of ours and transformers' sdpa; with `compiled`,
    of transformers under torch.compile."""
    clock, on_gpu = Clock(device), device.type == "cuda"
    settings = {"base": BASE, "large": LARGE}[size] if on_gpu else TOY
    batches = {"ragged 32x128": RAGGED_32X128, "full 8x128": DENSE_8X128}
    batches["ragged 8x512"] = RAGGED_8X512
    if not on_gpu:
        batches = {"toy": TINY}
    models = {n: m.to(device) for n, m in twins("BertForMaskedLM", settings).items()}
    if compiled:
        models = {"transformers compiled": torch.compile(models["transformers"], dynamic=False)}
    for name, batch in batches.items():
        inputs = padded(batch, settings["vocab_size"])
        labelled = {k: v.to(device) for k, v in with_labels(inputs).items()}
        inputs = {k: v.to(device) for k, v in inputs.items()}
        tokens = sum(batch[0])
        for kind, function in (("forward", _forward), ("step", _step)):
            runs = {n: function(m, inputs, labelled) for n, m in models.items()}
            if not compiled:
                runs["fastbert, one graph"] = GRAPHED[kind](models["fastbert"], labelled)
            ms = clock.medians(runs)
            yield {
                "case": f"BERT-{size} {kind} {name}" + (" compiled" if compiled else ""),
                "ms": {k: round(v, 3) for k, v in ms.items()},
                "tokens a second": {k: round(1e3 * tokens / v) for k, v in ms.items()},
            }


def _packed_features(labelled: dict, names: tuple[str, ...]) -> tuple[list[dict], int]:
    """The sequences of a padded batch, and how many tokens they have, to the next 64."""
    rows = {n: labelled[n].cpu() for n in ("attention_mask", *names)}
    lengths = rows["attention_mask"].sum(1).tolist()
    features = [{n: rows[n][i, :length] for n in names} for i, length in enumerate(lengths)]
    return features, -(-sum(lengths) // 64) * 64


def _graphed_forward(model, labelled) -> Callable:
    features, num_tokens = _packed_features(labelled, ("input_ids",))
    forward = GraphedForward(
        model.eval(),
        token_buckets=(num_tokens,),
        num_sequences=len(features),
        max_seqlen=labelled["input_ids"].shape[1],
        dtype=torch.bfloat16,
    )
    return lambda: forward(features)


def _graphed_step(model, labelled) -> Callable:
    features, num_tokens = _packed_features(labelled, ("input_ids", "labels"))
    batch = pack(
        features,
        num_tokens=num_tokens,
        num_sequences=len(features),
        num_labels=num_tokens // 4,
        max_seqlen=labelled["input_ids"].shape[1],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = GraphedStep(model.train(), optimizer, max_grad_norm=None, dtype=torch.bfloat16)
    return lambda: step(batch)


GRAPHED = {"forward": _graphed_forward, "step": _graphed_step}


def _forward(model, inputs, labelled) -> Callable:
    model.eval()

    def run():
        with torch.no_grad(), torch.autocast(inputs["input_ids"].device.type, torch.bfloat16):
            model(**inputs)

    return run


def _step(model, inputs, labelled) -> Callable:
    return masked_lm_step(model.train(), labelled, adamw(model), autocast=True)
