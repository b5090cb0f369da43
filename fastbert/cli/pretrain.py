"""`fastbert pretrain`, `export` and `plot`: parse arguments, call the library, print."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fastbert.cli.arguments import PASSED_ON


def pretrain(context: typer.Context) -> None:
    """Pretrain BERT, ELECTRA or DeBERTa: `fastbert pretrain CONFIG [--output RUN ...]`.

    CONFIG is a YAML file or one of the names that --help lists.
    """
    require_training()
    from fastbert.train.config import PretrainConfig, ready_configs

    def run(config: PretrainConfig):
        from fastbert.train.pretraining import pretrain

        return pretrain(config)

    configs = f"a YAML file or one of {', '.join(ready_configs())}"
    run_configured(context, "pretrain", configs, PretrainConfig, run)


def require_training() -> None:
    """Ends the command where what training needs is not installed."""
    try:
        import pydantic  # noqa: F401
        import rich  # noqa: F401
        import tyro  # noqa: F401
        import yaml  # noqa: F401
    except ImportError as error:
        typer.echo(f"Error: {error}; pip install 'fastbert[train]'", err=True)
        raise typer.Exit(1) from error


def run_configured(context: typer.Context, command: str, configs: str, kind: type, run) -> None:
    """Reads a config and what overrides it, runs, and tells what came of it.

    Args:
        context: with the arguments left.
        command: its name. configs: what CONFIG may be.
        kind: the config's class. run: of it, to a summary; loads what it needs, for which help
            does not wait.
    """
    import tyro

    from fastbert.train.config import ConfigError, read_config

    if not context.args:
        typer.echo(
            f"Usage: fastbert {command} CONFIG [options]\n\nError: CONFIG is missing: {configs}; "
            f"fastbert {command} --help lists the options.",
            err=True,
        )
        raise typer.Exit(2)
    name, *overrides = context.args
    with _errors_told(ConfigError):
        # What stands in the file is shown as the defaults of the options.
        config = kind() if name.startswith("-") else read_config(name, kind)
        config = tyro.cli(
            kind,
            prog=f"fastbert {command} CONFIG",
            description=f"CONFIG is {configs}. Options override it.",
            default=config,
            args=[name, *overrides] if name.startswith("-") else overrides,
        )
    from fastbert.train.checkpoints import CheckpointError
    from fastbert.train.pretraining import NonFiniteError

    with _errors_told(ConfigError, CheckpointError, NonFiniteError):
        summary = run(config)
    # Under torchrun the others would say the same.
    if os.environ.get("RANK", "0") == "0":
        typer.echo(_told(summary, config.output))


@contextmanager
def _errors_told(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _told(summary, output: str) -> str:
    if summary.loss is None:
        return f"all {summary.steps} steps were done before, in {output}"
    lines = [
        f"{'finished' if summary.finished else 'terminated and saved'} after {summary.steps} steps",
        f"loss {summary.loss:.4f} in the last step",
        f"{summary.num_tokens} tokens in {summary.seconds:.0f} s here, "
        f"{summary.num_tokens / max(summary.seconds, 1e-9):,.0f} a second with all pauses",
        f"{summary.skipped} steps skipped for gradients that were not finite",
    ]
    if summary.heldout is not None:
        lines.append(f"held out: {summary.heldout.told()}")
    return "\n".join([*lines, f"in {output}"])


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Such as step-2000; default: the last one.")
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="The averaged weights, if the run kept them.")
    ] = False,
) -> None:
    """Write a run as a folder that transformers' Auto classes load."""
    from fastbert.train.checkpoints import CheckpointError
    from fastbert.train.exporting import export as write

    try:
        name = write(run, output, checkpoint, average=average)
    except (ValueError, OSError, CheckpointError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{name} of {run} in {output}")


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="PNG to write.")] = Path(
        "curves.png"
    ),
) -> None:
    """Draw loss and speed of runs."""
    from fastbert.train.plotting import plot as draw

    try:
        draw(runs, output)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{output}")


def add_to(app: typer.Typer) -> None:
    """Registers the commands of a run."""
    app.command(context_settings=PASSED_ON)(pretrain)
    app.command()(export)
    app.command()(plot)
