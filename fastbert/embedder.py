"""Sentence embeddings in bulk from a sentence-transformers folder, on packed rows.

Letters: B texts, T packed rows, C hidden.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from fastbert.models.accelerate import accelerate
from fastbert.padding import pack

logger = logging.getLogger("fastbert")

POOLINGS = ("mean", "cls", "max")
TRUNCATIONS = ("cut", "stride", "refuse")
DTYPES = {"float32": torch.float32, "float16": torch.float16}
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
# Texts tokenized, sorted and held at once.
_AT_ONCE = 4096


@dataclass(frozen=True)
class _Settings:
    """What the folder of a sentence-transformers model says."""

    model: Path
    pooling: str = "mean"
    normalize: bool = False
    max_seq_length: int | None = None
    lowercase: bool = False
    include_prompt: bool = True
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None


class Embedder:
    """Turns texts into vectors, equal to sentence-transformers' for the same folder.

    Reads `modules.json`, the pooling and normalising modules, `max_seq_length`, `do_lower_case` and
    the prompts. A text's vector does not depend on what is encoded with it.

    Args:
        folder: a sentence-transformers folder, or a plain transformers one (mean pooling).
        pooling: "mean", "cls" or "max"; None: the folder's.
        normalize: to length 1; None: as the folder says.
        max_seq_length: tokens of a text, special ones included; None: the folder's.
        truncation: of a longer text "cut" keeps the head, "stride" takes the mean of the vectors of
            overlapping windows, "refuse" raises; the log says how many are cut or strided.
        stride: tokens that neighbouring windows share.
        tokens_per_batch: packed rows of a forward; a longer text is a batch of its own.
        dtype: of the model; None: that of the checkpoint.
        device: of the model.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: unknown settings, a pooling or a model fastbert does not compute.
        NotImplementedError: a module fastbert does not know.
    """

    def __init__(
        self,
        folder,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        max_seq_length: int | None = None,
        truncation: str = "cut",
        stride: int = 32,
        tokens_per_batch: int = 4096,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ):
        if pooling is not None:
            _check_choice("pooling", pooling, POOLINGS)
        _check_choice("truncation", truncation, TRUNCATIONS)
        for name, value in (
            ("tokens_per_batch", tokens_per_batch),
            ("max_seq_length", max_seq_length),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        from transformers import AutoModel, AutoTokenizer

        settings = _read_settings(Path(folder))
        options = {} if dtype is None else {"dtype": dtype}
        model = accelerate(AutoModel.from_pretrained(settings.model, **options))
        if hasattr(model, "pooler"):
            model.pooler = None
        self.model = model.to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        if not tokenizer.is_fast:
            raise ValueError(f"{folder} has no fast tokenizer; save one with a tokenizer.json")
        self.pooling = pooling or settings.pooling
        self.normalize = settings.normalize if normalize is None else normalize
        self.max_seq_length = max_seq_length or settings.max_seq_length
        if self.max_seq_length is None:
            limit = self.model.config.max_position_embeddings - self.model.first_position
            self.max_seq_length = min(limit, tokenizer.model_max_length)
        self.truncation = truncation
        self.stride = stride
        self.tokens_per_batch = tokens_per_batch
        self.prompts = settings.prompts or {}
        self._settings = settings
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if truncation == "stride" and not 0 <= stride < self.max_seq_length - 8:
            raise ValueError(
                f"stride must lie between 0 and max_seq_length - 8, got {stride} where "
                f"max_seq_length is {self.max_seq_length}"
            )
        if truncation != "refuse":
            shared = stride if truncation == "stride" else 0
            self._tokenizer.enable_truncation(self.max_seq_length, stride=shared)

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        output: str = "numpy",
        dtype: str = "float32",
        progress: bool = False,
    ):
        """Vectors of a list of texts.

        Args:
            texts: B texts; an empty one is its special tokens.
            prompt_name: of the folder's prompts. prompt: put before every text instead.
            output: "numpy" or "torch". dtype: "float32" or "float16".
            progress: show a bar on stderr.

        Returns:
            `(B, C)`, in the order of the texts, on the CPU.

        Raises:
            TypeError: texts is one string, or holds something else than strings.
            ValueError: unknown settings, or a text too long under truncation="refuse".
        """
        _check_choice("output", output, ("numpy", "torch"))
        _check_choice("dtype", dtype, tuple(DTYPES))
        prefix = self.prefix(prompt_name, prompt)
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, got one string; write [text]")
        for number, text in enumerate(texts):
            _check_text(number, text)
        from tqdm import tqdm

        vectors = torch.empty(len(texts), self.model.config.hidden_size, dtype=DTYPES[dtype])
        done = 0
        with tqdm(total=len(texts), unit="text", disable=not progress) as bar:
            for chunk in self._chunks(texts, prefix):
                vectors[done : done + len(chunk)] = chunk
                done += len(chunk)
                bar.update(len(chunk))
        return vectors.numpy() if output == "numpy" else vectors

    def stream(
        self,
        texts: Iterable[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        first: int = 0,
    ) -> Iterator[np.ndarray]:
        """One `(C,)` float32 vector after the other, of any number of texts in bounded memory.

        Args:
            texts: strings. prompt_name, prompt: as in `encode`.
            first: number of the first text in messages.

        Raises:
            TypeError, ValueError: as `encode`, when the text at fault is reached.
        """
        for chunk in self._chunks(texts, self.prefix(prompt_name, prompt), first):
            yield from chunk.numpy()

    def description(self) -> dict:
        """What decides the vectors, for JSON."""
        return {
            "model": str(self._settings.model.resolve()),
            "dtype": str(self.model.dtype),
            "pooling": self.pooling,
            "normalize": self.normalize,
            "max_seq_length": self.max_seq_length,
            "truncation": self.truncation,
            "stride": self.stride,
        }

    def prefix(self, prompt_name: str | None, prompt: str | None) -> str:
        """What is put before every text.

        Raises:
            ValueError: a name that the folder's prompts do not have.
            NotImplementedError: the folder's pooling leaves prompts out.
        """
        if prompt is None:
            name = self._settings.default_prompt if prompt_name is None else prompt_name
            if name is not None and name not in self.prompts:
                raise ValueError(f"prompt_name must be one of {sorted(self.prompts)}, got {name!r}")
            prompt = self.prompts.get(name, "")
        if prompt and not self._settings.include_prompt:
            raise NotImplementedError(
                "the folder's pooling leaves the prompt out (include_prompt is false), which "
                "fastbert does not compute; use sentence-transformers with fastbert.accelerate"
            )
        return prompt

    def _chunks(self, texts: Iterable[str], prefix: str, first: int = 0) -> Iterator[torch.Tensor]:
        """`(B, C)` fp32 of some texts at a time; the next ones are tokenized meanwhile."""
        numbered = enumerate(texts, first)

        def tokenized() -> list[list[list[int]]]:
            return self._tokenize(list(islice(numbered, _AT_ONCE)), prefix)

        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(tokenized)
            while windows := coming.result():
                coming = thread.submit(tokenized)
                vectors = self._embed([ids for of_text in windows for ids in of_text])
                counts = [len(of_text) for of_text in windows]
                yield vectors if self.truncation != "stride" else self._joined(vectors, counts)

    def _joined(self, vectors: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """The mean of each text's windows; of unit vectors, at length 1 again."""
        means = torch.segment_reduce(vectors, "mean", lengths=torch.tensor(counts))
        return functional.normalize(means, dim=-1) if self.normalize else means

    def _tokenize(self, numbered: list[tuple[int, str]], prefix: str) -> list[list[list[int]]]:
        """The windows of each text; one, but under "stride"."""
        for number, text in numbered:
            _check_text(number, text)
        plain = [prefix + text for _, text in numbered]
        if self._settings.lowercase:
            plain = [text.lower() for text in plain]
        encodings = self._tokenizer.encode_batch_fast(plain)
        ids = [encoding.ids for encoding in encodings]
        for (number, _), row in zip(numbered, ids, strict=True):
            if len(row) > self.max_seq_length:
                raise ValueError(
                    f"text {number} has {len(row)} tokens, max_seq_length is "
                    f"{self.max_seq_length}; shorten it or use truncation='cut'"
                )
            if not row:
                raise ValueError(f"text {number} has no tokens; leave it out")
        overlong = sum(bool(encoding.overflowing) for encoding in encodings)
        if overlong:
            strided = self.truncation == "stride"
            done = "encoded in overlapping windows" if strided else "cut"
            logger.warning(
                "%d of %d texts, up to number %d, have more than %d tokens and are %s",
                *(overlong, len(ids), numbered[-1][0], self.max_seq_length, done),
            )
        if self.truncation != "stride":
            return [[row] for row in ids]
        return [[e.ids, *(more.ids for more in e.overflowing)] for e in encodings]

    def _embed(self, ids: list[list[int]]) -> torch.Tensor:
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        vectors = torch.empty(len(ids), self.model.config.hidden_size)
        for batch in _batches(order, ids, self.tokens_per_batch):
            vectors[batch] = self._forward([ids[i] for i in batch]).cpu()
        return vectors

    @torch.no_grad()
    def _forward(self, ids: list[list[int]]) -> torch.Tensor:
        lengths = [len(row) for row in ids]
        packed = pack(
            [{"input_ids": row} for row in ids],
            num_tokens=sum(lengths),
            num_sequences=len(ids),
            max_seqlen=max(lengths),
            first_position=self.model.first_position,
        )
        first = packed.pop("pooled_rows")
        device = self.model.device
        packed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in packed.items()}
        rows = self.model(**packed).last_hidden_state[0].float()
        if self.pooling == "cls":
            vectors = rows[first.to(device)]
        else:
            # Each text's rows are summed in their order, whatever else is in the batch.
            sizes = torch.tensor(lengths, device=device)
            vectors = torch.segment_reduce(rows, self.pooling, lengths=sizes)
        return functional.normalize(vectors, dim=-1) if self.normalize else vectors


def _batches(order: list[int], ids, budget: int) -> Iterator[list[int]]:
    batch, used = [], 0
    for i in order:
        if batch and used + len(ids[i]) > budget:
            yield batch
            batch, used = [], 0
        batch.append(i)
        used += len(ids[i])
    if batch:
        yield batch


def _check_choice(name: str, value, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _check_text(number: int, text) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"text {number} must be a string, got {type(text).__name__}; leave it out or use ''"
        )


def _read_settings(folder: Path) -> _Settings:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; download the model and give its path")
    if not (folder / "modules.json").is_file():
        return _Settings(folder)
    modules = json.loads((folder / "modules.json").read_text())
    found = {"model": folder}
    for place, module in enumerate(modules):
        kind, path = module["type"].rsplit(".", 1)[-1], folder / module["path"]
        if kind == "Transformer" and place == 0:
            config = _json(path / "sentence_bert_config.json")
            found["model"] = path
            found["max_seq_length"] = config.get("max_seq_length")
            found["lowercase"] = config.get("do_lower_case", False)
        elif kind == "Pooling" and place == 1:
            found |= _read_pooling(path / "config.json")
        elif kind == "Normalize" and place == 2:
            found["normalize"] = True
        else:
            raise NotImplementedError(
                f"module {place} of {folder} is {kind}; fastbert.Embedder computes Transformer, "
                "Pooling, Normalize in this order; use fastbert.accelerate on the "
                "SentenceTransformer instead"
            )
    prompts = _json(folder / "config_sentence_transformers.json")
    return _Settings(
        **found,
        prompts=prompts.get("prompts"),
        default_prompt=prompts.get("default_prompt_name"),
    )


def _read_pooling(path: Path) -> dict:
    config = _json(path)
    chosen = [k for k, v in config.items() if k.startswith("pooling_mode_") and v]
    mode = config.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else [_MODES.get(name, name) for name in chosen]
    if len(names) != 1 or names[0] not in POOLINGS:
        raise ValueError(f"{path} asks for the poolings {names}; fastbert has one of {POOLINGS}")
    return {"pooling": names[0], "include_prompt": config.get("include_prompt", True)}


def _json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}
