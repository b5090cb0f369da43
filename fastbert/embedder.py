"""Sentence embeddings in bulk from a sentence-transformers folder, on packed rows.

Letters: B texts, T packed rows, C hidden, F the width of a vector.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fastbert import embedding_workers
from fastbert.models.accelerate import accelerate
from fastbert.models.freeze import freeze as drop_weights
from fastbert.models.packed_model import PackedModel
from fastbert.models.quantize import quantize as quantize_weights
from fastbert.padding import pack
from fastbert.sentence_modules import Dense, Normalize, check_poolings, pool, read_folder

logger = logging.getLogger("fastbert")

TRUNCATIONS = ("cut", "stride", "refuse")
DTYPES = {"float32": torch.float32, "float16": torch.float16}


class Embedder:
    """Turns texts into vectors, equal to sentence-transformers' for the same folder.

    Reads `modules.json`, the pooling and what stands behind it (Dense, LayerNorm, Normalize),
    `max_seq_length`, `do_lower_case` and the prompts. A text's vector does not depend on what is
    encoded with it. Texts are read `texts_at_once`, sorted by length and packed; the next ones are
    tokenized meanwhile.

    With several workers, processes that each hold the model share the texts: on many cores that
    scales where threads wait for each other. They start at the first text, stay until `close()`
    (`with Embedder(...) as embedder:`), load the folder anew (changes made to `model` do not reach
    them) and give the same bits. As always with processes that are started afresh, a script must
    begin its work under `if __name__ == "__main__":`.

    Args:
        folder: a sentence-transformers folder, or a plain transformers one (mean pooling).
        pooling: one or several of "mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean",
            "lasttoken", side by side in this order; None: the folder's.
        normalize: to length 1; None: as the folder says.
        max_seq_length: tokens of a text, special ones included; None: the folder's, or what the
            tokenizer and the encoder's positions allow.
        truncation: of a longer text "cut" keeps one end, as the tokenizer's truncation_side says,
            "stride" takes the mean of the vectors of overlapping windows, "refuse" raises; the log
            says how many are cut or strided.
        stride: tokens that neighbouring windows share.
        tokens_per_batch: packed rows of a forward; a longer text is a batch of its own.
        texts_at_once: texts read, sorted and held at a time; each worker holds as many.
        dtype: of the model; None: that of the checkpoint. What is behind the encoder is fp32.
        device: of the model.
        freeze: drop the layers' weights once they are packed (`fastbert.freeze`): the same vectors
            from less memory, on a CPU, for models with post-norm layers.
        quantize: `dynamic` or `weight_only`: the layers' weights in int8 (`fastbert.quantize`),
            for the same models on a CPU; None: as they are.
        workers: processes; 1: this one.
        threads: of each worker; None: the cores allowed, shared out.

    Attributes:
        model: the encoder. dimension: F. prompts: by name.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: unknown settings, a model fastbert does not compute, or cannot freeze or
            quantise where that is asked, a max_seq_length beyond the encoder's positions or below
            what the special tokens take, modules that do not fit.
        NotImplementedError: a module fastbert does not know.
    """

    def __init__(
        self,
        folder,
        *,
        pooling: str | Sequence[str] | None = None,
        normalize: bool | None = None,
        max_seq_length: int | None = None,
        truncation: str = "cut",
        stride: int = 32,
        tokens_per_batch: int = 4096,
        texts_at_once: int = 4096,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        freeze: bool = False,
        quantize: str | None = None,
        workers: int = 1,
        threads: int | None = None,
    ):
        counts = {
            "tokens_per_batch": tokens_per_batch,
            "texts_at_once": texts_at_once,
            "max_seq_length": max_seq_length,
            "workers": workers,
            "threads": threads,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if workers > 1 and torch.device(device).type != "cpu":
            raise ValueError(f"workers must be 1 on {device}, got {workers}; they share CPU cores")
        _check_choice("truncation", truncation, TRUNCATIONS)
        self._folder = read_folder(Path(folder))
        self.poolings = _poolings(pooling, self._folder.poolings)
        from transformers import AutoModel, AutoTokenizer

        options = {} if dtype is None else {"dtype": dtype}
        model = accelerate(AutoModel.from_pretrained(self._folder.model, **options))
        if hasattr(model, "pooler"):
            model.pooler = None
        self.model = model.to(device).eval()
        self.quantization = quantize
        if quantize is not None:
            quantize_weights(self.model, quantize)
        elif freeze:
            drop_weights(self.model)
        self._behind = nn.Sequential(*_normalizing(self._folder.modules, normalize)).to(device)
        self.dimension = _width(
            self.model.config.hidden_size * len(self.poolings), self._behind, folder
        )
        tokenizer = AutoTokenizer.from_pretrained(self._folder.model)
        if not tokenizer.is_fast:
            raise ValueError(f"{folder} has no fast tokenizer; save one with a tokenizer.json")
        positions = positions_of(self.model)
        self.max_seq_length = max_seq_length or self._folder.max_seq_length
        if self.max_seq_length is None:
            self.max_seq_length = min(positions, tokenizer.model_max_length)
        _check_length(self.max_seq_length, positions, tokenizer.num_special_tokens_to_add())
        if truncation == "stride":
            _check_stride(stride, self.max_seq_length)
        self.truncation = truncation
        self.stride = stride
        self.tokens_per_batch = tokens_per_batch
        self.texts_at_once = texts_at_once
        self.prompts = self._folder.prompts
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if truncation != "refuse":
            side = tokenizer.truncation_side if truncation == "cut" else "right"
            shared = stride if truncation == "stride" else 0
            self._tokenizer.enable_truncation(self.max_seq_length, stride=shared, direction=side)
        if self._folder.lowercase:
            _lowercase(self._tokenizer)
        self._pool = None
        if workers > 1:
            settings = {
                "pooling": self.poolings,
                "normalize": normalize,
                "max_seq_length": self.max_seq_length,
                "truncation": truncation,
                "stride": stride,
                "tokens_per_batch": tokens_per_batch,
                "dtype": self.model.dtype,
                "freeze": freeze,
                "quantize": quantize,
            }
            self._pool = embedding_workers.Workers(workers, threads, folder, settings)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self) -> None:
        """Ends the workers, if there are any; the next text starts new ones."""
        if self._pool is not None:
            self._pool.close()

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
            `(B, F)`, in the order of the texts, on the CPU.

        Raises:
            TypeError: texts is one string, or holds something else than strings.
            ValueError: unknown settings, or a text too long under truncation="refuse".
            RuntimeError: a worker died.
        """
        _check_choice("output", output, ("numpy", "torch"))
        _check_choice("dtype", dtype, tuple(DTYPES))
        prefix = self.prefix(prompt_name, prompt)
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, got one string; write [text]")
        if not hasattr(texts, "__len__"):
            raise TypeError(
                f"texts must be a list of strings, got {type(texts).__name__}; `stream` takes "
                "iterators"
            )
        for number, text in enumerate(texts):
            _check_text(number, text)
        from tqdm import tqdm

        vectors = torch.empty(len(texts), self.dimension, dtype=DTYPES[dtype])
        done = 0
        with tqdm(total=len(texts), unit="text", disable=not progress) as bar:
            for chunk in self._chunks(texts, prefix, at_once=self._share(len(texts))):
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
        dtype: str = "float32",
        first: int = 0,
    ) -> Iterator[np.ndarray]:
        """One `(F,)` vector after the other, of any number of texts in bounded memory.

        Texts are read where the vectors are asked for, in the same thread, at most
        `texts_at_once` times one more than the workers' tasks under way (two a worker) ahead.

        Args:
            texts: strings. prompt_name, prompt, dtype: as in `encode`.
            first: number of the first text in messages.

        Raises:
            TypeError, ValueError, RuntimeError: as `encode`, when the text at fault is reached.
        """
        _check_choice("dtype", dtype, tuple(DTYPES))
        prefix = self.prefix(prompt_name, prompt)
        for chunk in self._chunks(texts, prefix, first, self.texts_at_once):
            yield from chunk.to(DTYPES[dtype]).numpy()

    def description(self) -> dict:
        """What decides the vectors, for JSON."""
        return {
            "model": str(self._folder.model.resolve()),
            "dtype": str(self.model.dtype),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "pooling": list(self.poolings),
            "behind": [type(module).__name__ for module in self._behind],
            "max_seq_length": self.max_seq_length,
            "truncation": self.truncation,
            "stride": self.stride,
            **({} if self.quantization is None else {"quantize": self.quantization}),
        }

    def prefix(self, prompt_name: str | None, prompt: str | None) -> str:
        """What is put before every text.

        Raises:
            ValueError: a name that the folder's prompts do not have.
        """
        if prompt is not None:
            return prompt
        name = self._folder.default_prompt if prompt_name is None else prompt_name
        if name is not None and name not in self.prompts:
            raise ValueError(f"prompt_name must be one of {sorted(self.prompts)}, got {name!r}")
        return self.prompts.get(name, "")

    def embed(self, numbered: list[tuple[int, str]], prefix: str) -> torch.Tensor:
        """`(B, F)` fp32 of texts with the numbers they have in messages, here and at once."""
        return self._vectors(self._tokenize(numbered, prefix), self._skipped(prefix))

    # --- texts in order, some at a time

    def _share(self, count: int) -> int:
        """Texts of a task, so that each worker gets several of few texts."""
        if self._pool is None:
            return self.texts_at_once
        return min(self.texts_at_once, -(-count // (4 * self._pool.count)) or 1)

    def _chunks(
        self, texts: Iterable[str], prefix: str, first: int = 0, at_once: int = 1
    ) -> Iterator[torch.Tensor]:
        """`(B, F)` fp32 of `at_once` texts at a time."""
        numbered = enumerate(texts, first)
        parts = iter(lambda: list(islice(numbered, at_once)), [])
        if self._pool is not None:
            tasks = (self._pool.submit(part, prefix) for part in parts)
            for vectors in _in_order(tasks, 2 * self._pool.count):
                yield torch.from_numpy(vectors)
            return
        skipped = self._skipped(prefix)
        with ThreadPoolExecutor(1) as thread:
            tasks = (thread.submit(self._tokenize, part, prefix) for part in parts)
            for windows in _in_order(tasks, 1):
                yield self._vectors(windows, skipped)

    # --- tokens

    def _skipped(self, prefix: str) -> int:
        """Tokens of the prompt that the folder's pooling leaves out."""
        if self._folder.include_prompt or not prefix:
            return 0
        if self.truncation == "stride":
            raise ValueError(
                "the folder's pooling leaves the prompt out, and truncation='stride' would need it "
                "in every window; use 'cut' or 'refuse'"
            )
        ids = self._tokenizer.encode(prefix).ids
        return len(ids) - (ids[-1] in self._special_ids)

    def _tokenize(self, numbered: list[tuple[int, str]], prefix: str) -> list[list[list[int]]]:
        """The windows of each text; one, but under "stride"."""
        for number, text in numbered:
            _check_text(number, text)
        encodings = self._tokenizer.encode_batch_fast([prefix + text for _, text in numbered])
        ids = [encoding.ids for encoding in encodings]
        skipped = self._skipped(prefix)
        for (number, _), row in zip(numbered, ids, strict=True):
            if len(row) > self.max_seq_length:
                raise ValueError(
                    f"text {number} has {len(row)} tokens, max_seq_length is "
                    f"{self.max_seq_length}; shorten it or use truncation='cut'"
                )
            if len(row) <= skipped:
                raise ValueError(
                    f"text {number} has {len(row)} tokens, of which {skipped} of the prompt are "
                    "not pooled, so none is left; leave it out, or shorten the prompt"
                )
        overlong = sum(bool(encoding.overflowing) for encoding in encodings)
        if overlong:
            done = "encoded in overlapping windows" if self.truncation == "stride" else "cut"
            logger.warning(
                "%d of %d texts, up to number %d, have more than %d tokens and are %s",
                *(overlong, len(ids), numbered[-1][0], self.max_seq_length, done),
            )
        if self.truncation != "stride":
            return [[row] for row in ids]
        return [[e.ids, *(more.ids for more in e.overflowing)] for e in encodings]

    # --- vectors

    def _vectors(self, windows: list[list[list[int]]], skipped: int) -> torch.Tensor:
        """`(B, F)` of texts; the mean of a text's windows, of unit vectors at length 1 again."""
        vectors = self._embed([ids for of_text in windows for ids in of_text], skipped)
        if self.truncation != "stride":
            return vectors
        counts = torch.tensor([len(of_text) for of_text in windows])
        means = torch.segment_reduce(vectors, "mean", lengths=counts)
        unit = len(self._behind) > 0 and isinstance(self._behind[-1], Normalize)
        return self._behind[-1](means) if unit else means

    def _embed(self, ids: list[list[int]], skipped: int) -> torch.Tensor:
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        vectors = torch.empty(len(ids), self.dimension)
        for batch in _batches(order, ids, self.tokens_per_batch):
            vectors[batch] = self._forward([ids[i] for i in batch], skipped).cpu()
        return vectors

    @torch.no_grad()
    def _forward(self, ids: list[list[int]], skipped: int) -> torch.Tensor:
        lengths = [len(row) for row in ids]
        packed = pack(
            [{"input_ids": row} for row in ids],
            num_tokens=sum(lengths),
            num_sequences=len(ids),
            max_seqlen=max(lengths),
            first_position=self.model.first_position,
        )
        # All rows are real, which without a mask nobody has to look for.
        del packed["attention_mask"], packed["pooled_rows"]
        device = self.model.device
        packed = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in packed.items()}
        rows = self.model(**packed).last_hidden_state[0].float()
        sizes = torch.tensor(lengths, device=device)
        return self._behind(pool(rows, sizes, self.poolings, skipped=skipped))


def positions_of(model: PackedModel) -> int:
    """How many positions a text may have.

    RoBERTa's (Liu et al. 2019) begin behind the padding token's id, so a table of 514 rows serves
    512.
    """
    table = getattr(model.embeddings, "position_embeddings", None)
    rows = model.config.max_position_embeddings if table is None else table.num_embeddings
    return rows - model.first_position


def _in_order(tasks: Iterable[Future], ahead: int) -> Iterator:
    """Results in the order of the tasks, `ahead` of them begun before they are needed."""
    waiting: deque[Future] = deque()
    try:
        for task in tasks:
            waiting.append(task)
            if len(waiting) > ahead:
                yield embedding_workers.result_of(waiting.popleft())
        while waiting:
            yield embedding_workers.result_of(waiting.popleft())
    finally:
        for task in waiting:
            task.cancel()


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


# --- settings -------------------------------------------------------------------------------------


def _poolings(given: str | Sequence[str] | None, of_folder: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return of_folder
    poolings = (given,) if isinstance(given, str) else tuple(given)
    check_poolings("pooling", poolings)
    return poolings


def _normalizing(modules: Sequence[nn.Module], normalize: bool | None) -> list[nn.Module]:
    if normalize is False:
        return [module for module in modules if not isinstance(module, Normalize)]
    ends = bool(modules) and isinstance(modules[-1], Normalize)
    return [*modules, *([Normalize()] if normalize and not ends else [])]


def _width(width: int, behind: nn.Sequential, folder) -> int:
    """F, of vectors that the pooling makes `width` wide."""
    for module in behind:
        expected = {Dense: "in_features", nn.LayerNorm: "normalized_shape"}.get(type(module))
        if expected is None:
            continue
        wanted = getattr(module, expected)
        wanted = wanted if isinstance(wanted, int) else wanted[0]
        if wanted != width:
            raise ValueError(
                f"the pooling of {folder} makes vectors of {width}, its {type(module).__name__} "
                f"takes {wanted}; leave pooling to the folder"
            )
        width = getattr(module, "out_features", width)
    return width


def _check_length(max_seq_length: int, positions: int, special: int) -> None:
    if max_seq_length > positions:
        raise ValueError(
            f"max_seq_length is {max_seq_length}, the encoder has {positions} positions; give "
            f"max_seq_length={positions} or less"
        )
    if max_seq_length <= special:
        raise ValueError(
            f"max_seq_length must be more than the {special} special tokens of every text, got "
            f"{max_seq_length}"
        )


def _check_stride(stride: int, max_seq_length: int) -> None:
    if not 0 <= stride < max_seq_length - 8:
        raise ValueError(
            f"stride must lie between 0 and max_seq_length - 8, got {stride} where max_seq_length "
            f"is {max_seq_length}"
        )


def _lowercase(tokenizer) -> None:
    """Lowercases before what the tokenizer does itself, character by character."""
    from tokenizers.normalizers import Lowercase
    from tokenizers.normalizers import Sequence as Chain

    own = tokenizer.normalizer
    tokenizer.normalizer = Lowercase() if own is None else Chain([Lowercase(), own])


def _check_choice(name: str, value, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def _check_text(number: int, text) -> None:
    if not isinstance(text, str):
        raise TypeError(
            f"text {number} must be a string, got {type(text).__name__}; leave it out or use ''"
        )
