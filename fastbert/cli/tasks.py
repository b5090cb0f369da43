"""`fastbert finetune`, `evaluate` and `predict`: parse arguments, call the library, print."""

import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import asdict, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

FINETUNE = "fastbert finetune TASK MODEL --train FILE --output FOLDER [options]"
PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""tyro reads what follows, --help included."""


def finetune(context: typer.Context) -> None:
    """Fine-tune a checkpoint: `fastbert finetune TASK MODEL --train FILE --output FOLDER`.

    `fastbert finetune TASK --help` lists the options of a task.
    """
    with _errors_told():
        import tyro

        from fastbert.tasks import TrainingSettings
        from fastbert.tasks.trainings import NAMES, training_named

        task, *rest = context.args or ["--help"]
        if task.startswith("-"):
            typer.echo(
                f"Usage: {FINETUNE}\n\nTASK is one of {', '.join(NAMES)}; TASK --help tells."
            )
            return
        kind = training_named(task)
        arguments = make_dataclass(
            "Finetune",
            [
                ("model", _positional("MODEL", "folder or name of a checkpoint")),
                ("train", _helped(str, "file or dataset of the training rows")),
                ("output", _helped(Path, "folder to write")),
                ("evaluation", _helped(str | None, "rows to judge by; None: held out"), None),
                ("split", _helped(str | None, "of a dataset"), None),
                ("evaluation_split", _helped(str | None, "of a dataset"), None),
                ("settings", tyro.conf.OmitArgPrefixes[kind.settings_class], kind.settings_class()),
                (
                    "training",
                    tyro.conf.OmitArgPrefixes[TrainingSettings],
                    TrainingSettings(progress=sys.stderr.isatty()),
                ),
            ],
        )
        given = tyro.cli(arguments, prog=f"fastbert finetune {task}", args=rest)
        result = kind.run(
            given.model,
            given.train,
            given.evaluation,
            output=given.output,
            settings=given.settings,
            training=given.training,
            split=given.split,
            evaluation_split=given.evaluation_split,
        )
    for name, value in result.metrics.items():
        typer.echo(f"{name} {value:.4f}")
    typer.echo(f"{result.samples_per_second:.1f} features a second, in {result.output}")


def evaluate(context: typer.Context) -> None:
    """Metrics of a fine-tuned model: `fastbert evaluate MODEL DATA [--json] [options]`."""
    with _errors_told():
        given, run = _prepared(context, "evaluate", [("json", _helped(bool, "print JSON"), False)])
        metrics = run()
    if given.json:
        typer.echo(json.dumps(metrics))
    else:
        for name, value in metrics.items():
            typer.echo(f"{name} {value:.4f}")


def predict(context: typer.Context) -> None:
    """Answers of a fine-tuned model, a JSON object a line: `fastbert predict MODEL DATA [options]`.

    DATA is a file, a dataset, or - for JSON lines from standard input. --table prints the short
    fields with tabs between them.
    """
    with _errors_told():
        given, run = _prepared(context, "predict", [("table", _helped(bool, "tabs"), False)])
        answers = run()
    if given.table and answers:
        typer.echo("\t".join(_short(answers[0])))
    for answer in answers:
        fields = _short(answer).values() if given.table else None
        typer.echo(json.dumps(answer, ensure_ascii=False) if fields is None else "\t".join(fields))


def _prepared(context: typer.Context, command: str, more: list[tuple]):
    """The arguments, and the command on the rows; the task's settings are the options' defaults."""
    import tyro

    from fastbert.tasks import Predictor
    from fastbert.tasks.registry import read_task
    from fastbert.tasks.tables import TaskError, read_json_lines

    folder, *rest = context.args or ["--help"]
    if folder.startswith("-"):
        typer.echo(f"Usage: fastbert {command} MODEL DATA [options]\n\nMODEL --help lists them.")
        raise typer.Exit
    task = read_task(folder)
    settings = task.settings
    arguments = make_dataclass(
        command.capitalize(),
        [
            ("data", _positional("DATA", "file, name of a dataset, or - for standard input")),
            ("split", _helped(str | None, "of a dataset"), None),
            ("batch_size", _helped(int, "features computed at once"), 32),
            ("bf16", _helped(bool, "autocast to it"), False),
            ("accelerated", _helped(bool, "False runs transformers' own model"), True),
            *more,
            ("settings", tyro.conf.OmitArgPrefixes[type(settings)], settings),
        ],
    )
    given = tyro.cli(arguments, prog=f"fastbert {command} MODEL", args=rest)
    if given.data == "-":
        rows = list(read_json_lines(sys.stdin, "standard input"))
        if not rows:
            raise TaskError("standard input has no rows")
    else:
        beside = task.evaluation_beside(given.data)
        default = None if beside is None else beside[1]
        rows = task.read(given.data, split=given.split or default)
    predictor = Predictor(folder, accelerated=given.accelerated, **asdict(given.settings))
    return given, partial(
        getattr(predictor, command),
        rows,
        batch_size=given.batch_size,
        bf16=given.bf16,
        progress=sys.stderr.isatty(),
        name=given.data,
    )


def _helped(kind, text: str):
    import tyro

    return Annotated[kind, tyro.conf.arg(help=text)]


def _positional(name: str, text: str):
    import tyro

    return Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar=name, help=text)]


def _short(answer: dict) -> dict[str, str]:
    """The fields of an answer that fit into a table."""
    return {
        name: " ".join(str(value).split())
        for name, value in answer.items()
        if isinstance(value, (str, int, float))
        or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    }


@contextmanager
def _errors_told():
    """What a caller can mend is one line without a trace; what fastbert logs is shown."""
    from fastbert.tasks.tables import TaskError

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        yield
    except ImportError as error:
        typer.echo(f"Error: {error}; pip install 'fastbert[tasks,train]'", err=True)
        raise typer.Exit(1) from error
    except (TaskError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def add_to(app: typer.Typer) -> None:
    """Registers the commands of a task."""
    for command in (finetune, evaluate, predict):
        app.command(context_settings=PASSED_ON)(command)
