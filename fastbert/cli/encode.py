"""`fastbert encode`: parses arguments, calls the library, prints."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def encode(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Texts: .txt, .jsonl or .parquet.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Vectors: .jsonl or .parquet.")],
    model: Annotated[Path, typer.Option(help="Folder of a sentence-transformers model.")],
    column: Annotated[str, typer.Option(help="Field of the text in rows.")] = "text",
    keep: Annotated[
        list[str] | None, typer.Option(help="Field to copy; may be repeated; default: the text.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="One of the folder's prompts.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Put before every text instead.")] = None,
    pooling: Annotated[
        list[str] | None,
        typer.Option(help="mean, cls, max, ...; may be repeated; default: the folder's."),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Vectors of length 1; default: as the folder says.")
    ] = None,
    max_seq_length: Annotated[int | None, typer.Option(help="Tokens of a text.")] = None,
    truncation: Annotated[
        str, typer.Option(help="Of longer texts: cut, stride or refuse.")
    ] = "cut",
    stride: Annotated[int, typer.Option(help="Tokens that windows of a text share.")] = 32,
    tokens_per_batch: Annotated[int, typer.Option(help="Tokens of a forward.")] = 4096,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: the checkpoint's.")
    ] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Keep packed weights alone: less memory, on a CPU.")
    ] = False,
    quantize: Annotated[
        str | None,
        typer.Option(help="dynamic or weight_only: the layers' weights in int8, on a CPU."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes, each with the model.")] = 1,
    threads: Annotated[
        int | None, typer.Option(help="Of each worker; default: the cores, shared out.")
    ] = None,
) -> None:
    """Encode a file of texts. Run again after a kill it goes on where it was."""
    import torch

    from fastbert.embedder import Embedder
    from fastbert.encoding import encode_file

    dtypes = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    try:
        if dtype not in dtypes:
            raise ValueError(f"dtype must be float32 or bfloat16, got {dtype!r}")
        embedder = Embedder(
            model,
            pooling=pooling or None,
            normalize=normalize,
            max_seq_length=max_seq_length,
            truncation=truncation,
            stride=stride,
            tokens_per_batch=tokens_per_batch,
            dtype=dtypes[dtype],
            freeze=freeze,
            quantize=quantize,
            workers=workers,
            threads=threads,
        )
        with embedder:
            count = encode_file(
                embedder,
                source,
                target,
                column=column,
                keep=keep or None,
                prompt_name=prompt_name,
                prompt=prompt,
                progress=sys.stderr.isatty(),
            )
    except (TypeError, ValueError, OSError, ImportError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{count} vectors in {target}")


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(encode)
