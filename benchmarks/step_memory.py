"""Peak memory of a pretraining step above weights, gradients and optimizer state.

    python -m benchmarks.step_memory [--texts FILE_OR_FOLDER ...] [--layers 12]

Each side in a process of its own: the most physical memory the process had during a step (Linux
counts it, and the count is begun anew before that step), less what it had before the model was
made, less four times the weights: themselves, their gradients and AdamW's two moments, in fp32.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch

from .memory import begin_peak, peak, resident
from .models.pretraining import collator, features_of, full_and_ragged, step_of, stream, tokens_of
from .models.twins import twins
from .shapes import BASE
from .texts import paragraphs

WARM_UP = 2
BATCHES = {"full": 8, "ragged": 32}
KINDS = {
    "transformers": ("transformers", {}),
    "fastbert": ("fastbert", {}),
    "fastbert, last layer's subset": ("fastbert", {"last_layer_subset": True}),
}


def _measure(kind: str, options: dict, layers: int, batches: list[dict], tokenizer) -> dict:
    """Bytes of one side: of the state, and of the peak above it."""
    gc.collect()
    before = resident()
    models = twins("BertForMaskedLM", {**BASE, "num_hidden_layers": layers})
    model = models.pop(kind)
    models.clear()
    gc.collect()
    step, _ = step_of(kind, model, torch.bfloat16)
    if kind == "transformers":
        collate = collator(tokenizer)
        batches = [collate(features_of(inputs)) for inputs in batches]
    for inputs in batches[:WARM_UP]:
        step(inputs)
    begin_peak()
    step(batches[WARM_UP])
    state = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    return {"state": state, "above": peak() - before - state}


def _child(connection, *arguments) -> None:
    connection.send(_measure(*arguments))


def measured(*arguments) -> dict:
    """`_measure` in a new process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, *arguments))
    process.start()
    result = ours.recv()
    process.join()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, nargs="*", default=[])
    parser.add_argument("--layers", type=int, default=BASE["num_hidden_layers"])
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        found = paragraphs(arguments.texts, at_most=1 << 21)
        corpora, tokenizer = full_and_ragged(found, Path(folder), BASE["vocab_size"])
        for batch, count in BATCHES.items():
            tokens = tokens_of(corpora[batch], tokenizer, count)
            for name, (kind, options) in KINDS.items():
                batches = stream(
                    corpora[batch],
                    tokenizer,
                    tokens,
                    cross_documents=batch == "full",
                    **options,
                )
                inputs = [b.inputs for b in islice(batches, WARM_UP + 1)]
                result = measured(kind, options, arguments.layers, inputs, tokenizer)
                results[f"{batch}: {name}"] = {k: v >> 20 for k, v in result.items()}
                print(f"{batch}: {name}: {results[f'{batch}: {name}']} MiB", flush=True)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
