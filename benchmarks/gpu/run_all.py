"""Everything that needs a GPU, in one run of about eight minutes, the most important first.

    python benchmarks/gpu/run_all.py [--out DIR] [--dry-run]

Stages, each a process under a limit of its own, so that one that fails or hangs does not stop the
next: parity of every kernel and model on the device, a memory check, kernels against torch (and
flash-attn and apex where installed), BERT-base and BERT-large against transformers, then against
torch.compile. DIR/gpu_results.json is written after every stage and DIR/gpu_results.md, which
docs/gpu_results.md records, at the end. Needs torch, triton, transformers, numpy and pytest.
The CUDA C++ kernels take part where nvcc, ninja and setuptools can build them for this GPU.

`--dry-run` walks every line on a CPU, in Triton's interpreter and, where `make emulated` has built
them, with the emulated CUDA C++ kernels, at toy sizes; its times mean nothing.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
ME = str(Path(__file__).resolve())
# -P: the working directory must not come before the laid-out package.
PYTEST = ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
CUDA_BUILD, CUDA_PARITY = "build of CUDA C++", "parity of CUDA C++"
PARITY = [*PYTEST, "tests/gpu/test_kernels_on_cuda.py"]
# name: command, seconds allowed
STAGES = {
    "parity of kernels": ([*PARITY, "-k", "triton"], 120),
    "parity of launchers": ([*PYTEST, "tests/kernels/test_launch.py"], 60),
    "parity of models": ([*PYTEST, "tests/gpu/test_models_on_cuda.py"], 60),
    "parity of graphs": ([*PYTEST, "tests/gpu/test_graphs_on_cuda.py"], 60),
    CUDA_BUILD: (["setup.py", "-q", "build_ext"], 120),
    CUDA_PARITY: ([*PARITY, "-k", "not triton"], 60),
    "kernels": ([ME, "--stage", "kernels"], 105),
    "BERT-base": ([ME, "--stage", "base"], 60),
    "BERT-large": ([ME, "--stage", "large"], 60),
    "memory check": ([*PYTEST, "tests/kernels/test_launch.py"], 60),
    "BERT-base compiled": ([ME, "--stage", "compiled"], 90),
}
TOTAL = 480


def lay_out(folder: Path, dry_run: bool) -> None:
    """The package as an installation lays it out, kernels inside: nothing has to be installed."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "_C*.json")
    shutil.copytree(ROOT / "fastbert", folder / "fastbert", ignore=ignore)
    shutil.copytree(ROOT / "kernels", folder / "fastbert" / "kernels", ignore=ignore)
    if dry_run:
        for built in (ROOT / "fastbert").glob("_C_emulated.*"):
            shutil.copy(built, folder / "fastbert")


def why_no_cuda_build(dry_run: bool) -> str | None:
    """Why the CUDA C++ kernels are not built here; None if that can be tried."""
    from torch.utils.cpp_extension import CUDA_HOME

    if dry_run:
        return "a dry run takes what `make emulated` has built"
    if CUDA_HOME is None or torch.version.cuda is None:
        return "no nvcc, or a torch without CUDA"
    missing = [m for m in ("setuptools", "ninja") if importlib.util.find_spec(m) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def run_stage(name: str, limit: float, dry_run: bool, package: Path) -> dict:
    """Exit status, seconds, rows and the end of the output of one stage."""
    path = [str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment["FASTBERT_TEST_DEVICE"] = "cpu" if dry_run else "cuda"
    environment.pop("TRITON_INTERPRET", None)
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *STAGES[name][0]]
    if name == CUDA_BUILD:
        reason = why_no_cuda_build(dry_run)
        if reason is not None:
            return skipped(reason)
        major, minor = torch.cuda.get_device_capability()
        environment |= {"FASTBERT_BUILD": "cuda_only", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
        command += ["--build-lib", str(package), "--build-temp", str(package / "build")]
    if name == CUDA_PARITY and not list((package / "fastbert").glob("_C_*.json")):
        return skipped("the CUDA C++ kernels were not built")
    if name == "memory check":
        if dry_run or not Path(SANITIZER).exists():
            return skipped(f"no {SANITIZER}")
        command = [SANITIZER, "--error-exitcode", "3", *command]
    start = time.perf_counter()
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit
        )
        status, output = run.returncode, run.stdout + run.stderr
    except subprocess.TimeoutExpired as error:
        status, output = "timeout", (error.stdout or b"").decode()
    rows = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("row ")]
    seconds = round(time.perf_counter() - start, 1)
    return {"status": status, "seconds": seconds, "rows": rows, "tail": output[-2000:]}


def skipped(why: str) -> dict:
    """What stands in the results for a stage that cannot run here."""
    return {"status": "skipped", "seconds": 0, "rows": [], "tail": why}


def timing_stage(stage: str) -> None:
    """Prints the rows of one stage as they come."""
    from benchmarks.gpu import timings

    device = torch.device(os.environ["FASTBERT_TEST_DEVICE"])
    if device.type == "cpu":
        from fastbert.testing.interpreter import patch_bf16_dot

        patch_bf16_dot()
    if stage == "kernels":
        roof = timings.roofs(timings.Clock(device))
        print("row " + json.dumps({"case": "roofs", **roof}), flush=True)
        rows = timings.time_kernels(device, roof)
    else:
        size = "large" if stage == "large" else "base"
        rows = timings.time_models(device, size, compiled=stage == "compiled")
    for row in rows:
        print("row " + json.dumps(row), flush=True)


def page(results: dict) -> str:
    """The results as Markdown."""
    lines = [f"## {results['device']}, {results['date']}", ""]
    lines += [", ".join(f"{k} {v}" for k, v in results["versions"].items()), ""]
    for name, stage in results["stages"].items():
        summary = stage["tail"].strip().splitlines()[-1:] if stage["status"] != 0 else []
        lines.append(
            f"- {name}: status {stage['status']}, {stage['seconds']} s {' '.join(summary)}"
        )
    lines += ["", "| case | ms | of roof |", "|---|---|---|"]
    for stage in results["stages"].values():
        for row in stage["rows"]:
            if row["case"] == "roofs":
                rates = (
                    f"copy {row['bytes'] / 1e12:.2f} TB/s, matmul {row['flops'] / 1e12:.0f} TFLOP/s"
                )
                lines.append(f"| measured roofs | {rates} | |")
                continue
            times = ", ".join(f"{k} {v}" for k, v in row["ms"].items())
            roof = ", ".join(f"{k} {v}" for k, v in row.get("of roof", {}).items())
            lines.append(f"| {row['case']} | {times} | {roof} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", help="rows of one timing stage alone")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "build" / "gpu_results"))
    )
    arguments = parser.parse_args()
    if arguments.stage:
        timing_stage(arguments.stage)
        return 0
    if not arguments.dry_run and not torch.cuda.is_available():
        print("no CUDA device; --dry-run walks the script on a CPU")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder), arguments.dry_run)
        return run_stages(arguments.out, arguments.dry_run, Path(folder))


def run_stages(out: Path, dry_run: bool, package: Path) -> int:
    """Runs all stages and writes their results; 1 if one failed."""
    sys.path.insert(0, str(package))
    from fastbert import env

    out.mkdir(parents=True, exist_ok=True)
    results = {
        "device": "dry run" if dry_run else torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": env.report()["versions"],
        "stages": {},
    }
    end = time.monotonic() + TOTAL
    for name, (_, limit) in STAGES.items():
        # A CPU under load only has to get through.
        left = 5 * limit if dry_run else min(limit, end - time.monotonic())
        if left < 10:
            results["stages"][name] = {"status": "no time", "seconds": 0, "rows": [], "tail": ""}
            continue
        stage = results["stages"][name] = run_stage(name, left, dry_run, package)
        (out / "gpu_results.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: status {stage['status']}, {stage['seconds']} s", flush=True)
        if stage["status"] not in (0, "skipped"):
            print(stage["tail"], flush=True)
    (out / "gpu_results.md").write_text(page(results))
    return int(any(s["status"] not in (0, "skipped") for s in results["stages"].values()))


if __name__ == "__main__":
    sys.exit(main())
