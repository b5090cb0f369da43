"""A fine-tuned model at work: answers to rows, and their metrics."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from fastbert.models.heads import QuestionAnsweringHead
from fastbert.tasks.models import load_model, load_tokenizer
from fastbert.tasks.registry import read_task
from fastbert.tasks.task import fitted


class Predictor:
    """Answers rows of the task a model was fine-tuned on.

    Args:
        folder: `fastbert.tasks.finetune` wrote it.
        accelerated: False leaves transformers' forward.
        changes: settings of the task to replace, such as columns or `overlong`.

    Raises:
        TaskError: a folder without a task, settings that do not fit.
    """

    def __init__(self, folder: str | Path, *, accelerated: bool = True, **changes):
        self.task = read_task(folder, **changes)
        self.tokenizer = load_tokenizer(self.task, str(folder))
        self.model = load_model(self.task, str(folder), new_head=False, accelerated=accelerated)
        if isinstance(self.model, QuestionAnsweringHead):
            # Answers are cut from texts.
            self.model.scores_padding = False
        self.task.settings = fitted(self.task.settings, self.tokenizer, self.model.config)

    def predict(
        self,
        rows: Sequence[dict],
        *,
        batch_size: int = 32,
        bf16: bool = False,
        progress: bool = False,
        name: str = "rows",
        by_length: bool = True,
    ) -> list[dict]:
        """One answer a row, in the order of the rows.

        Args:
            rows: without labels, or with labels that are not looked at.
            batch_size: features computed at once. bf16: autocast to it.
            progress: show a bar. name: of the rows, for messages.
            by_length: the longest rows are computed first, so that models which compute padding
                have less of it; False: in their order, as Trainer does by itself.

        Raises:
            TaskError: a column is missing or holds something else, a text that is refused.
        """
        rows = list(rows)
        if not rows:
            return []
        self.task.check(rows, name, labelled=False)
        encoded = self.task.encode(rows, self.tokenizer, labelled=False, name=name)
        encoded = encoded.by_length() if by_length else encoded
        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                model=self.model,
                args=transformers.TrainingArguments(
                    output_dir=folder,
                    per_device_eval_batch_size=batch_size,
                    bf16=bf16,
                    use_cpu=not torch.cuda.is_available(),
                    remove_unused_columns=False,
                    report_to=[],
                    disable_tqdm=not progress,
                ),
                processing_class=self.tokenizer,
                data_collator=self.task.collator(self.tokenizer),
            )
            logits = trainer.predict(encoded.features).predictions
        return self.task.answers(rows, encoded, logits)

    def evaluate(self, rows: Sequence[dict], **options) -> dict[str, float]:
        """Metrics of the answers to labelled rows.

        Args:
            rows: with labels. options: of `predict`.

        Raises:
            TaskError: as `predict`, and a label the model does not know.
        """
        rows = list(rows)
        self.task.check(rows, options.get("name", "rows"), labelled=True)
        return self.task.metrics(rows, self.predict(rows, **options))
