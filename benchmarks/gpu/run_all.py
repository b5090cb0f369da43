"""Everything that needs a GPU, in one run of about eight minutes, each part under its own limit.

    python benchmarks/gpu/run_all.py [--out DIR]

Runs the Triton kernels' tests on the device, the ops and models on CUDA tensors, and times the
encoder and the masked-LM step beside transformers. A part that fails or runs out of time does not
stop the next. Writes DIR/gpu_results.json and DIR/gpu_results.md; the latter is what
docs/gpu_results.md records.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# name: command, seconds allowed
PARTS = {
    "kernels": (["-m", "pytest", "-q", "tests/kernels"], 120),
    "ops on CUDA": (["-m", "pytest", "-q", "tests/gpu"], 150),
    "timing": ([__file__, "--timing"], 150),
}


def run_part(command: list[str], limit: int) -> dict:
    """Exit status, seconds and the end of the output of one part."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FASTBERT_TEST_DEVICE": "cuda"}
    environment.pop("TRITON_INTERPRET", None)
    start = time.perf_counter()
    try:
        run = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        status, output = run.returncode, run.stdout + run.stderr
    except subprocess.TimeoutExpired as error:
        status, output = "timeout", str(error.stdout or "")
    seconds = round(time.perf_counter() - start, 1)
    return {"status": status, "seconds": seconds, "tail": output[-3000:]}


def time_on_gpu(function, rounds: int = 20) -> float:
    """Median milliseconds by CUDA events."""
    for _ in range(3):
        function()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def timing() -> dict:
    """Kernels against torch's, and models against transformers, bf16."""
    from benchmarks.models.twins import padded, twins, with_labels
    from benchmarks.shapes import BASE, RAGGED_32X128
    from fastbert import use_backend
    from fastbert.ops.bias_gelu import bias_gelu
    from fastbert.ops.philox import row_keep_mask

    x = torch.randn(16_384, 3072, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(3072, device="cuda", dtype=torch.bfloat16)
    state = torch.tensor([1, 2], device="cuda")
    results = {}
    with use_backend(bias_gelu="triton", philox="triton"):
        results["bias_gelu"] = time_on_gpu(lambda: bias_gelu(x, bias, approximate="none"))
        results["row_keep_mask"] = time_on_gpu(
            lambda: row_keep_mask(state, 16_384, 3072, dropout_p=0.1, site=1)
        )
    results["bias_gelu torch"] = time_on_gpu(lambda: torch.nn.functional.gelu(x + bias))
    models = twins("BertForMaskedLM", BASE)
    inputs = {k: v.cuda() for k, v in padded(RAGGED_32X128, BASE["vocab_size"]).items()}
    labelled = with_labels({k: v.cpu() for k, v in inputs.items()})
    labelled = {k: v.cuda() for k, v in labelled.items()}
    for name, model in models.items():
        model.cuda()

        def forward(model=model):
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                model.bert(**inputs)

        def step(model=model):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**labelled).loss
            loss.backward()
            model.zero_grad(set_to_none=True)

        results[f"forward ragged 32x128 {name}"] = time_on_gpu(forward)
        model.train()
        results[f"masked-LM step ragged 32x128 {name}"] = time_on_gpu(step)
        model.eval()
    return results


def write(results: dict, out: Path) -> None:
    """The JSON and the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_results.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [f"## {results['device']}, torch {results['torch']}, {results['date']}", ""]
    for name, part in results["parts"].items():
        lines.append(f"- {name}: status {part['status']}, {part['seconds']} s")
    lines += ["", "```", *(p["tail"] for p in results["parts"].values()), "```", ""]
    (out / "gpu_results.md").write_text("\n".join(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timing", action="store_true", help="the timing part alone")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; this script is the part of the checks that needs one")
        return 2
    if arguments.timing:
        print(json.dumps(timing(), indent=1))
        return 0
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "parts": {},
    }
    for name, (command, limit) in PARTS.items():
        results["parts"][name] = run_part(command, limit)
        write(results, arguments.out)
        print(f"{name}: {results['parts'][name]['status']}", flush=True)
    return int(any(part["status"] != 0 for part in results["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
