"""`fastbert data`: parses arguments, calls the library, prints."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Corpora of token ids.")


@app.callback()
def _root() -> None:
    """Corpora of token ids."""


@app.command()
def prepare(
    files: Annotated[list[Path], typer.Argument(help="Text, .jsonl and .parquet files.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", "-t", help="Folder of a tokenizer.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the corpus.")],
    documents: Annotated[
        str, typer.Option(help="A document of a text file: blank-line, line or file.")
    ] = "blank-line",
    sentences: Annotated[str, typer.Option(help="A sentence: line or punctuation.")] = "line",
    column: Annotated[str, typer.Option(help="Field of the text in rows.")] = "text",
    segmenter: Annotated[
        str | None, typer.Option(help="jieba: store words for whole-word masking.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one a core.")] = None,
    piece_mb: Annotated[int, typer.Option(help="Megabytes of input in a shard.")] = 64,
) -> None:
    """Tokenize texts into a folder. Run again after a kill it goes on where it was."""
    from fastbert.data.preparation import prepare as run

    try:
        corpus = run(
            files,
            tokenizer,
            output,
            documents=documents,
            sentences=sentences,
            column=column,
            segmenter=segmenter,
            workers=workers,
            piece_bytes=piece_mb << 20,
        )
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(
        f"{corpus.num_tokens} tokens, {corpus.num_sentences} sentences, {corpus.num_documents} "
        f"documents in {output}"
    )
