"""Measures on this GPU where a fused matmul beats cuBLAS with a kernel behind it.

    python -m fastbert.tune [--rows 1024 4096 16384] [--hidden 768 1024] [--dtypes bf16 fp16]

Writes the answers to the file `fastbert.kernels.tuned.path()` names (FASTBERT_TUNED, or one in the
user's cache), which is read at the next start. Nothing is ever measured inside a training step.
"""

import argparse
import json
import statistics

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MARGIN = 0.98
"""A fused form has to be this much of the unfused time, or less: measurements are not exact."""


def median_ms(functions: dict, rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of functions on the current GPU, taken in turn."""
    samples = {name: [] for name in functions}
    for number in range(rounds + 3):
        for name, function in functions.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            if number >= 3:
                samples[name].append((start, stop))
    torch.cuda.synchronize()
    return {
        n: statistics.median(a.elapsed_time(b) for a, b in found) for n, found in samples.items()
    }


def candidates(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> dict:
    """{(op, columns, depth): {"fused": function, "unfused": function}} of a layer."""
    from fastbert.kernels import bias_gelu, linear_gelu

    inner = 4 * hidden
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    weight_in = torch.randn(inner, hidden, device=device, dtype=dtype)
    weight_out = torch.randn(hidden, inner, device=device, dtype=dtype)
    bias = torch.randn(inner, device=device, dtype=dtype)
    preact = torch.randn(rows, inner, device=device, dtype=dtype)

    def unfused_fwd():
        return bias_gelu.bias_gelu_fwd(torch.nn.functional.linear(x, weight_in, bias), None, "none")

    def unfused_bwd():
        dpreact, _ = bias_gelu.bias_gelu_bwd(x @ weight_out, preact, None, "none")
        return dpreact, dpreact.sum(0, dtype=torch.float32)

    return {
        ("linear_gelu_fwd", inner, hidden): {
            "fused": lambda: linear_gelu.fused_fwd(x, weight_in, bias, "none", True),
            "unfused": unfused_fwd,
        },
        ("gelu_mlp_bwd", inner, hidden): {
            "fused": lambda: linear_gelu.fused_bwd(x, weight_out, preact, bias, "none"),
            "unfused": unfused_bwd,
        },
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16_384])
    parser.add_argument("--hidden", type=int, nargs="+", default=[768, 1024])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16", "fp16"])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: there is nothing to measure here")
        return 2
    from fastbert.kernels import tuned

    device = torch.device("cuda", torch.cuda.current_device())
    entries = dict(tuned.table())
    for name in options.dtypes:
        for hidden in options.hidden:
            for rows in options.rows:
                for (op, columns, depth), both in candidates(
                    rows, hidden, DTYPES[name], device
                ).items():
                    ms = median_ms(both)
                    key = tuned.key(op, tuned.arch_of(device), DTYPES[name], rows, columns, depth)
                    entries[key] = ms["fused"] < MARGIN * ms["unfused"]
                    print(f"{key}: fused {ms['fused']:.3f} ms, unfused {ms['unfused']:.3f} ms")
    file = tuned.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"written to {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
