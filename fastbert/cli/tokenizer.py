"""`fastbert tokenizer`: parses arguments, calls the library, prints."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Tokenizers of one's own.")


class Kind(StrEnum):
    wordpiece = "wordpiece"
    bpe = "bpe"
    unigram = "unigram"


@app.callback()
def _root() -> None:
    """Tokenizers of one's own."""


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(help="Text, .jsonl and .parquet files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    kind: Annotated[Kind, typer.Option(help="Model of the tokenizer.")] = Kind.wordpiece,
    vocab_size: Annotated[int, typer.Option(help="With special tokens.")] = 30_522,
    lowercase: Annotated[bool, typer.Option(help="Lower-case and strip accents.")] = True,
    min_frequency: Annotated[int, typer.Option(help="Of a pair to be merged.")] = 2,
    max_length: Annotated[int, typer.Option(help="The tokenizer's longest sequence.")] = 512,
    column: Annotated[str, typer.Option(help="Field of the text in rows.")] = "text",
) -> None:
    """Train a tokenizer; transformers' AutoTokenizer loads the folder."""
    from fastbert.data.tokenizer_training import texts_of, train_tokenizer

    try:
        # transformers only logs it, after the training.
        if output.exists() and not output.is_dir():
            raise ValueError(f"output: {output} is no folder; name another")
        tokenizer = train_tokenizer(
            texts_of(files, column),
            kind=kind.value,
            vocab_size=vocab_size,
            lowercase=lowercase,
            min_frequency=min_frequency,
            max_length=max_length,
            progress=True,
        )
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    tokenizer.save_pretrained(output)
    typer.echo(f"{len(tokenizer)} tokens in {output}")
