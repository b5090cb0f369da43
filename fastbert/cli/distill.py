"""`fastbert distill`: parse arguments, call the library, print."""

import typer

from fastbert.cli.arguments import PASSED_ON
from fastbert.cli.pretrain import require_training, run_configured


def distill(context: typer.Context) -> None:
    """Distill a BERT: `fastbert distill CONFIG [--distillation.teacher FOLDER --output RUN ...]`.

    CONFIG is a YAML file; `fastbert export` then writes the run.
    """
    require_training()
    from fastbert.train.config import DistillConfig

    def run(config: DistillConfig):
        from fastbert.train.distillation import distill

        return distill(config)

    run_configured(context, "distill", "a YAML file", DistillConfig, run)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command(context_settings=PASSED_ON)(distill)
