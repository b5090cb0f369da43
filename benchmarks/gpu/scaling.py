"""A model of the time of a pretraining step against the number of GPUs: BERT-large, 1 to 1,024.

    python benchmarks/gpu/scaling.py [--plot docs/scaling.png] > docs/scaling.md

Compute is the roofline's (roofline.py), at a share of it that kernels are taken to reach.
Communication is bytes over bandwidth and latency, in machines of eight GPUs: a gradient is added up
within a machine, its eighths across machines, and shared out within it again. Nothing is measured.

Letters: P parameters, L layers, C hidden, F intermediate, n GPUs.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from roofline import BF16, BYTES_A_SECOND, FLOPS_A_SECOND, FP32, TOKENS, VOCAB, costs

L, C, F = 24, 1024, 4096
POSITIONS = 512
# Pooler, next sentence, the masked-LM transform and bias, and the embedding's norm.
HEADS = 2 * C * C + 8 * C + VOCAB + 2
P = (VOCAB + POSITIONS + 2) * C + L * (4 * C * C + 2 * C * F + 9 * C + F) + HEADS
GPUS = tuple(1 << i for i in range(11))
A_MACHINE = 8

# What is assumed.
REACHED = 0.6
"""Share of the roofline that kernels reach."""
WITHIN, ACROSS = 350e9, 45e9
"""Bytes a second and GPU, each way: of NVLink's 450 GB/s, of a network card of 400 Gbit/s each."""
LATENCY_WITHIN, LATENCY_ACROSS = 5e-6, 15e-6
"""Seconds of a hop; a collective takes log2 of them."""
BUCKET = 25 << 20
"""Bytes that DistributedDataParallel exchanges at a time."""

BATCHES = {
    "131,072 tokens a step, BERT's (Devlin et al. 2019)": 256 * 512,
    "16.8 million tokens a step, LAMB's (You et al. 2020)": 32_768 * 512,
}


# --- compute


@dataclass(frozen=True)
class Compute:
    """Seconds of a micro-batch: the forward pass, the backward pass."""

    forward: float
    backward: float


def compute(tokens: int) -> Compute:
    """Of so many tokens in sequences of 512, taken in proportion to the roofline's 16,384.

    Weights are read once for a micro-batch however small it is; that floor is added for matmuls.
    """
    share = tokens / TOKENS
    by_name = {cost.op: cost.microseconds * 1e-6 for cost in costs(C, F)}
    gemm = 2 * TOKENS * C * C / FLOPS_A_SECOND
    weights = 4 * C * C * BF16 / BYTES_A_SECOND

    def seconds(direction: str, matmuls: int) -> float:
        norms = 2 * by_name[f"add_layer_norm {direction}"] + by_name[f"attention {direction}"]
        # Queries, keys, values and attention's output are four products of C by C, the second
        # matrix of the feed-forward is as large as the first.
        projections = max(4 * gemm * share, weights) * matmuls
        feed_forward = max(2 * by_name["linear_gelu forward"] * share, 2 * weights) * matmuls
        ends = by_name[f"embed_layer_norm {direction}"] + by_name[f"mlm_cross_entropy {direction}"]
        return (L * (norms * share + projections + feed_forward) + ends * share) / REACHED

    return Compute(seconds("forward", 1), seconds("backward", 2))


def optimizer(parameters: float) -> float:
    """AdamW in fp32: weights, gradients and moments are read, all but gradients written."""
    return parameters * 7 * FP32 / BYTES_A_SECOND / REACHED


# --- communication


def scatter(size: float, n: int) -> float:
    """Seconds of a reduce-scatter, or an all-gather, of `size` bytes over n GPUs."""
    inside = min(n, A_MACHINE)
    machines = n // inside
    seconds = size * (inside - 1) / inside / WITHIN + LATENCY_WITHIN * math.log2(inside)
    return (
        seconds
        + size / inside * (machines - 1) / machines / ACROSS
        + (LATENCY_ACROSS * math.log2(machines))
    )


def all_reduce(size: float, n: int) -> float:
    """A reduce-scatter and an all-gather, bucket by bucket."""
    buckets = math.ceil(size / BUCKET)
    return 2 * buckets * scatter(size / buckets, n)


def exposed(communication: float, behind: float, pieces: int) -> float:
    """What of a communication in pieces is left when it runs behind a computation: what does not
    fit behind it, and the last piece, which begins with its end."""
    return max(communication - behind, communication / pieces)


# --- steps


def micro_batches(tokens: int) -> tuple[int, int]:
    """How many, of how many tokens, one GPU takes its share of a step in."""
    count = math.ceil(tokens / TOKENS)
    return count, tokens // count


def ddp(tokens: int, n: int, width: int) -> float:
    """DistributedDataParallel: gradients of `width` bytes, exchanged behind the last backward pass
    (`no_sync` in those before)."""
    count, size = micro_batches(tokens // n)
    one = compute(size)
    seconds = count * (one.forward + one.backward) + optimizer(P)
    if n == 1:
        return seconds
    return seconds + exposed(all_reduce(width * P, n), one.backward, math.ceil(width * P / BUCKET))


def zero1(tokens: int, n: int) -> float:
    """ZeRO-1: DDP's gradients in bf16, each GPU updates its share, fp32 weights are gathered."""
    seconds = ddp(tokens, n, BF16)
    return seconds if n == 1 else seconds - optimizer(P) + optimizer(P / n) + scatter(FP32 * P, n)


def fsdp2(tokens: int, n: int) -> float:
    """FSDP2: bf16 weights gathered layer by layer in each forward and each backward pass, bf16
    gradients scattered, each GPU updates its share."""
    count, size = micro_batches(tokens // n)
    one = compute(size)
    seconds = count * (one.forward + one.backward) + optimizer(P / n)
    if n == 1:
        return seconds
    gather = L * scatter(BF16 * P / L, n)
    forward = exposed(gather, one.forward, L)
    return seconds + count * (forward + exposed(2 * gather, one.backward, L))


OPTIONS: dict[str, Callable[[int, int], float]] = {
    "DDP, fp32 gradients": lambda tokens, n: ddp(tokens, n, FP32),
    "DDP, bf16 gradients": lambda tokens, n: ddp(tokens, n, BF16),
    "ZeRO-1": zero1,
    "FSDP2": fsdp2,
}


def state(option: str, n: int) -> float:
    """Bytes of weights, gradients and moments on one GPU, all in fp32."""
    return {
        "ZeRO-1": 2 * FP32 * P + 2 * FP32 * P / n,
        "FSDP2": 4 * FP32 * P / n,
    }.get(option, 4 * FP32 * P)


def fits(tokens: int, n: int) -> bool:
    """Whether each GPU has a whole sequence."""
    return tokens // n >= POSITIONS


# --- the page


def table(tokens: int) -> list[str]:
    names = list(OPTIONS)
    lines = [
        f"| GPUs | tokens each | {' | '.join(names)} | of n times one GPU |",
        f"|---:|---:|{'---:|' * (len(names) + 1)}",
    ]
    alone = min(option(tokens, 1) for option in OPTIONS.values())
    for n in GPUS:
        if fits(tokens, n):
            times = [OPTIONS[name](tokens, n) for name in names]
            figures = " | ".join(f"{1e3 * t:.1f}" for t in times)
            share = alone / n / min(times)
            lines.append(f"| {n:,} | {tokens // n:,} | {figures} | {share:.0%} |")
    return lines


def where(tokens: int, holds: Callable[[int], bool]) -> str:
    """The numbers of GPUs for which something holds, as stretches."""
    counts = [n for n in GPUS if fits(tokens, n)]
    stretches = [list(group) for is_so, group in groupby(counts, holds) if is_so]
    if not stretches:
        return "nowhere"
    named = [f"{s[0]:,}" if len(s) == 1 else f"{s[0]:,} to {s[-1]:,}" for s in stretches]
    return f"at {' and '.join(named)} GPUs"


def findings(tokens: int) -> list[str]:
    def saves(option: str, other: str) -> Callable[[int], bool]:
        return lambda n: OPTIONS[option](tokens, n) <= 0.98 * OPTIONS[other](tokens, n)

    fp32, bf16, zero, fsdp = OPTIONS
    return [
        f"- Gradients in bf16 save 2 % or more over fp32 {where(tokens, saves(bf16, fp32))}.",
        f"- ZeRO-1 saves 2 % or more over DDP with bf16 {where(tokens, saves(zero, bf16))}.",
        f"- FSDP2 saves 2 % or more over DDP with bf16 {where(tokens, saves(fsdp, bf16))}.",
    ]


def page() -> str:
    """The model as Markdown."""
    lines = [
        "# Scaling",
        "",
        "**A model, not a measurement**: no run on several GPUs stands behind these figures.",
        "",
        f"BERT-large ({P / 1e6:.0f} million parameters), sequences of {POSITIONS}, bf16, in "
        f"micro-batches of at most {TOKENS:,}",
        f"tokens. Compute is [the roofline](roofline.md)'s at {REACHED:.0%} of it; what the host "
        "needs is left out.",
        f"A GPU sends {WITHIN / 1e9:.0f} GB/s within a machine of {A_MACHINE} and "
        f"{ACROSS / 1e9:.0f} GB/s across, with {LATENCY_WITHIN * 1e6:.0f} and "
        f"{LATENCY_ACROSS * 1e6:.0f} µs a hop.",
        "Gradients are exchanged behind the last backward pass of a step, FSDP2's layers behind",
        "every pass; what does not fit, and the last piece, is waited for. The first lines of",
        "`benchmarks/gpu/scaling.py`, which makes this page, hold the assumptions.",
        "",
        "![time per step](scaling.png)",
    ]
    for name, tokens in BATCHES.items():
        lines += ["", f"## {name}", "", "Milliseconds a step.", "", *table(tokens), ""]
        lines += findings(tokens)
    lines += [
        "",
        "## Memory",
        "",
        "Weights, gradients and moments on each GPU, GB:",
        "",
        f"| GPUs | {' | '.join(OPTIONS)} |",
        f"|---:|{'---:|' * len(OPTIONS)}",
    ]
    for n in (1, 8, 64, 1024):
        figures = " | ".join(f"{state(name, n) / 1e9:.2f}" for name in OPTIONS)
        lines.append(f"| {n:,} | {figures} |")
    lines += [
        "",
        "BERT-large's state fits into one GPU, so nothing has to be sharded. By the model sharding",
        "pays for time where a GPU's share of a step is short against its update of all weights,",
        "and for memory where what it frees makes room for a larger micro-batch.",
    ]
    return "\n".join(lines)


def plot(path: Path) -> None:
    """Time per step over GPUs, a panel for each batch, with perfect scaling beside it."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    for axes, (name, tokens) in zip(figure.subplots(1, 2), BATCHES.items(), strict=True):
        counts = [n for n in GPUS if fits(tokens, n)]
        for option, seconds in OPTIONS.items():
            axes.plot(counts, [1e3 * seconds(tokens, n) for n in counts], "o-", ms=3, label=option)
        alone = 1e3 * OPTIONS["FSDP2"](tokens, 1)
        axes.plot(counts, [alone / n for n in counts], "k:", label="one GPU's time over n")
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms a step (model)", title=name)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.plot:
        plot(arguments.plot)
    print(page())
