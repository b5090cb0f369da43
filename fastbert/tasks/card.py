"""The card of a fine-tuned model: what it is, from what, how, and how good."""

from dataclasses import asdict
from pathlib import Path

from fastbert.tasks.task import Task


def write_card(
    task: Task,
    result,
    training,
    base: str,
    num_rows: int,
    num_judged: int,
    pictures: dict[str, str],
) -> None:
    """Writes README.md beside the model.

    Args:
        task: the task. result: a `Finetuned`. training: its settings.
        base: the checkpoint it started from.
        num_rows, num_judged: rows trained and judged on.
        pictures: captions of files beside the card, by their names.
    """
    import torch
    import transformers

    base = Path(base).name if Path(base).is_dir() else base
    shown = {k: v for k, v in asdict(training).items() if k != "progress"}
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [fastbert, {task.name}]",
        "---",
        "",
        f"# {task.name}, from {base}",
        "",
        f"Fine-tuned on {num_rows} rows, judged on {num_judged} others. The epoch with the best "
        f"{task.best} was kept.",
        "",
        *_table(("metric", "value"), [(k, f"{v:.4f}") for k, v in result.metrics.items()]),
        "",
        "## Use",
        "",
        "```",
        "fastbert predict . rows.jsonl",
        "```",
        "",
        f"Or transformers' `{task.auto_class}.from_pretrained`, with or without fastbert.",
        "",
    ]
    if task.labels:
        lines += ["## Labels", "", ", ".join(f"`{label}`" for label in task.labels), ""]
    if result.history:
        names = list(result.history[0])
        rows = [[f"{epoch.get(n, float('nan')):.4g}" for n in names] for epoch in result.history]
        lines += ["## Epochs", "", *_table(names, rows), ""]
    lines += picture_lines(pictures)
    lines += [
        "## Recipe",
        "",
        *_table(("setting", "value"), [*asdict(task.settings).items(), *shown.items()]),
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}.",
        "",
    ]
    (result.output / "README.md").write_text("\n".join(lines), encoding="utf-8")


def picture_lines(pictures: dict[str, str]) -> list[str]:
    """A section that shows them, where there are some."""
    if not pictures:
        return []
    shown = [line for name, caption in pictures.items() for line in (f"![{caption}]({name})", "")]
    return ["## Pictures", "", *shown]


def _table(head, rows) -> list[str]:
    ruler = "|".join("---" for _ in head)
    return [f"| {' | '.join(head)} |", f"|{ruler}|"] + [
        f"| {' | '.join(str(cell) for cell in row)} |" for row in rows
    ]
