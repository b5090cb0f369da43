"""What a masked language model puts in place of masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastbert.folders import check_checkpoint
from fastbert.tasks.forwards import forwards
from fastbert.tasks.models import fast_tokenizer, load_network
from fastbert.tasks.tables import TaskError, check_columns, check_texts
from fastbert.tasks.task import TaskSettings, features_of, fitted, padding_collator, tokenize


@dataclass(frozen=True, kw_only=True)
class FillMaskSettings(TaskSettings):
    """
    Attributes:
        text: column of the text.
        mask: what stands for a mask in texts; None: the tokenizer's own, such as [MASK].
        top: candidates for each mask.
    """

    text: str = "text"
    mask: str | None = None
    top: int = 5

    def __post_init__(self):
        super().__post_init__()
        if self.top < 1:
            raise TaskError(f"top must be at least 1, got {self.top}")
        if self.mask == "":
            raise TaskError("mask must not be empty; None is the tokenizer's own")


class FillMask:
    """Fills masks, each alone as BERT is trained to.

    Under `stride` a mask is filled from the window that shows most of what stands around it.

    Args:
        folder: a checkpoint with a masked-LM head.
        settings: columns and lengths.
        accelerated: False leaves transformers' forward.

    Raises:
        TaskError: a tokenizer without a mask, settings that do not fit.
        OSError: no such checkpoint.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: FillMaskSettings | None = None,
        *,
        accelerated: bool = True,
    ):
        check_checkpoint("folder", folder)
        settings = FillMaskSettings() if settings is None else settings
        self.tokenizer = fast_tokenizer(str(folder))
        if self.tokenizer.mask_token is None:
            raise TaskError(f"the tokenizer of {folder} has no mask; take a masked language model")
        self.model = load_network("AutoModelForMaskedLM", str(folder), accelerated=accelerated)
        self.settings = fitted(settings, self.tokenizer, self.model.config)

    def fill(
        self,
        rows: Sequence[dict],
        *,
        batch_size: int = 8,
        bf16: bool = False,
        progress: bool = False,
        name: str = "rows",
    ) -> list[dict]:
        """One answer a row: `filled`, the text with the best of each mask, and `masks`, a list of
        candidates (`token` and `score`) for each.

        Args:
            rows: with texts that have masks.
            batch_size: features computed at once, each with its scores of the whole vocabulary.
            bf16, progress, name: as of `Predictor.predict`.

        Raises:
            TaskError: a column is missing, a text without a mask or with one that is cut off, a
                text that is refused.
        """
        rows = list(rows)
        if not rows:
            return []
        texts = self._texts(rows, name)
        encoding, origins = tokenize(
            self.tokenizer,
            texts,
            None,
            max_length=self.settings.max_length,
            settings=self.settings,
            name=name,
            return_offsets_mapping=True,
        )
        features = features_of(encoding)
        chosen = self._chosen(texts, encoding, origins, name)
        found = self._found(features, chosen, batch_size=batch_size, bf16=bf16, progress=progress)
        return [self._answer(text, one) for text, one in zip(texts, found, strict=True)]

    def _texts(self, rows: list[dict], name: str) -> list[str]:
        """Texts with the tokenizer's own mask."""
        settings, token = self.settings, self.tokenizer.mask_token
        check_columns(rows, {"text": settings.text}, name)
        check_texts(rows, [settings.text], name)
        mask = settings.mask or token
        for number, row in enumerate(rows, 1):
            if mask not in row[settings.text]:
                raise TaskError(
                    f"{name}, row {number}: no {mask} in {row[settings.text]!r:.60}; put it where "
                    "a word is missing, or name by mask what stands for one"
                )
        return [row[settings.text].replace(mask, token) for row in rows]

    def _chosen(self, texts, encoding, origins, name: str) -> list[dict[int, tuple[int, int]]]:
        """Of each row, the feature and position that each of its masks, by character, is filled
        at."""
        best: list[dict[int, tuple[int, int, int]]] = [{} for _ in texts]
        for feature, row in enumerate(origins):
            ids = encoding["input_ids"][feature]
            for position, token in enumerate(ids):
                if token != self.tokenizer.mask_token_id:
                    continue
                place = int(encoding["offset_mapping"][feature][position][0])
                context = min(position, len(ids) - 1 - position)
                if place not in best[row] or context > best[row][place][0]:
                    best[row][place] = context, feature, position
        for number, (text, found) in enumerate(zip(texts, best, strict=True), 1):
            count = text.count(self.tokenizer.mask_token)
            if len(found) != count:
                raise TaskError(
                    f"{name}, row {number}: {count - len(found)} of {count} masks stand behind the "
                    f"first {self.settings.max_length} tokens; choose overlong stride"
                )
        return [{place: b[1:] for place, b in one.items()} for one in best]

    def _found(self, features, chosen, **options) -> list[dict[int, list[dict]]]:
        """Candidates of each row's masks."""
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for row, places in enumerate(chosen):
            for place, (feature, position) in places.items():
                wanted.setdefault(feature, []).append((row, place, position))
        used = sorted(wanted)
        found: list[dict[int, list[dict]]] = [{} for _ in chosen]
        collator = padding_collator(self.tokenizer)
        used_features = [features[i] for i in used]
        for numbers, batch, outputs in forwards(self.model, used_features, collator, **options):
            # Padding may stand on the left.
            shifts = self._shifts(batch)
            for index, number in enumerate(numbers):
                for row, place, position in wanted[used[number]]:
                    logits = outputs.logits[index, position + shifts[index]]
                    found[row][place] = self._candidates(logits)
        return found

    def _shifts(self, batch: dict) -> list[int]:
        if self.tokenizer.padding_side == "right":
            return [0] * len(batch["input_ids"])
        return (batch["attention_mask"].shape[1] - batch["attention_mask"].sum(1)).tolist()

    def _candidates(self, logits) -> list[dict]:
        best = logits.float().softmax(-1).topk(min(self.settings.top, len(logits)))
        return [
            {"token": self.tokenizer.decode([token]).strip(), "score": score}
            for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def _answer(self, text: str, masks: dict[int, list[dict]]) -> dict:
        parts = text.split(self.tokenizer.mask_token)
        filled = parts[0]
        candidates = [masks[place] for place in sorted(masks)]
        for of_mask, part in zip(candidates, parts[1:], strict=True):
            filled += of_mask[0]["token"] + part
        return {"filled": filled, "masks": candidates}
