"""`fastbert finetune`, `evaluate` and `predict`: parse arguments, call the library, print."""

import sys
from dataclasses import asdict, make_dataclass
from functools import partial
from pathlib import Path

import typer

from fastbert.cli.arguments import (
    PASSED_ON,
    computing,
    errors_told,
    flat,
    forward_options,
    helped,
    model_and_rest,
    parsed,
    positional,
    print_answers,
    print_metrics,
    rows_of,
)

FINETUNE = "fastbert finetune TASK MODEL --train FILE --output FOLDER [options]"


def finetune(context: typer.Context) -> None:
    """Fine-tune a checkpoint: `fastbert finetune TASK MODEL --train FILE --output FOLDER`.

    `fastbert finetune TASK --help` lists the options of a task. Run again after a kill it goes on
    from the last epoch; a folder that holds another run is refused without --overwrite.
    """
    with errors_told():
        import tyro

        from fastbert.tasks import TrainingSettings
        from fastbert.tasks.trainings import NAMES, training_named

        task, *rest = context.args or ["--help"]
        if task.startswith("-"):
            typer.echo(
                f"Usage: {FINETUNE}\n\nTASK is one of {', '.join(NAMES)}; TASK --help tells."
            )
            raise typer.Exit(0 if context.args else 2)
        kind = training_named(task)
        arguments = make_dataclass(
            "Finetune",
            [
                ("model", positional("MODEL", "folder or name of a checkpoint")),
                ("train", helped(str, "file or dataset of the training rows")),
                ("output", helped(Path, "folder to write")),
                ("evaluation", helped(str | None, "rows to judge by; None: held out"), None),
                ("split", helped(str | None, "of a dataset"), None),
                ("evaluation_split", helped(str | None, "of a dataset"), None),
                ("overwrite", helped(bool, "replace another run that output holds"), False),
                flat(kind.settings_class()),
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
            overwrite=given.overwrite,
        )
    print_metrics(result.metrics, json_wanted=False)
    speed = result.samples_per_second
    told = "finished before" if speed is None else f"{speed:.1f} features a second"
    typer.echo(f"{told}, in {result.output}")


def evaluate(context: typer.Context) -> None:
    """Metrics of a fine-tuned model: `fastbert evaluate MODEL DATA [--json] ...`."""
    with errors_told():
        # Before the imports, which take seconds that the usage need not wait for.
        folder, rest = model_and_rest(context, "evaluate", of_model=True)
        from fastbert.tasks.registry import read_description
        from fastbert.tasks.trainings import ENCODERS

        json_wanted = ("json", helped(bool, "print JSON"), False)
        description = read_description(folder)
        if description["task"] in ENCODERS:
            given, run = _prepared_encoder(folder, rest, description, json_wanted)
        else:
            given, run = _prepared(folder, rest, "evaluate", json_wanted)
        metrics = run()
    print_metrics(metrics, json_wanted=given.json)


def predict(context: typer.Context) -> None:
    """Answers of a fine-tuned model, a JSON object a line: `fastbert predict MODEL DATA ...`.

    DATA is a file, a dataset, or - for JSON lines from standard input. --table prints the short
    fields with tabs between them.
    """
    with errors_told():
        folder, rest = model_and_rest(context, "predict", of_model=True)
        given, run = _prepared(folder, rest, "predict", ("table", helped(bool, "tabs"), False))
        answers = run()
    print_answers(answers, table=given.table)


def _prepared(folder: str, rest: list[str], command: str, *more: tuple):
    """The arguments, and the command on the rows; the task's settings are the options' defaults."""
    from fastbert.tasks.registry import read_task

    task = read_task(folder)
    given = parsed(command, rest, task.settings, *computing(32), *more)
    from fastbert.tasks import Predictor

    rows = rows_of(given, partial(_read, task))
    predictor = Predictor(folder, accelerated=given.accelerated, **asdict(given.settings))
    return given, partial(getattr(predictor, command), rows, **forward_options(given))


def _prepared_encoder(folder: str, rest: list[str], description: dict, *more: tuple):
    """The same of `evaluate` on a bi-encoder or a cross-encoder."""
    from fastbert.tasks import read_rows
    from fastbert.tasks.trainings import ENCODERS

    kind = ENCODERS[description["task"]]
    settings = kind.settings_class(**description["settings"])
    given = parsed("evaluate", rest, settings, *computing(32), *more)
    options = forward_options(given)
    options.pop("progress")
    options["accelerated"] = given.accelerated
    rows = rows_of(given, read_rows)
    return given, partial(kind.evaluate, folder, rows, given.settings, **options)


def _read(task, source: str, split: str | None) -> list[dict]:
    """Rows of a source, of one with several splits those to judge by."""
    beside = task.evaluation_beside(source)
    return task.read(source, split=split if split or beside is None else beside[1])


def add_to(app: typer.Typer) -> None:
    """Registers the commands of a task."""
    for command in (finetune, evaluate, predict):
        app.command(context_settings=PASSED_ON)(command)
