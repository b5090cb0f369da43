"""`fastbert fill-mask`, `rerank` and `similarity`: parse arguments, call the library, print."""

import sys

import typer

from fastbert.cli.arguments import (
    PASSED_ON,
    computing,
    errors_told,
    forward_options,
    helped,
    model_and_rest,
    parsed,
    print_answers,
    print_metrics,
    rows_of,
)


def fill_mask(context: typer.Context) -> None:
    """What stands behind masks: `fastbert fill-mask MODEL DATA [--table] ...`.

    DATA is a file, a dataset, or - for JSON lines from standard input; an answer is a JSON object.
    """
    with errors_told():
        from fastbert.tasks import read_rows
        from fastbert.tasks.filling import FillMask, FillMaskSettings

        folder, rest = model_and_rest(context, "fill-mask", of_model=False)
        table = ("table", helped(bool, "print candidates with tabs"), False)
        given = parsed("fill-mask", rest, FillMaskSettings(), *computing(8), table)
        rows = rows_of(given, read_rows)
        filler = FillMask(folder, given.settings, accelerated=given.accelerated)
        answers = filler.fill(rows, **forward_options(given))
    if not given.table:
        print_answers(answers, table=False)
        return
    lines = [
        {"row": row, "mask": mask, **candidate}
        for row, answer in enumerate(answers, 1)
        for mask, candidates in enumerate(answer["masks"], 1)
        for candidate in candidates
    ]
    print_answers(lines, table=True)


def rerank(context: typer.Context) -> None:
    """Passages in a cross-encoder's order: `fastbert rerank MODEL DATA [--table] ...`.

    A row has a query and the list of its passages, or one of them.
    """
    with errors_told():
        from fastbert.tasks import read_rows
        from fastbert.tasks.ranking import Reranker, RerankSettings

        folder, rest = model_and_rest(context, "rerank", of_model=False)
        table = ("table", helped(bool, "print passages with tabs"), False)
        given = parsed("rerank", rest, RerankSettings(), *computing(32), table)
        rows = rows_of(given, read_rows)
        reranker = Reranker(folder, given.settings, accelerated=given.accelerated)
        answers = reranker.rerank(rows, **forward_options(given))
    if not given.table:
        print_answers(answers, table=False)
        return
    lines = [
        {"query": answer["query"], "rank": rank, "score": one["score"], "passage": one["passage"]}
        for answer in answers
        for rank, one in enumerate(answer["ranking"], 1)
    ]
    print_answers(lines, table=True)


def similarity(context: typer.Context) -> None:
    """Cosines of two texts a row: `fastbert similarity MODEL DATA [--table] ...`.

    With --score COLUMN, Spearman's and Pearson's correlation with that column.
    """
    with errors_told():
        from fastbert.tasks import read_rows
        from fastbert.tasks.similarity import (
            SimilaritySettings,
            similarities,
            similarity_metrics,
        )

        folder, rest = model_and_rest(context, "similarity", of_model=False)
        given = parsed(
            "similarity",
            rest,
            SimilaritySettings(),
            ("table", helped(bool, "print a column of numbers"), False),
            ("json", helped(bool, "print the metrics as JSON"), False),
            ("max_length", helped(int | None, "tokens of a text; None: the model's"), None),
            ("overlong", helped(str, "truncate, stride or refuse longer texts"), "truncate"),
            ("stride", helped(int, "tokens that windows of a text share"), 32),
        )
        from fastbert.embedder import Embedder

        rows = rows_of(given, read_rows)
        embedder = Embedder(
            folder,
            max_seq_length=given.max_length,
            truncation={"truncate": "cut"}.get(given.overlong, given.overlong),
            stride=given.stride,
        )
        options = {"progress": sys.stderr.isatty(), "name": given.data}
        answers = similarities(embedder, rows, given.settings, **options)
        if given.settings.score is not None:
            metrics = similarity_metrics(rows, answers, given.settings, given.data)
    if given.settings.score is None:
        print_answers(answers, table=given.table)
    else:
        print_metrics(metrics, json_wanted=given.json)


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    for command in (fill_mask, rerank, similarity):
        app.command(command.__name__.replace("_", "-"), context_settings=PASSED_ON)(command)
