"""`fastbert`: parses arguments, calls the library, prints; no logic of its own."""

from typing import Annotated

import typer

from fastbert.cli import data, distill, encode, pretrain, tasks, texts, tokenizer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="BERT with fused kernels.")
app.add_typer(data.app, name="data")
app.add_typer(tokenizer.app, name="tokenizer")
pretrain.add_to(app)
distill.add_to(app)
tasks.add_to(app)
texts.add_to(app)
encode.add_to(app)


@app.callback()
def _root() -> None:
    """BERT with fused kernels."""


@app.command()
def env(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, devices, CPU features, and which implementation serves which op and why."""
    from fastbert.env import render, report

    typer.echo(render(report(), json))


if __name__ == "__main__":
    app()
