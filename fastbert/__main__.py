"""`python -m fastbert` is the `fastbert` command."""

from fastbert.cli.main import app

app(prog_name="fastbert")
