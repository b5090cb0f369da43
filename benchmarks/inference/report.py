"""Figures of a comparison: medians, targets, Markdown, a plot."""

import statistics
from pathlib import Path

import torch
import transformers

from ..shapes import RAGGED_32X128
from .cases import Case, Target, weight_elements
from .processes import Sample

MARGIN = 64 << 20
# Bytes an element of a packed copy.
PACKED = {"fastbert bf16": 2, "fastbert fp32, plain": 4}


def seconds(samples: list[Sample]) -> float:
    """The median of the quiet ones, or of all where none is."""
    quiet = [s.seconds for s in samples if s.quiet]
    return statistics.median(quiet or [s.seconds for s in samples])


def ratio(ours: list[Sample], theirs: list[Sample]) -> float:
    """theirs / ours, the median over the rounds in which both are quiet: the machine has slow
    spells, which two samples side by side share."""
    pairs = [
        b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True) if a.quiet and b.quiet
    ]
    return statistics.median(pairs) if pairs else seconds(theirs) / seconds(ours)


def verdict(target: Target, samples: dict[str, list[Sample]]) -> dict | None:
    """How far a target is reached; None where a side of it was left out."""
    over = [name for name in target.over if name in samples]
    if target.ours not in samples or not over:
        return None
    best = min(over, key=lambda name: seconds(samples[name]))
    times = ratio(samples[target.ours], samples[best]) * target.parts
    if target.at_most is not None:
        reached, bound = 1 / times, target.at_most
        of = f"{target.parts} x {best}" if target.parts > 1 else best
        text = f"{target.ours}: {reached:.2f} x the time of {of} (at most {bound})"
        return {"text": text, "figure": reached, "reached": reached <= bound}
    text = f"{target.ours}: {times:.2f} x as fast as {best} (at least {target.at_least})"
    return {"text": text, "figure": times, "reached": times >= target.at_least}


def row(
    case: Case, samples: dict[str, list[Sample]], prepared: dict[str, dict], settings: dict
) -> dict:
    """Everything of a case, for JSON."""
    sides = {
        name: {
            "ms": 1e3 * seconds(taken),
            "samples_ms": [round(1e3 * s.seconds, 4) for s in taken],
            "disturbed": sum(not s.quiet for s in taken),
            "first_call_s": prepared[name]["first_call"],
            "error": prepared[name]["error"],
            "memory_mib": {k: v >> 20 for k, v in prepared[name]["memory"].items()},
        }
        for name, taken in samples.items()
    }
    verdicts = [verdict(target, samples) for target in case.targets]
    verdicts += [verdict_of_memory(case, name, prepared[name], settings) for name in samples]
    return {"sides": sides, "targets": [v for v in verdicts if v]}


def verdict_of_memory(case: Case, name: str, prepared: dict, settings: dict) -> dict | None:
    """Memory over the imported process beside what it is held to; None for other cases."""
    if case.batch != RAGGED_32X128 or case.model != "base" or name not in PACKED:
        return None
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig(**settings), add_pooling_layer=False)
    parameters = sum(p.numel() for p in model.parameters()) * (2 if "bf16" in name else 4)
    bound = parameters + weight_elements(settings) * PACKED[name] + MARGIN
    figure = prepared["memory"]["peak"]
    text = (
        f"{name}: {figure >> 20} MiB over the imported process (at most {bound >> 20}: parameters, "
        f"a packed copy of the layers' matrices and 64)"
    )
    return {"text": text, "figure": figure, "reached": figure <= bound}


def markdown(rows: dict[str, dict]) -> str:
    """A table for each case and what became of its targets."""
    lines = []
    for name, result in rows.items():
        lines += [f"### {name}", "", "| | ms | first call, s | error | MiB | disturbed |"]
        lines += ["|---|---|---|---|---|---|"]
        for side, figures in sorted(result["sides"].items(), key=lambda item: item[1]["ms"]):
            error = "" if figures["error"] is None else f"{figures['error']:.1e}"
            count = f"{figures['disturbed']} of {len(figures['samples_ms'])}"
            lines.append(
                f"| {side} | {figures['ms']:.2f} | {figures['first_call_s']:.2f} | {error} | "
                f"{figures['memory_mib']['peak']} | {count} |"
            )
        lines.append("")
        for target in result["targets"]:
            lines.append(f"- {'reached' if target['reached'] else 'MISSED'}: {target['text']}")
        lines.append("")
    return "\n".join(lines)


def plot(rows: dict[str, dict], path: Path) -> None:
    """Milliseconds of every side, a panel a case."""
    import matplotlib.figure

    columns = min(3, len(rows))
    height = -(-len(rows) // columns)
    figure = matplotlib.figure.Figure(figsize=(6 * columns, 3.2 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).ravel()
    for axes, (name, result) in zip(panels, rows.items(), strict=False):
        sides = sorted(result["sides"].items(), key=lambda item: -item[1]["ms"])
        colours = [
            "tab:orange"
            if side.startswith("fastbert")
            else "tab:grey"
            if side.startswith(("floor", "streaming"))
            else "tab:blue"
            for side, _ in sides
        ]
        axes.barh([side for side, _ in sides], [s["ms"] for _, s in sides], color=colours)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("ms")
        axes.tick_params(labelsize=8)
    for axes in panels[len(rows) :]:
        axes.axis("off")
    figure.savefig(path, dpi=90)
