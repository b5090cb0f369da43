"""What runs fused, per family, head, backend and pass: the table of the README, from the code.

    python -m benchmarks.families [--write]

Every class runs a small training step on a padded batch, and the ops it calls are counted, forward
and backward apart; a backend's cell then says which of them it has kernels for.
`--write` puts the table into the README.
"""

import argparse
from pathlib import Path

import torch

import fastbert
from fastbert import dispatch, use_backend
from fastbert.testing.inputs import padded_batch, small_config
from fastbert.testing.models import FAMILIES, family_of, head_inputs, heads_of

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- families: python -m benchmarks.families --write -->", "<!-- families end -->"
BACKENDS = ("cpu", "triton", "cuda")
# Masks are made inside the kernels; the reference alone calls ops for them.
INSIDE = {"philox"}
# Packed where nothing is padded: these heads read what DeBERTa computes of padding.
READ_PADDING = {"DebertaForQuestionAnswering", "DebertaV2ForQuestionAnswering"}


def rooms_of(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Rooms whose ops a training step of `fastbert.<name>` calls: in forward, in backward."""
    config = small_config(family_of(name), num_labels=2, num_hidden_layers=1)
    model = getattr(fastbert, name)(config).train()
    lengths = (9, 9) if name in READ_PADDING else (5, 9)
    batch = padded_batch(lengths, config.vocab_size, pad_token_id=config.pad_token_id)
    inputs = head_inputs(name, batch, config)
    with use_backend("reference"):
        before = dispatch.counters()
        outputs = model(**inputs)
        between = dispatch.counters()
        loss = outputs.last_hidden_state.sum() if name.endswith("Model") else outputs.loss
        loss.backward()
        after = dispatch.counters()
    if (between - before)[model.base_model.counted_as, "packed"] != 1:
        raise AssertionError(f"{name} did not run on packed rows")
    return _rooms(between - before), _rooms(after - between)


def _rooms(calls) -> frozenset[str]:
    ops = (dispatch.OPS.get(op) for op, _ in calls)
    return frozenset(op.room for op in ops if op is not None) - INSIDE


def rows_of(family: str) -> list[str]:
    """The family's rows: classes that call the same ops share one."""
    classes: dict[tuple, list[str]] = {}
    for task in ("Model", *heads_of(family)):
        classes.setdefault(rooms_of(family + task), []).append(task)
    return [
        f"| {family} | {', '.join(tasks)} | {_named(*rooms)} | "
        + " | ".join(_cell(rooms, backend) for backend in BACKENDS)
        + " |"
        for rooms, tasks in classes.items()
    ]


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| family | classes | ops | " + " | ".join(BACKENDS) + " |",
        "|---|---|---|" + "---|" * len(BACKENDS),
    ]
    return "\n".join(lines + [row for family in FAMILIES for row in rows_of(family)])


def _named(forward: frozenset[str], backward: frozenset[str]) -> str:
    """All ops, those of one pass alone marked."""
    marks = dict.fromkeys(forward - backward, " (forward)")
    marks |= dict.fromkeys(backward - forward, " (backward)")
    return ", ".join(room + marks.get(room, "") for room in sorted(forward | backward))


def _cell(rooms: tuple[frozenset[str], ...], backend: str) -> str:
    """Which ops the backend has a kernel for, in forward / in backward."""
    passes = [_all_but(kind, backend) for kind in rooms]
    return passes[0] if passes[0] == passes[1] else " / ".join(passes)


def _all_but(rooms: frozenset[str], backend: str) -> str:
    missing = {op.room for op in dispatch.OPS.values() if not op.has(backend)} & rooms
    return f"all but {', '.join(sorted(missing))}" if missing else "all"


def with_table(text: str, new: str) -> str:
    """The README's text with `new` between the marks."""
    head, rest = text.split(START)
    _, tail = rest.split(END)
    return f"{head}{START}\n{new}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    torch.manual_seed(0)
    made = table()
    print(made)
    if parser.parse_args().write:
        README.write_text(with_table(README.read_text(), made))


if __name__ == "__main__":
    main()
