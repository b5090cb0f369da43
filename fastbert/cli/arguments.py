"""What the commands on rows share: their options, their rows, what they print."""

import json
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import make_dataclass
from typing import Annotated

import typer

PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""tyro reads what follows, --help included."""


def helped(kind, text: str):
    """The type of an option with its help."""
    import tyro

    return Annotated[kind, tyro.conf.arg(help=text)]


def positional(name: str, text: str):
    """The type of an argument without a name."""
    import tyro

    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar=name, help=text)]


def flat(settings):
    """A field of the options of settings, without a prefix."""
    import tyro

    return "settings", tyro.conf.OmitArgPrefixes[type(settings)], settings


def model_and_rest(
    context: typer.Context, command: str, *, of_model: bool
) -> tuple[str, list[str]]:
    """The model, which comes first, and what follows.

    Args:
        context: with the arguments. command: its name.
        of_model: the options are those of the model's task, and without a model there is only
            the usage; False: `--help` alone goes on to `parsed`, which lists them.
    """
    folder, *rest = context.args or ["--help"]
    if folder.startswith("-") and not of_model:
        return folder, ["--help"]
    if folder.startswith("-"):
        typer.echo(f"Usage: fastbert {command} MODEL DATA [options]\n\nMODEL --help lists them.")
        raise typer.Exit(0 if context.args else 2)
    return folder, rest


def parsed(command: str, rest: list[str], settings, *more: tuple):
    """The arguments behind the model: DATA, --split, the command's and the settings'."""
    import tyro

    arguments = make_dataclass(
        command,
        [
            ("data", positional("DATA", "file, name of a dataset, or - for standard input")),
            ("split", helped(str | None, "of a dataset"), None),
            *more,
            flat(settings),
        ],
    )
    return tyro.cli(arguments, prog=f"fastbert {command} MODEL", args=rest)


def computing(batch_size: int) -> list[tuple]:
    """Fields of the options of a forward."""
    return [
        ("batch_size", helped(int, "features computed at once"), batch_size),
        ("bf16", helped(bool, "autocast to it"), False),
        ("accelerated", helped(bool, "False runs transformers' own model"), True),
    ]


def forward_options(given) -> dict:
    """Keyword arguments of what computes: `computing`'s, where to show progress, a name."""
    return {
        "batch_size": given.batch_size,
        "bf16": given.bf16,
        "progress": sys.stderr.isatty(),
        "name": given.data,
    }


def rows_of(given, read: Callable) -> list[dict]:
    """Rows of the arguments' data.

    Args:
        given: the arguments. read: `read_rows`, or a task's own.
    """
    from fastbert.tasks.tables import TaskError, read_json_lines

    if given.data != "-":
        return read(given.data, split=given.split)
    rows = list(read_json_lines(sys.stdin, "standard input"))
    if not rows:
        raise TaskError("standard input has no rows")
    return rows


def print_answers(answers: Iterable[dict], *, table: bool) -> None:
    """A JSON object a line, or the short fields with tabs between them below their names."""
    answers = list(answers)
    if table and answers:
        typer.echo("\t".join(short(answers[0])))
    for answer in answers:
        fields = short(answer).values() if table else None
        typer.echo(json.dumps(answer, ensure_ascii=False) if fields is None else "\t".join(fields))


def print_metrics(metrics: dict[str, float], *, json_wanted: bool) -> None:
    """A metric a line, or one JSON object."""
    if json_wanted:
        typer.echo(json.dumps(metrics))
        return
    for name, value in metrics.items():
        typer.echo(f"{name} {value:.4f}")


def short(answer: dict) -> dict[str, str]:
    """The fields of an answer that fit into a table."""
    return {
        name: " ".join(str(value).split())
        for name, value in answer.items()
        if isinstance(value, (str, int, float))
        or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    }


@contextmanager
def errors_told():
    """What a caller can mend is one line without a trace; what fastbert logs is shown."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        yield
    except ImportError as error:
        typer.echo(f"Error: {error}; pip install 'fastbert[tasks,train]'", err=True)
        raise typer.Exit(1) from error
    # TaskError is a ValueError, and so is what the Embedder refuses.
    except (ValueError, NotImplementedError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
